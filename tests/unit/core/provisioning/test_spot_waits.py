"""Work excluded from spot because it was interrupted too often, and work that waits for spot."""

from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    purchase,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.provisioning_settings import SpotPolicy
from gpu_autoscaler.core.provisioning.spot_waits import must_leave_spot
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.model.decisions import Deferred
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import PRIORITY_NAMES, Runtime
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer_waits import SpotAwaited

SPOT = offer()
ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
LOW, HIGH = PRIORITY_NAMES["low"], PRIORITY_NAMES["high"]


def outcome(*stories: Story, at: datetime = T0, under: ScalingPolicy | None = None) -> list[object]:
    """Keys of the offers bought, and reasons for which work waits."""
    state, under = given(*stories, as_of=at), under or policy()
    made = accepted_plan(state, under, at)
    bought_keys = [each.offer.key for each in made.purchases]
    return [*bought_keys, *(each.reason for each in made.deferred)]


def lost(times: int, job_id: str = "train", *, moved_count: int = 0) -> Story:
    """The job was interrupted this often, and moved by our own choice."""
    fact = JobPreempted(
        job_id=JobId(job_id),
        attempt=times + moved_count,
        cause="the cloud took its node",
        preempted_at=T0,
        retries_used_count=times,
    )
    return (TimedFact(fact, T0),)


# ---- spared


def test_a_job_before_its_last_retry_is_not_on_spot() -> None:
    """Three retries are allowed: after the third interruption the next place is not on spot."""
    sale = on_sale(SPOT, ON_DEMAND)

    assert outcome(job("train"), lost(2), sale) == [SPOT.key]
    assert outcome(job("train"), lost(3), sale) == [ON_DEMAND.key]


def test_moves_by_our_own_choice_are_no_interruptions() -> None:
    """However often a job was moved, it may use spot until its third interruption."""
    sale = on_sale(SPOT, ON_DEMAND)

    assert outcome(job("train"), lost(2, moved_count=5), sale) == [SPOT.key]
    assert outcome(job("train"), lost(3, moved_count=5), sale) == [ON_DEMAND.key]


def test_fewer_interruptions_suffice_by_policy_or_with_few_retries() -> None:
    """The last retry never runs on spot."""
    sale = on_sale(SPOT, ON_DEMAND)

    assert outcome(job("train"), lost(1), sale, under=policy(spot=SpotPolicy(interruptions_count_max=1))) == [
        ON_DEMAND.key
    ]
    assert outcome(job("train"), lost(1), sale, under=policy(job_retries_count_max=1)) == [ON_DEMAND.key]


def test_spot_is_better_than_no_capacity() -> None:
    """After half an hour without on-demand, and at once if the policy has only spot."""
    later = T0 + 30 * MINUTE
    only_spot = policy(pools=(NodePool(name="default", capacity_types=(CapacityType.SPOT,)),))

    assert outcome(job("train"), lost(3), on_sale(SPOT)) != [SPOT.key]
    assert outcome(job("train"), lost(3), on_sale(SPOT, at=later), at=later) == [SPOT.key]
    assert outcome(job("train"), lost(3), on_sale(SPOT, ON_DEMAND), under=only_spot) == [SPOT.key]


def test_every_job_kind_leaves_spot() -> None:
    """Kinds that can be suspended, and Volcano's Job, which is created again."""
    for runtime in Runtime:
        state = given(job("train", runtime=runtime, placed_on=("n1",), attempt=3), lost(3))
        assert must_leave_spot(state.jobs[JobId("train")], policy(), T0)


def test_pods_of_the_job_are_excluded_as_well() -> None:
    """Recreated pods use no spot, even if it is free."""
    stories = (job("train", placed_on=("n1",), attempt=3), lost(3), node("n1", SPOT), on_sale(SPOT, ON_DEMAND))
    waiting = pod("train-0", gpus=8, job_id="train", owner_kind="Job")

    assert outcome(*stories, waiting)[0] == ON_DEMAND.key


def test_the_scheduler_does_not_place_it_on_spot() -> None:
    """A free spot node is no place for it; an on-demand one is."""
    worn = (job("train"), lost(3))
    on_spot, on_demand = given(*worn, node("n1", SPOT)), given(*worn, node("n1", ON_DEMAND))

    assert schedule(on_spot, policy(), T0).placements == ()
    assert [each.job_id for each in schedule(on_demand, policy(), T0).placements] == ["train"]


# ---- waiting


def refused(*, at: datetime = T0, retry_after: timedelta = HOUR) -> Story:
    """Spot of this offer is unavailable."""
    return bought(purchase("refused", SPOT, at=at), is_refused=True, retry_after=retry_after)


def test_low_priority_work_waits_for_spot() -> None:
    """On-demand costs three times as much: it waits five minutes after its arrival, and reports the end."""
    stories = (job("train", priority=LOW), refused(), on_sale(SPOT, ON_DEMAND))
    awaited = SpotAwaited(offers=(SPOT.key,), saving_ratio=1 - 10 / 32, until=T0 + 5 * MINUTE)

    assert outcome(*stories) == [awaited]
    assert outcome(*stories, at=T0 + 5 * MINUTE - SECOND) == [awaited]
    assert outcome(*stories, at=T0 + 5 * MINUTE) == [ON_DEMAND.key]


