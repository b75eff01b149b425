"""What a tick publishes, and who may publish it: a leader whose term ended during the tick may not."""

import asyncio
import time
from datetime import datetime

from tests.support.memory_bus import MemoryBus
from tests.support.planners import Planner
from tests.support.runners import Place, running, until

from gpu_autoscaler.bus.streams import BUCKETS, LEASES, BusDeclaration, streams
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.runtime.lease import Lease
from gpu_autoscaler.runtime.service import Outputs


class LeadingPlanner(Planner):
    """Plans while it holds its lease, by a clock that the test moves."""

    def __init__(self, bus: MemoryBus) -> None:
        super().__init__()
        self.passed_seconds = 0.0
        self.is_slow = False
        self.lease = Lease(bus, "planner", "test", lambda: time.monotonic() + self.passed_seconds)

    async def on_tick(self, now: datetime) -> Outputs:
        if self.is_slow:
            self.passed_seconds += LEASES.ttl_seconds
        return await super().on_tick(now)


async def test_leader_whose_term_ended_during_the_tick_publishes_nothing() -> None:
    """The plan is dropped before the stream is asked; with the lease renewed, planning goes on."""
    place = Place()
    bus = MemoryBus(place.broker, BusDeclaration(streams=streams(), buckets=BUCKETS), now=place.now)
    await bus.ensure()
    planner = LeadingPlanner(bus)
    planner.is_slow, planner.wanted = True, 1
    async with running(place, planner, bus=bus) as runner:
        await until(lambda: len(planner.ticks) > 2)
        assert await place.stored(ScalingPlanMade) == []
        planner.is_slow = False
        await until(lambda: planner.view.state.last_plan_sequence > 0)
        planner.wanted = 0
        await asyncio.sleep(0)
        assert runner.readiness.conditions.get("ticks") is None
