"""Batching of work that arrives in a burst: which work waits, and for how long."""

from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import SECOND, T0, Story, given, job, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.provisioning_settings import BatchingPolicy
from gpu_autoscaler.core.provisioning.batching import replan_seconds
from gpu_autoscaler.model.decisions import BuyNode, Deferred, Plan
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.defer_waits import BatchWindowOpen

RULES = BatchingPolicy()
QUIET, LONGEST = timedelta(seconds=RULES.quiet_seconds), timedelta(seconds=RULES.wait_seconds_max)


def sized(gpus: int) -> Offer:
    """Nodes of one kind of GPU at one price a GPU, so that overhead alone speaks for the larger ones."""
    return offer(
        instance_type=f"gpu-{gpus}x", gpus=gpus, usd_per_hour=float(gpus), capacity_type=CapacityType.ON_DEMAND
    )


SALE = on_sale(sized(1), sized(4), sized(8))


def unjudged(name: str, at: datetime = T0, *, gpus: int = 1) -> Story:
    """A new pod that Kubernetes has not judged yet."""
    return tuple(
        msgspec.structs.replace(told, fact=msgspec.structs.replace(told.fact, unschedulable_since=None))
        for told in pod(name, gpus=gpus, at=at)
    )


def made(*stories: Story, at: datetime = T0, under: ScalingPolicy | None = None) -> Plan:
    """The plan, accepted by the plan check."""
    state, under = given(*stories, as_of=at), under or policy()
    return accepted_plan(state, under, at)


def bought(found: Plan) -> list[str]:
    """Types of the nodes that are bought, sorted."""
    return sorted(each.offer.instance_type for each in found.purchases)


def waiting(found: Plan) -> dict[str, BatchWindowOpen]:
    """Subjects that wait for their batch."""
    return {each.subject: each.reason for each in found.deferred if isinstance(each.reason, BatchWindowOpen)}


def many(count: int, at: datetime = T0) -> tuple[Story, ...]:
    """Pods of three shapes, all of them judged."""
    return tuple(pod(f"m-{number}", gpus=(1, 2, 3)[number % 3], at=at) for number in range(count))


# ---- by their like


def test_an_unschedulable_pod_represents_pods_of_equal_shape() -> None:
    """Sixteen pods of equal shape, one judged: two nodes for all of them in one plan."""
    found = made(pod("p-0"), *(unjudged(f"p-{number}") for number in range(1, 16)), SALE)

    assert bought(found) == ["gpu-8x", "gpu-8x"]


def test_nothing_is_bought_for_an_unjudged_pod_of_another_shape() -> None:
    """It only reserves free capacity: the result for a smaller pod does not apply to it."""
    found = made(pod("p-0"), unjudged("other", gpus=4), SALE, at=T0 + LONGEST)

    assert bought(found) == ["gpu-1x"]


def test_a_pod_that_fits_is_not_bought_for() -> None:
    """A free node takes the pod that was unschedulable before it became free."""
    found = made(node("n1"), pod("p-0"), unjudged("p-1"), SALE)

    assert bought(found) == []
    assert waiting(found) == {}


# ---- waiting for the rest


def test_a_single_pod_is_bought_for_at_once() -> None:
    """Nothing else arrives."""
    assert bought(made(pod("p-0"), SALE)) == ["gpu-1x"]


def test_pods_that_do_not_fill_the_best_node_wait() -> None:
    """Ten pods of equal shape, most unjudged: one full node is bought, two pods wait."""
    found = made(pod("p-0"), *(unjudged(f"p-{number}") for number in range(1, 10)), SALE)

    assert bought(found) == ["gpu-8x"]
    assert {each.until for each in waiting(found).values()} == {T0 + LONGEST}
    assert len(waiting(found)) == 2


def test_waiting_pods_are_bought_for_once_all_are_judged() -> None:
    """No more pods arrive: the rest gets the best fit."""
    found = made(*(pod(f"p-{number}") for number in range(10)), SALE)

    assert bought(found) == ["gpu-1x", "gpu-1x", "gpu-8x"]
    assert waiting(found) == {}


def test_the_wait_for_judgement_is_bounded() -> None:
    """After ten seconds with one pod judged, all are bought for."""
    found = made(pod("p-0"), *(unjudged(f"p-{number}") for number in range(1, 10)), SALE, at=T0 + LONGEST)

    assert bought(found) == ["gpu-1x", "gpu-1x", "gpu-8x"]
    assert waiting(found) == {}


def test_mixed_pods_are_bought_for_after_the_quiet_time() -> None:
    """Quiet for long enough, and all pods are judged."""
    assert waiting(made(*many(24), SALE, at=T0 + QUIET)) == {}


def test_mixed_pods_wait_together() -> None:
    """Many shapes at once: the best fleet for a part is no part of the best fleet."""
    found = made(*many(24), SALE)

    assert bought(found) == []
    assert len(waiting(found)) == 24


def test_few_judged_pods_are_no_burst() -> None:
    """Three pods of three shapes are bought for at once."""
    assert waiting(made(*many(3), SALE)) == {}


