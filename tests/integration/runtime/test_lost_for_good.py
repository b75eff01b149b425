"""What a real broker gives up is set aside, and a connection that it closes for good ends the process."""

import asyncio
from pathlib import Path

import pytest
import structlog
from tests.support.ender import Ender, cancel, consumers, envelope_of
from tests.support.nats import nats_store, server

from gpu_autoscaler.bus.dead_letters import DeadLetters
from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, ConsumerSpec, streams
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import HttpSettings, NatsSettings, Settings, StoreSettings
from gpu_autoscaler.runtime.loop_context import Limits
from gpu_autoscaler.runtime.process import EXIT_FAILED, ProcessContext, serve
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler_services.registry import spec_of

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration


async def test_a_message_that_the_server_gave_up_is_set_aside(server: NatsServer) -> None:
    """A service that never saw it finds it by the server's advisory, and keeps all of it."""
    impatient = ConsumerSpec(
        durable="other-job-act", stream="JOB", subjects=("job.cancel_requested",), ack_wait_seconds=0.1, max_deliver=2
    )
    declared = BusDeclaration(streams=streams(), consumers=(*consumers(), impatient))
    bus = await NatsBus.connect(server.url, name="ender", declared=declared)
    await bus.ensure()
    service = Ender()
    limits = Limits(max_deliveries_poll_seconds=0.2, fetch_seconds_max=0.2)
    runner = Runner(service, bus, view=service.view, clock=Clock(), limits=limits)
    run = asyncio.create_task(runner.run())
    subject, payload = envelope_of(cancel(1))
    await bus.publish(subject, payload, message_id="poison")
    hand = await bus.effect_consumer(impatient.durable)
    letters = DeadLetters(bus)
    async with asyncio.timeout(60):
        while not await letters.page():
            await hand.fetch(1, 0.2)
    runner.stop()
    await asyncio.wait_for(run, 60)
    (letter,) = await letters.page()
    assert (letter.service, letter.message_id, letter.payload) == ("other", "poison", payload)
    assert "delivered 2 times" in letter.reason
    await bus.close()


async def test_a_connection_that_is_reset_while_it_closes_is_reported(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client then ends without a word; requests in flight fail at once."""
    lost = asyncio.Event()
    bus = await NatsBus.connect(
        server.url, name="ender", declared=BusDeclaration(streams=streams()), on_closed=lost.set
    )
    client = bus._link.client

    async def reset() -> None:
        raise ConnectionResetError("connection reset by peer")

    assert client._transport is not None
    monkeypatch.setattr(client._transport, "drain", reset)
    client._pending, client._pending_data_size = [b"PING\r\n"], 6
    with pytest.raises(ConnectionResetError):
        await client._close(client.CLOSED)  # as after an error of the protocol
    async with asyncio.timeout(10):
        await lost.wait()
    monkeypatch.undo()
    assert not bus.is_connected
    await bus.close()


async def test_a_connection_that_is_closed_for_good_ends_the_process(server: NatsServer, tmp_path: Path) -> None:
    """The server closes the connection for a protocol error: exit 1, so that the supervisor restarts the process."""
    opened: list[NatsBus] = []

    async def compose(place: ProcessContext) -> tuple[Service, Bus]:
        composed = await spec_of("cost_tracker").compose(place)
        assert isinstance(composed, tuple)
        service, bus = composed
        assert isinstance(bus, NatsBus)
        opened.append(bus)
        return service, bus

    settings = Settings(
        nats=NatsSettings(url=server.url),
        store=StoreSettings(url=f"sqlite:///{tmp_path / 'store.db'}"),
        http=HttpSettings(port=0),
    )
    with structlog.testing.capture_logs() as lines:
        served = asyncio.create_task(serve("cost_tracker", settings, compose))
        async with asyncio.timeout(60):
            while not any(line["event"] == "service started" for line in lines):
                await asyncio.sleep(0.02)
            client = opened[0]._link.client
            await client._send_command(b"NONSENSE\r\n")
            await client._flush_pending()  # else it is written with the next command, whenever that comes
            assert await served == EXIT_FAILED
    assert any(line["event"] == "broker connection closed for good" for line in lines)
