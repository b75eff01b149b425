"""Encrypted connections to real brokers, by a certificate authority of the test's own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.support.certificates import Authority
from tests.support.working import until

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import Timeouts
from gpu_autoscaler.bus.nats.open import Tls
from gpu_autoscaler.bus.nats.requests import Request, RequestLink, answering
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.model.errors import ConfigError

pytestmark = pytest.mark.integration

HERE = "IP:127.0.0.1"
JOB = tuple(spec for spec in streams() if spec.name == "JOB")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The test's own."""
    return Authority(tmp_path / "certificates")


@contextlib.asynccontextmanager
async def server(folder: Path, lines: Sequence[str]) -> AsyncIterator[NatsServer]:
    """A broker with these lines of configuration."""
    broker = NatsServer(folder / "nats", settings=lines)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


async def connected(url: str, tls: Tls | None) -> NatsBus:
    """A bus on this broker, which has been used."""
    bus = await NatsBus.connect(
        url, name="test", declared=BusDeclaration(streams=JOB), tls=tls, timeouts=Timeouts(connect_seconds_max=3.0)
    )
    await bus.ensure()
    await bus.publish("job.test", b"{}", message_id="1")
    return bus


async def refusal(url: str, tls: Tls | None) -> str:
    """The sentence of a refused connection."""
    with pytest.raises(ConfigError) as raised:
        await connected(url, tls)
    return str(raised.value)


async def test_a_broker_with_a_certificate_of_the_named_authority_is_used(tmp_path: Path, authority: Authority) -> None:
    """Facts are stored and read over the encrypted connection, also after the broker was started again."""
    lines = authority.server_lines(authority.signed("broker", HERE))
    async with server(tmp_path, lines) as broker:
        bus = await connected(broker.url, Tls(ca=authority.certificate))
        assert bus._link.client._transport is not None
        assert type(bus._link.client._transport._io_writer.transport).__name__ == "_SSLProtocolTransport"  # type: ignore[attr-defined]
        await broker.restart()
        async with asyncio.timeout(20):
            while not bus.is_connected:
                await asyncio.sleep(0.05)
        assert await bus.last_sequence("JOB") == 1
        await bus.close()


async def test_a_broker_of_another_authority_is_refused(tmp_path: Path, authority: Authority) -> None:
    """By the named authority, and by those of the system where none is named; the message names the settings."""
    other = Authority(tmp_path / "other", "other")
    async with server(tmp_path, other.server_lines(other.signed("broker", HERE))) as broker:
        for tls in (Tls(ca=authority.certificate), Tls(server_name="127.0.0.1")):
            sentence = await refusal(broker.url, tls)
            assert "no encrypted connection" in sentence
            assert "certificate verify failed" in sentence
            assert "correct nats.tls_ca_path and nats.tls_server_name" in sentence


async def test_the_name_in_the_certificate_is_verified(tmp_path: Path, authority: Authority) -> None:
    """That of the address, or the one of the setting."""
    async with server(tmp_path, authority.server_lines(authority.signed("broker", "nats.example"))) as broker:
        assert "127.0.0.1" in await refusal(broker.url, Tls(ca=authority.certificate))
        assert "other.example" in await refusal(broker.url, Tls(ca=authority.certificate, server_name="other.example"))
        bus = await connected(broker.url, Tls(ca=authority.certificate, server_name="nats.example"))
        await bus.close()


async def test_a_broker_that_verifies_its_clients(tmp_path: Path, authority: Authority) -> None:
    """It gets our certificate; one of another authority, or none, is refused."""
    other = Authority(tmp_path / "other", "other").signed("client")
    own = authority.signed("client")
    lines = authority.server_lines(authority.signed("broker", HERE), verifies_clients=True)
    async with server(tmp_path, lines) as broker:
        bus = await connected(broker.url, Tls(ca=authority.certificate, certificate=own.certificate, key=own.key))
        await bus.close()
        for tls in (
            Tls(ca=authority.certificate),
            Tls(ca=authority.certificate, certificate=other.certificate, key=other.key),
        ):
            assert "nats.tls_certificate_path and nats.tls_key_path" in await refusal(broker.url, tls)


@contextlib.asynccontextmanager
async def plain_server() -> AsyncIterator[tuple[int, bytearray]]:
    """Somebody between us and the broker, who offers no TLS: the port, and what was received."""
    received = bytearray()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":8388608,"auth_required":true}\r\n')
        received.extend(await reader.read(4096))
        writer.close()

    listening = await asyncio.start_server(plain, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1], received


@contextlib.asynccontextmanager
async def connecting(link: RequestLink) -> AsyncIterator[RequestLink]:
    """The link of a watcher, kept open."""
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_a_broker_without_tls_gets_no_password(authority: Authority, scheme: str) -> None:
    """The connection ends before anything is sent."""
    tls = Tls(ca=authority.certificate) if scheme == "nats" else None
    async with plain_server() as (port, received):
        sentence = await refusal(f"{scheme}://user:secret@127.0.0.1:{port}", tls)
    assert "the server does not offer TLS" in sentence
    assert "secret" not in sentence
    assert bytes(received) == b""


async def test_reports_of_nodes_are_encrypted(tmp_path: Path, authority: Authority) -> None:
    """Both sides; the watcher goes on trying where the certificate is of another authority."""
    own, other = Tls(ca=authority.certificate), Tls(ca=Authority(tmp_path / "other", "other").certificate)
    received: list[Request] = []
    async with (
        server(tmp_path, authority.server_lines(authority.signed("broker", HERE))) as broker,
        answering([broker.url], name="answers", group="g", receivers={"report.*": received.append}, tls=own),
        connecting(RequestLink([broker.url], name="watcher", inbox="_INBOX_w", tls=own)) as link,
        connecting(RequestLink([broker.url], name="stranger", inbox="_INBOX_s", tls=other)) as stranger,
    ):
        await until(lambda: link.is_up, "connected")
        asking = asyncio.create_task(link.request("report.a", b"1", 5.0))
        await until(lambda: bool(received), "received")
        await received[0].answer(b"2")
        assert await asking == b"2"
        await until(lambda: "certificate verify failed" in (stranger.failure or ""), "refused")
        assert not stranger.is_up


async def test_a_watcher_sends_no_token_without_tls(authority: Authority) -> None:
    """Its token would be read on the way."""
    async with plain_server() as (port, received):
        tls, address = Tls(ca=authority.certificate), f"nats://127.0.0.1:{port}"
        async with connecting(RequestLink([address], name="w", inbox="_INBOX_w", token=lambda: "t", tls=tls)) as link:
            await until(lambda: "does not offer TLS" in (link.failure or ""), "refused")
    assert bytes(received) == b""


async def test_files_that_are_no_certificates_are_named(tmp_path: Path, authority: Authority) -> None:
    """Before anything is connected."""
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    pair, other = authority.signed("a"), authority.signed("b")
    url = "nats://127.0.0.1:1"

    assert f"nats.tls_ca_path: {wrong} is no PEM file" in await refusal(url, Tls(ca=wrong))
    mixed = Tls(ca=authority.certificate, certificate=pair.certificate, key=other.key)
    assert "nats.tls_certificate_path, nats.tls_key_path" in await refusal(url, mixed)
