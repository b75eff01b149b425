"""Our parser is used with a nats-py that it fits; with another one everything works without it, or is refused."""

import tomllib
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser
from structlog.testing import capture_logs

from gpu_autoscaler.bus.nats.clients import SUPPORTED, FrameWire, StockWire, missing_names, open_wire
from gpu_autoscaler.model.errors import ConfigError


async def _other(*_: object) -> None:
    """A method of the same name with other content."""


def _other_sync(*_: object) -> None:
    """A method that is not awaited."""


def test_the_installed_version_fits() -> None:
    """The parser is replaced without a warning."""
    with capture_logs() as logs:
        wire = open_wire(requires_tls=False)

    assert missing_names() == ()
    assert isinstance(wire, FrameWire)
    assert logs == []


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (Client, "_read_loop", _other),
        (Client, "_read_loop", None),
        (Client, "_send_command", _other_sync),
        (Client, "_flush_pending", _other_sync),
        (Parser, "parse", _other_sync),
        (Subscription, "__init__", _other_sync),
    ],
)
def test_another_version_is_read_by_its_own_parser(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, replacement: object
) -> None:
    """Each name that our parser needs is missed, and reported with what to install."""
    monkeypatch.setattr(owner, name, replacement)

    with capture_logs() as logs:
        wire = open_wire(requires_tls=False)

    assert isinstance(wire, StockWire)
    assert not isinstance(wire.client._ps, FrameWire)
    (warning,) = logs
    assert warning["missing"] == f"{owner.__name__}.{name}".replace("__init__", "_id")
    assert warning["step"].startswith("install nats-py")


def test_a_version_that_cannot_be_kept_from_plain_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would send its password before we see that the server does not encrypt."""
    monkeypatch.setattr(Client, "_process_connect_init", _other)

    with pytest.raises(ConfigError, match="without TLS; install nats-py"):
        open_wire(requires_tls=True)
    open_wire(requires_tls=False)


def test_what_to_install_is_what_the_package_requires() -> None:
    """The advice names the versions of pyproject.toml."""
    required = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]

    assert SUPPORTED in [name.replace("[nkeys]", "") for name in required]
