"""The auth callout on a real broker. The API server's own answers are in tests/integration/kube/test_node_logins.py."""

import asyncio
import json
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from tests.support.node_watchers import gateway, serving_broker, until

from gpu_autoscaler.bus.nats.auth_callout import Issuer, new_issuer_seed, read_login
from gpu_autoscaler.bus.nats.link import abort
from gpu_autoscaler.bus.permissions import SUBSCRIPTIONS_COUNT_MAX
from gpu_autoscaler.cloudmeta.reports import REPORT_BYTES_MAX, report_subject, watcher_inbox
from gpu_autoscaler.kube.protocol import Kind, NotFound, ObjectT
from gpu_autoscaler.model.errors import ConfigError, InvalidFact, PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler_services.node_gateway.admission import AUDIENCE, Admission

pytestmark = [pytest.mark.integration]

ACCOUNT = "system:serviceaccount:ours:watcher"
EXTRA = "authentication.kubernetes.io/"


class Api:
    """Reviews of tokens, which are names of nodes."""

    def __init__(self, *nodes: str, **changes: Any) -> None:  # noqa: ANN401 - of a status
        self._nodes: dict[str, dict[str, Any]] = {
            name: {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": {}} for name in nodes
        }
        self._changes = changes
        self.calls_count = 0
        for name, node in self._nodes.items():
            node["spec"] = {"providerID": f"aws:///a/i-{name}"}

    def change_node(self, name: str, **parts: Mapping[str, Any]) -> None:
        """Replace parts of a node."""
        self._nodes[name] |= parts

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Review a token."""
        assert path == "/apis/authentication.k8s.io/v1/tokenreviews"
        assert body["spec"]["audiences"] == [AUDIENCE]
        self.calls_count += 1
        name = body["spec"]["token"]
        extra = {f"{EXTRA}node-name": [name], f"{EXTRA}node-uid": [f"uid-{name}"], f"{EXTRA}pod-uid": ["p"]}
        status = {"authenticated": True, "audiences": [AUDIENCE], "user": {"username": ACCOUNT, "extra": extra}}
        return {"status": status | self._changes}

    async def get(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT:
        """Read a node."""
        assert (kind.plural, namespace) == ("nodes", "")
        if name not in self._nodes:
            raise NotFound(f"nodes {name} not found")
        return kind.decode(json.dumps(self._nodes[name]).encode(), "get")


async def test_a_login_is_for_one_instance(tmp_path: Path) -> None:
    """Another watcher's reports and answers are denied by the server."""
    own, other = ProviderId("aws:///a/i-n1"), ProviderId("aws:///a/i-n2")
    denied: list[str] = []

    async def on_error(error: Exception) -> None:
        denied.append(str(error).lower())

    async with serving_broker(tmp_path, with_callout=True) as broker, gateway(broker, Api("n1", "n2"), account=ACCOUNT):
        client = await nats.connect(
            broker.url(), token="n1", inbox_prefix=watcher_inbox(own), allow_reconnect=False, error_cb=on_error
        )  # fmt: skip
        await client.request(report_subject(own), b"{}", timeout=5)
        await client.publish(report_subject(other), b"{}")
        await client.subscribe(f"{watcher_inbox(other)}.>")
        await client.flush()
        await until(lambda: len(denied) == 2)
        await client.close()


async def test_what_a_stolen_login_can_fill_is_limited(tmp_path: Path) -> None:
    """The gateway refuses large reports with the reason; the server closes a connection with too many subscriptions."""
    own, closed = ProviderId("aws:///a/i-n1"), asyncio.Event()

    async def on_closed() -> None:
        closed.set()

    async def on_error(_: Exception) -> None:
        """The connection is closed."""

    async with serving_broker(tmp_path, with_callout=True) as broker, gateway(broker, Api("n1"), account=ACCOUNT):
        client = await nats.connect(
            broker.url(), token="n1", inbox_prefix=watcher_inbox(own), allow_reconnect=False,
            closed_cb=on_closed, error_cb=on_error,
        )  # fmt: skip
        answer = await client.request(report_subject(own), bytes(REPORT_BYTES_MAX + 1), timeout=5)
        assert b"at most 16384 are allowed" in answer.data
        for number in range(SUBSCRIPTIONS_COUNT_MAX - 1):  # one is the inbox
            await client.subscribe(f"{watcher_inbox(own)}.{number}")
        await client.flush()
        assert not client.is_closed
        await client.subscribe(f"{watcher_inbox(own)}.more")
        await asyncio.wait_for(closed.wait(), 10)
        assert "maximum subscriptions exceeded" in str(client.last_error).lower()


REVIEWED: dict[str, dict[str, Any]] = {
    "not for this audience": {"audiences": []},
    "refused by the API server: gone": {"authenticated": False, "error": "gone"},
    "not the watchers' account": {"user": {"username": "system:serviceaccount:theirs:watcher"}},
    "not bound to a pod": {"user": {"username": ACCOUNT, "extra": {f"{EXTRA}pod-name": ["p"]}}},
    "Kubernetes 1.32": {"user": {"username": ACCOUNT, "extra": {f"{EXTRA}node-name": ["n1", "n2"]}}},
}


@pytest.mark.parametrize("reason", REVIEWED)
async def test_a_review_that_is_not_of_a_watcher_is_refused(reason: str) -> None:
    """A server that ignores audiences, another account, no pod, two nodes."""
    with pytest.raises(PermanentError, match=reason):
        await Admission(Api("n1", **REVIEWED[reason]), account=ACCOUNT).instance_of("n1")


async def test_a_node_must_be_the_one_of_the_token() -> None:
    """Clouds give names again; a node without its instance yet is tried again; long tokens are not reviewed."""
    api = Api("n1")
    admission = Admission(api, account=ACCOUNT)
    assert await admission.instance_of("n1") == "aws:///a/i-n1"
    with pytest.raises(PermanentError, match="does not exist"):
        await admission.instance_of("n2")
    api.change_node("n1", spec={})
    with pytest.raises(TransientError, match="no providerID yet"):
        await admission.instance_of("n1")
    api.change_node("n1", metadata={"name": "n1", "uid": "another"})
    with pytest.raises(PermanentError, match="earlier node of the name n1"):
        await admission.instance_of("n1")
    calls_count = api.calls_count
    for token in ("", "x" * 20_000):
        with pytest.raises(PermanentError, match="no service-account token"):
            await admission.instance_of(token)
    assert api.calls_count == calls_count
    with pytest.raises(TransientError, match="not readable"):
        await Admission(Api("n1", user="root"), account=ACCOUNT).instance_of("n1")


def test_what_is_no_question_and_no_key_is_refused() -> None:
    """Encrypted questions, and seeds of other kinds of keys."""
    for payload in (b"", b"a.b", b"a.!.c", b"a.e30.c"):
        with pytest.raises(InvalidFact, match="unreadable"):
            read_login(payload)
    assert Issuer(f"{new_issuer_seed()}\n").public_key.startswith("A")
    for seed in ("", "SUAM", "x" * 58, "SUAKYRHVIOREXV7EUZTBHUHL7NUMHPMAS7QMDU3GTIUWEI5LDNOXD43IZY"):
        with pytest.raises(ConfigError, match="auth callout"):
            Issuer(seed)


async def test_without_a_gateway_nobody_without_a_password_gets_in(tmp_path: Path) -> None:
    """The server gives up by itself."""
    async with serving_broker(tmp_path, with_callout=True) as broker:
        client = Client()

        async def ignore(_: Exception) -> None:
            """The connection ends."""

        async def come_in() -> None:
            await client.connect(servers=[broker.url()], token="n1", allow_reconnect=False, error_cb=ignore)
            await client.flush()

        with pytest.raises((TimeoutError, OSError, nats.errors.Error)):
            await come_in()
        await client.close()
        abort(client)
        bus = await broker.bus("scaler")
        assert bus.is_connected
        await bus.close()


def test_a_new_issuer_is_written_once(tmp_path: Path) -> None:
    """The seed to a file that its owner alone reads, the public key to the output; a second call keeps the first."""
    path = tmp_path / "seed"
    command = [sys.executable, "-m", "gpu_autoscaler_services.permissions", "--issuer", str(path)]
    written = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Issuer.from_file(path).public_key == written.stdout.strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    seed = path.read_text(encoding="utf-8")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    assert path.read_text(encoding="utf-8") == seed
