"""A notice waits for no launch: its cordon and first eviction come while launches hang or wait for a rate limit."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.support.fake_capacity import FakeCapacity
from tests.support.launch_storm import OneLane, measure, slots_kept_while_waiting
from tests.support.memory_bus import MemoryBus
from tests.support.stories import offer

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import BUCKETS, BusDeclaration, streams
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.protocol import Instance, Order
from gpu_autoscaler.providers.throttling import RateLimit
from gpu_autoscaler.runtime.service import consumers_of
from gpu_autoscaler_services.scaler.service import Scaler

LAUNCHES_COUNT = 500
NOTICES_COUNT = 20
CORDONED_SECONDS_MAX, EVICTED_SECONDS_MAX = 2.0, 3.0
TOLERATED_TIMES = 3.0  # the machine is shared
SECONDS_MAX = 30.0  # of waiting for what does not come


def wall_now() -> datetime:
    """What the broker stamps messages with."""
    return datetime.now(UTC)


class Slow(FakeCapacity):
    """A cloud that decides on each launch after a while, with our own limit of two launches a second."""

    def __init__(self, offers: Sequence[Offer], *, decided_seconds: float) -> None:
        super().__init__(offers, installation="uid", now=wall_now)
        self._decided_seconds = decided_seconds
        self._launches = RateLimit(2.0, 5, wait_seconds_max=30.0)

    async def launch(self, order: Order) -> Instance:
        await self._launches.take("Launch")
        await asyncio.sleep(self._decided_seconds)
        return await super().launch(order)


async def memory_bus(kind: type[Scaler]) -> Bus:
    """A bus of this process with the consumers of the scaler."""
    declared = BusDeclaration(streams=streams(), consumers=consumers_of(kind), buckets=BUCKETS)
    bus = MemoryBus(MemoryBroker(), declared, now=wall_now)
    await bus.ensure()
    return bus


@pytest.mark.parametrize("decided_seconds", [0.0, 60.0], ids=["waiting for the rate limit", "waiting for the cloud"])
async def test_notices_do_not_wait_for_launches(tmp_path: Path, decided_seconds: float) -> None:
    """With 500 launches in flight every node is cordoned within two seconds, and its pod evicted within three."""
    cloud = Slow([offer()], decided_seconds=decided_seconds)
    seconds = await measure(
        memory_bus, cloud, offer(), tmp_path,
        launches_count=LAUNCHES_COUNT, notices_count=NOTICES_COUNT, spread_seconds=4.0,
        seconds_max=SECONDS_MAX,
        launched=lambda: cloud.launches_count,
    )  # fmt: skip
    assert seconds.launched_count < LAUNCHES_COUNT / 2, "launches are in flight"
    assert seconds.cordoned[-1] < TOLERATED_TIMES * CORDONED_SECONDS_MAX
    assert seconds.evicted[-1] < TOLERATED_TIMES * EVICTED_SECONDS_MAX


async def test_one_lane_makes_notices_wait(tmp_path: Path) -> None:
    """The harness can fail: on one consumer with sixteen slots that launches keep, no node is cordoned."""
    cloud = Slow([offer()], decided_seconds=60.0)
    with slots_kept_while_waiting(), pytest.raises(TimeoutError):
        await measure(
            memory_bus, cloud, offer(), tmp_path,
            launches_count=100, notices_count=1, spread_seconds=0.0, kind=OneLane,
            seconds_max=TOLERATED_TIMES * CORDONED_SECONDS_MAX,
        )  # fmt: skip