@pytest.mark.parametrize(
    ("waiting", "seconds"),
    [
        (job("train", priority=HIGH - 1), 300.0),
        (pod("web-0", gpus=8), 120.0),
        (pod("web-0", gpus=8, priority=-1), 300.0),
    ],
    ids=["a job", "a pod", "a pod of low priority"],
)
def test_work_below_high_priority_waits_for_spot(waiting: Story, seconds: float) -> None:
    """Jobs as long as for running work to end, other pods likewise, those of low priority as set."""
    stories, end = (waiting, refused(), on_sale(SPOT, ON_DEMAND)), T0 + timedelta(seconds=seconds)
    (held,) = outcome(*stories, at=end - SECOND)

    assert isinstance(held, SpotAwaited)
    assert held.until == end
    assert outcome(*stories, at=end) == [ON_DEMAND.key]


def test_a_job_waits_no_longer_because_a_younger_one_comes_first() -> None:
    """Both are served together, the younger first for its deadline."""
    urgent = job("urgent", at=T0, start_by_at=T0 + HOUR)
    found = outcome(job("old", at=T0 - 6 * MINUTE), urgent, refused(), on_sale(SPOT, ON_DEMAND))

    assert found == [ON_DEMAND.key, ON_DEMAND.key]
    assert isinstance(outcome(urgent, refused(), on_sale(SPOT, ON_DEMAND))[0], SpotAwaited)


def test_other_work_does_not_wait() -> None:
    """Neither urgent work, nor work excluded from spot, nor with the setting off."""
    sale = (refused(), on_sale(SPOT, ON_DEMAND))
    at_once = policy(spot=SpotPolicy(low_priority_wait_seconds=0.0, medium_priority_wait_seconds=0.0))

    assert outcome(job("train", priority=HIGH), *sale) == [ON_DEMAND.key]
    assert outcome(job("train"), *sale, under=at_once) == [ON_DEMAND.key]
    assert outcome(pod("web-0", gpus=8, priority=1), *sale) == [ON_DEMAND.key]
    assert outcome(job("train", priority=LOW, is_preemptible=False), *sale) == [ON_DEMAND.key]
    assert outcome(job("train", priority=LOW), *sale, under=at_once) == [ON_DEMAND.key]


def test_a_small_saving_is_not_waited_for() -> None:
    """A fifth less is not worth five minutes."""
    near = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=12.5)

    assert outcome(job("train", priority=LOW), refused(), on_sale(SPOT, near)) == [near.key]


def test_available_spot_is_not_waited_for() -> None:
    """Another zone has some: it is bought."""
    elsewhere = msgspec.structs.replace(SPOT, zone="zone-b")

    assert outcome(job("train", priority=LOW), refused(), on_sale(SPOT, elsewhere, ON_DEMAND)) == [elsewhere.key]


def test_spot_that_costs_more_than_on_demand_ends_no_wait() -> None:
    """A larger type is available as spot, at twice the price of on-demand."""
    larger = msgspec.structs.replace(SPOT, instance_type="p4de.24xlarge", price_micro_usd_per_hour=64_000_000)
    (held,) = outcome(job("train"), refused(), on_sale(SPOT, ON_DEMAND, larger))

    assert isinstance(held, SpotAwaited)
    assert held.saving_ratio == 1 - 10 / 32


def test_waiting_for_spot_delays_no_other_work() -> None:
    """A pod that needs on-demand in the same plan gets it."""
    steady = job("steady", priority=LOW, is_preemptible=False)
    found = outcome(job("train", priority=LOW), steady, refused(), on_sale(SPOT, ON_DEMAND))

    assert found[0] == ON_DEMAND.key
    assert isinstance(found[1], SpotAwaited)


@pytest.mark.parametrize(
    ("waiting", "until", "problem"),
    [
        (job("train", priority=HIGH), 60.0, "its priority or its work forbids"),
        (job("train", is_preemptible=False), 60.0, "its priority or its work forbids"),
        (job("train"), 301.0, "longer than allowed"),
        (job("train"), 0.0, "longer than allowed"),
    ],
)
def test_the_plan_check_refuses_waits_that_the_policy_does_not_have(waiting: Story, until: float, problem: str) -> None:
    """Of urgent work, of work that never runs on spot, too long ones, and ones that are over."""
    state = given(waiting, refused(), on_sale(SPOT, ON_DEMAND))
    reason = SpotAwaited(offers=(SPOT.key,), saving_ratio=0.6, until=T0 + timedelta(seconds=until))
    held = Deferred(step="cover_demand", subject="job/train", reason=reason)
    made = msgspec.structs.replace(plan(state, policy(), T0), decisions=(), deferred=(held,))

    assert any(problem in each for each in check(made, state, policy()))