def test_mixed_pods_wait_for_unjudged_pods() -> None:
    """An unjudged pod of another shape has no capacity: one purchase is to serve both."""
    found = made(pod("p-0"), unjudged("other", gpus=3), SALE)

    assert {key: each.until for key, each in waiting(found).items()} == {"pod/uid-p-0": T0 + LONGEST}


def test_a_pod_that_is_never_judged_is_not_waited_for_forever() -> None:
    """It may have another scheduler, or none."""
    later = T0 + LONGEST

    assert bought(made(pod("p-0", at=later), unjudged("other", gpus=3), SALE, at=later)) == ["gpu-1x"]


def test_no_pod_waits_longer_than_the_policy_allows() -> None:
    """Pods keep arriving: after ten seconds all existing ones are bought for."""
    first = pod("first", gpus=4)
    just_now = many(24, at=T0 + LONGEST)
    steady = [pod(f"s-{second}", gpus=2, at=T0 + second * SECOND) for second in range(1, 10)]
    held = made(first, *steady, *just_now, SALE, at=T0 + LONGEST - timedelta(milliseconds=1))
    late = made(first, *steady, *just_now, SALE, at=T0 + LONGEST)

    assert waiting(held).keys() >= {"pod/uid-first"}
    assert waiting(late) == {}


def test_old_pods_are_not_part_of_the_burst() -> None:
    """They are bought for, and do not shorten the wait of the others."""
    found = made(pod("old", gpus=4, at=T0 - 60 * SECOND), *many(24), SALE)

    assert bought(found) == ["gpu-4x"]
    assert len(waiting(found)) == 24


@pytest.mark.parametrize("urgent", [job("now", gpus=1, priority=1000), job("gang", members=2)])
def test_gangs_and_urgent_work_do_not_wait(urgent: Story) -> None:
    """They are bought for while a burst waits."""
    found = made(urgent, *many(24), SALE, on_sale())

    assert not any(key.startswith("job/") for key in waiting(found))


def test_a_partly_placed_gang_does_not_wait() -> None:
    """Its missing members are bought for while a burst waits."""
    found = made(node("free", sized(4)), job("gang", members=3, gpus=4), *many(24), SALE)

    assert "job/gang" not in waiting(found)
    assert sum(isinstance(each, BuyNode) and "job/gang" in str(each.reason) for each in found.decisions) >= 1


def test_batching_can_be_switched_off() -> None:
    """With wait_seconds_max = 0 each plan buys for what it knows."""
    at_once = policy(batching=BatchingPolicy(wait_seconds_max=0.0))

    assert waiting(made(*many(24), SALE, under=at_once)) == {}


def test_a_clock_ahead_delays_nothing() -> None:
    """Pods of an API server whose clock is an hour ahead are bought for at once."""
    assert waiting(made(*many(24, at=T0 + 3600 * SECOND), SALE)) == {}


# ---- afterwards


def test_the_next_plan_is_made_when_the_window_closes() -> None:
    """Before the next regular tick; not requested if nothing waits."""
    held = made(*many(24), SALE, at=T0 + SECOND)

    assert replan_seconds(held, 5.0) == 2.0
    assert replan_seconds(made(pod("p-0"), SALE), 5.0) is None


def test_the_wait_is_explained() -> None:
    """Number of pods, and until when."""
    reason = next(iter(waiting(made(*many(24), SALE)).values()))

    assert reason.sentence() == (
        "More work is arriving: 24 members so far wait until 2026-11-21 12:00:03 UTC at the latest, as one purchase "
        "for all of it costs less."
    )


def test_the_plan_check_rejects_a_wait_that_is_too_long_or_alone() -> None:
    """Deferred for an hour; and a single pod that waits."""
    state = given(*many(24), SALE)
    held = plan(state, policy(), T0)
    longer = [
        Deferred(
            step=each.step, subject=each.subject, reason=msgspec.structs.replace(each.reason, until=T0 + 3600 * SECOND)
        )
        for each in held.deferred
        if isinstance(each.reason, BatchWindowOpen)
    ]
    lone = given(pod("p-0"), SALE)
    alone = Deferred(
        step="cover_demand",
        subject=f"pod/{PodUid('uid-p-0')}",
        reason=BatchWindowOpen(members_count=1, until=T0 + SECOND),
    )
    told = check(msgspec.structs.replace(held, deferred=tuple(longer)), state, policy())
    told_alone = check(
        msgspec.structs.replace(plan(lone, policy(), T0), decisions=(), deferred=(alone,)), lone, policy()
    )

    assert any("longer than allowed" in each for each in told)
    assert any("nothing else waits" in each for each in told_alone)


def test_an_unbuyable_pod_reports_its_limit() -> None:
    """A limit is the reason, not the burst."""
    found = made(*many(24), SALE, under=policy(nodes_count_max=0))

    assert waiting(found) == {}
    assert {each.reason.tag() for each in found.deferred} == {"nodes_limit"}


def test_the_first_pod_judged_late_waits_with_the_last() -> None:
    """A pod judged after seconds is part of the burst."""
    first = pod("p-0", unschedulable_since=T0 + 5 * SECOND)
    found = made(
        first, *(unjudged(f"p-{number}", T0 + 5 * SECOND) for number in range(1, 10)), SALE, at=T0 + 5 * SECOND
    )

    assert bought(found) == ["gpu-8x"]
    assert len(waiting(found)) == 2
