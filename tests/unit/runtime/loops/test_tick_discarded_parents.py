"""Planning after a quiet time in which the stream discarded the last plan: it continues, and the fence holds."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from math import isnan

import pytest
from tests.support.planners import Planner, plan_of
from tests.support.runners import Place, Probe, running, until

from gpu_autoscaler.events.scaling import ScalingDemandSampled, ScalingPlanMade
from gpu_autoscaler.model.errors import StalePlan
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.publisher import Publisher
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.service import Outcome, Outputs

MONTH = timedelta(days=31)


def plan_age_seconds(runner: Runner) -> float:
    """Return the age of the runner's last plan."""
    (family,) = runner.metrics.plan_age.collect()
    return float(family.samples[0].value)


async def folded(planner: Planner, sequence: int) -> None:
    """Wait until the planner has folded a plan and wants no more."""
    await until(lambda: planner.view.state.last_plan_sequence >= sequence)
    planner.wanted = 0


async def test_plan_is_made_after_its_parent_aged_out() -> None:
    """The state still names the discarded parent; no plan is refused for ever, and the next one is a link again."""
    place, planner = Place(), Planner()
    async with running(place, planner) as runner:
        planner.wanted = 1
        await folded(planner, 1)
        last = planner.view.state.last_plan_sequence
        place.passed = MONTH
        assert await place.stored(ScalingPlanMade) == []
        planner.wanted = 1
        await folded(planner, last + 3)
        plans = [envelope.fact for envelope in await place.stored(ScalingPlanMade)]
        assert plan_age_seconds(runner) < 5.0
    parents = [fact.plan.parent_sequence for fact in plans if isinstance(fact, ScalingPlanMade)]
    assert parents == list(range(last, last + len(parents)))


async def _two_publishers(place: Place) -> tuple[Callable[[], Outcome], Publisher, Publisher]:
    """Return a maker of plans on the discarded parent #1, and two processes that publish them."""
    planner = Planner()
    first = plan_of(planner, place.now())
    publishers = [
        Publisher(
            await place.bus(), Clock(), Metrics("t"), service="planner", instance=name, publishes=(ScalingPlanMade,)
        )
        for name in "ab"
    ]
    await publishers[0].publish(first)
    place.passed = MONTH
    made = iter(range(1000))

    def make() -> Outcome:
        outcome = plan_of(planner, place.now() + timedelta(seconds=next(made)))
        return Outcome(facts=outcome.facts, expected_last_sequence=1, folded_sequence=1)

    return make, publishers[0], publishers[1]


async def test_of_two_leaders_with_a_discarded_parent_one_is_refused() -> None:
    """The fence stays a fence: the plan of the first is the last of the subject for the second."""
    place = Place()
    make, one, other = await _two_publishers(place)
    results = await asyncio.gather(one.publish(make()), other.publish(make()), return_exceptions=True)
    assert sorted(isinstance(result, StalePlan) for result in results) == [False, True]
    assert len(await place.stored(ScalingPlanMade)) == 1


async def test_unknown_fact_in_the_stream_keeps_the_plan_stale() -> None:
    """A plan may have been among what is not folded yet: fold first, then plan again."""
    place = Place()
    make, one, _ = await _two_publishers(place)
    await place.say(ScalingDemandSampled(minute=1, gpu_counts=()))
    with pytest.raises(StalePlan):
        await one.publish(make())
    assert await place.stored(ScalingPlanMade) == []


async def test_plan_age_is_unknown_without_plans_and_grows_while_plans_are_stale() -> None:
    """Only a planning process has an age; a refused plan does not reset it."""
    place, planner, reader = Place(), Planner(), Probe()
    await place.say(ScalingDemandSampled(minute=1, gpu_counts=()))
    async with running(place, planner) as runner, running(place, reader) as other:
        await until(lambda: len(planner.ticks) > 1)
        assert isnan(plan_age_seconds(other))
        assert plan_age_seconds(runner) < 1.0
        planner.on_tick = _always_stale  # type: ignore[method-assign, assignment]
        await asyncio.sleep(0.4)
        assert plan_age_seconds(runner) >= 0.3
        assert runner.metrics.plans_stale._value.get() > 0


async def _always_stale(_: datetime) -> Outputs:
    raise StalePlan("another plan is newer", last_sequence=7)
