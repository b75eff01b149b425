"""A leader whose every plan takes five seconds, and which ends jobs meanwhile; a process that tests start twice."""

import os
import random
import sys
import time
from datetime import datetime, timedelta
from typing import ClassVar

from tests.support.ender import Ender, consumers
from tests.support.stories import T0, given, node, offer, on_sale, pod, policy

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import BUCKETS, BusDeclaration, streams
from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.runtime.compute import Compute, ComputeThread, compute_here
from gpu_autoscaler.runtime.config import load_settings
from gpu_autoscaler.runtime.lease import Lease
from gpu_autoscaler.runtime.process import ProcessContext, run_process
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outputs, Service

PLAN_SECONDS = 5.0
MODE = "TEST_PLANS_ARE_MADE"
IN_THREAD, HERE = "in a thread", "on the event loop"
_GIB = 2**30


def declared() -> BusDeclaration:
    """Return what the leader expects on the broker."""
    return BusDeclaration(streams=streams(), consumers=consumers(), buckets=BUCKETS)


def busy_cluster(waiting_count: int = 4000) -> ClusterState:
    """Return a cluster with many waiting pods of different sizes."""
    rng = random.Random("slow plans")  # noqa: S311 - sizes of pods, no security
    waiting = (
        pod(
            f"w{number}",
            requests=Resources(
                gpu_count=rng.choice((1, 2, 4, 8)),
                cpu_milli=rng.randrange(100, 8000, 37),
                memory_bytes=rng.randrange(1, 9) * _GIB,
                pod_count=1,
            ),
        )
        for number in range(waiting_count)
    )
    running = (pod(f"r{number}-{gpu}", on=f"n{number}") for number in range(200) for gpu in range(8))
    return given(*(node(f"n{number}") for number in range(200)), *running, *waiting, on_sale(offer(gpus=8)))


def plan_long(state: ClusterState) -> int:
    """Plan and check for five seconds. Return how many plans that were."""
    rules, until, count = policy(nodes_count_max=5000), time.monotonic() + PLAN_SECONDS, 0
    while time.monotonic() < until:
        made = plan(state, rules, T0 + timedelta(seconds=10 + count))
        check(made, state, rules)
        count += 1
    return count


class SlowPlanner(Ender):
    """Plans for five seconds on each tick."""

    name: ClassVar[str] = "ender"
    tick_seconds: ClassVar[float | None] = 0.1

    def __init__(self, view: StateView, lease: Lease, compute: Compute) -> None:
        super().__init__(view, job_seconds=0.0)
        self.lease = lease
        self._compute = compute
        self._state = busy_cluster()

    async def on_tick(self, _: datetime) -> Outputs:
        """Plan; nothing is published."""
        await self._compute(plan_long, self._state)
        return ()


async def compose(place: ProcessContext) -> tuple[Service, Bus]:
    """Return the leader on the broker that the environment names."""
    bus = await NatsBus.connect(
        place.settings.nats.url, name=SlowPlanner.name, declared=declared(), on_closed=place.lost.set
    )
    place.closing.push_async_callback(bus.close)
    await bus.ensure()
    lease = Lease(bus, SlowPlanner.name, f"leader-{os.getpid()}", time.monotonic)
    compute = compute_here if os.environ[MODE] == HERE else ComputeThread()
    return SlowPlanner(place.view, lease, compute), bus


if __name__ == "__main__":
    settings = load_settings(None, {key: text for key, text in os.environ.items() if key != MODE})
    sys.exit(run_process(SlowPlanner.name, settings, compose))
