"""Planning on a real broker whose stream discards every plan before the next one is made."""

import asyncio
from typing import ClassVar

import pytest
from msgspec.structs import replace
from tests.support.nats import nats_store, server
from tests.support.planners import Planner

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.catalog import FACT_CATALOG
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.runner import Runner

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

AGE_SECONDS_MAX = 1
PLANS_COUNT = 4


class QuietPlanner(Planner):
    """Plans less often than the stream discards plans."""

    tick_seconds: ClassVar[float | None] = 3.0 * AGE_SECONDS_MAX
    wanted = 1


async def connect(url: str, name: str) -> NatsBus:
    """Return a connection to a broker that keeps plans for a second."""
    declared = BusDeclaration(
        streams=tuple(
            replace(spec, max_age_seconds=AGE_SECONDS_MAX, duplicate_window_seconds=AGE_SECONDS_MAX)
            if spec.name == ScalingPlanMade.stream()
            else spec
            for spec in streams()
        )
    )
    bus = await NatsBus.connect(url, name=name, declared=declared)
    await bus.ensure()
    return bus


async def test_two_planners_continue_one_chain_over_discarded_plans(server: NatsServer) -> None:
    """Plans go on for ever, and no two of them have one parent, though no parent is ever in the stream."""
    reader = await connect(server.url, "reader")
    planners = [QuietPlanner(), QuietPlanner()]
    buses = [await connect(server.url, f"planner-{number}") for number in range(2)]
    runners = [
        Runner(planner, bus, view=planner.view, clock=Clock()) for planner, bus in zip(planners, buses, strict=True)
    ]
    runs = [asyncio.create_task(runner.run()) for runner in runners]
    plans: list[tuple[int, int]] = []  # parent and sequence
    projection = await reader.projection(ScalingPlanMade.stream())
    async with asyncio.timeout(120):
        async for batch in projection:
            for message in batch:
                fact = FACT_CATALOG.decode(message.payload).fact
                assert isinstance(fact, ScalingPlanMade)
                plans.append((fact.plan.parent_sequence, message.sequence))
            if len(plans) >= 2 * PLANS_COUNT:
                break
    for runner in runners:
        runner.stop()
    await asyncio.wait_for(asyncio.gather(*runs), 30)
    await projection.close()
    assert [parent for parent, _ in plans] == [0, *(sequence for _, sequence in plans)][: len(plans)]
    for bus in (reader, *buses):
        await bus.close()
