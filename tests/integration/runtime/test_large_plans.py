"""Plans of much that waits, on a real broker with its limit of message sizes."""

import asyncio

import pytest
from tests.support.nats import nats_store, server
from tests.support.scaler_ticks import Planner
from tests.support.zero_quota import AT_RISK, world

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import MESSAGE_BYTES_MAX, BusDeclaration, consumers_of_process, streams
from gpu_autoscaler.model.errors import MessageTooLarge
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.runner import Runner

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("pods_count", "deferred_bytes"), [(700, 0), (10, MESSAGE_BYTES_MAX)])
async def test_a_node_under_notice_is_drained(server: NatsServer, pods_count: int, deferred_bytes: int) -> None:
    """Under a quota of zero for 700 pods; and where what is deferred alone exceeds the limit of the broker."""
    planner = Planner(*world(pods_count), deferred_bytes=deferred_bytes)
    declared = BusDeclaration(streams=streams(), consumers=consumers_of_process(Planner.name, Planner.consumes))
    bus = await NatsBus.connect(server.url, name="scaler", declared=declared)
    await bus.ensure()
    runner = Runner(planner, bus, view=planner.view, clock=Clock())
    run = asyncio.create_task(runner.run())
    try:
        async with asyncio.timeout(60):
            while not planner.plans:
                await asyncio.sleep(0.05)
    finally:
        runner.stop()
        await run
    await bus.close()

    assert planner.drained() == [AT_RISK]
    made = planner.plans[0].plan
    counts = dict(made.deferred_unlisted) or {group.reason.tag(): group.objects_count for group in made.deferred_groups}
    assert counts["offers_unavailable"] == pods_count + 1


async def test_the_server_itself_refuses_what_exceeds_its_limit(server: NatsServer) -> None:
    """A stream with a lower limit than ours: the refusal is recognized."""
    bus = await NatsBus.connect(server.url, name="scaler", declared=BusDeclaration(streams=streams()))
    await bus.ensure()
    (scaling,) = [stream for stream in streams() if stream.name == "SCALING"]
    info = await bus._link.call(f"STREAM.INFO.{scaling.name}", {})
    await bus._link.call(f"STREAM.UPDATE.{scaling.name}", {**info["config"], "max_msg_size": 1024})
    with pytest.raises(MessageTooLarge, match="10054"):
        await bus.publish("scaling.plan_made", bytes(4096), message_id="large")
    await bus.close()
