"""What a plan defers never keeps its decisions from the stream."""

from collections.abc import Callable

import msgspec
import pytest
from tests.support.runners import Place, running, until
from tests.support.scaler_ticks import Planner
from tests.support.stories import T0
from tests.support.zero_quota import AT_RISK, world

from gpu_autoscaler.bus.streams import MESSAGE_BYTES_MAX
from gpu_autoscaler.core.deferred_groups import GROUPS_BYTES_MAX
from gpu_autoscaler.runtime.compute import Args, Result


@pytest.mark.parametrize("pods_count", [700, 10_000])
async def test_a_node_under_notice_is_drained_under_a_quota_of_zero(pods_count: int) -> None:
    """The plan is stored and comes back with the drain."""
    planner, place = Planner(*world(pods_count)), Place()
    async with running(place, planner):
        await until(lambda: bool(planner.plans), 20.0)

    assert planner.drained() == [AT_RISK]
    assert len(msgspec.json.encode(planner.plans[0].plan)) < GROUPS_BYTES_MAX
    (group,) = [group for group in planner.plans[0].plan.deferred_groups if group.kind == "pod"]
    assert group.objects_count == pods_count + 1


async def test_a_plan_that_is_too_large_goes_out_without_its_groups() -> None:
    """The decisions are all there; what is deferred is numbers alone."""
    planner, place = Planner(*world(10), deferred_bytes=MESSAGE_BYTES_MAX), Place()
    async with running(place, planner):
        await until(lambda: bool(planner.plans), 20.0)

    assert planner.drained() == [AT_RISK]
    made = planner.plans[0].plan
    assert (made.deferred, made.deferred_groups) == ((), ())
    assert dict(made.deferred_unlisted)["offers_unavailable"] == 11


async def test_plan_and_groups_are_computed_beside_the_event_loop() -> None:
    """Both grow with what waits: on the event loop no drain step would be taken meanwhile."""
    computed: list[str] = []

    async def compute(function: Callable[[*Args], Result], *args: *Args) -> Result:
        computed.append(function.__name__)
        return function(*args)

    planner = Planner(*world(10))
    planner.scaler.compute = compute
    await planner.on_tick(T0)
    assert computed == ["checked_plan", "grouped"]
