"""Work that comes in a burst: who waits for the rest of it, for how long, and who never does."""

from datetime import datetime, timedelta

import msgspec
import pytest
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


def unspoken(name: str, at: datetime = T0, *, gpus: int = 1) -> Story:
    """A new pod of which Kubernetes has not said yet whether it fits."""
    return tuple(
        msgspec.structs.replace(told, fact=msgspec.structs.replace(told.fact, unschedulable_since=None))
        for told in pod(name, gpus=gpus, at=at)
    )


def made(*stories: Story, at: datetime = T0, under: ScalingPolicy | None = None) -> Plan:
    """The plan, which the second opinion finds nothing wrong with."""
    state, under = given(*stories, as_of=at), under or policy()
    found = plan(state, under, at)
    assert check(found, state, under) == ()
    return found


def bought(found: Plan) -> list[str]:
    """Types of the nodes that are bought, sorted."""
    return sorted(each.offer.instance_type for each in found.decisions if isinstance(each, BuyNode))


def waiting(found: Plan) -> dict[str, BatchWindowOpen]:
    """Who waits for the rest of a burst."""
    return {each.subject: each.reason for each in found.deferred if isinstance(each.reason, BatchWindowOpen)}


def many(count: int, at: datetime = T0) -> tuple[Story, ...]:
    """Pods of three shapes, all of them spoken of."""
    return tuple(pod(f"m-{number}", gpus=(1, 2, 3)[number % 3], at=at) for number in range(count))


# ---- by their like


def test_what_kubernetes_said_of_one_pod_holds_for_its_like() -> None:
    """Sixteen alike, of which one was looked at: two nodes for all of them, in one plan."""
    found = made(pod("p-0"), *(unspoken(f"p-{number}") for number in range(1, 16)), SALE)

    assert bought(found) == ["gpu-8x", "gpu-8x"]


def test_nothing_is_bought_for_a_pod_that_asks_for_something_else_before_it_is_spoken_of() -> None:
    """It keeps room that is there, and no more: what was said of a smaller one is not said of it."""
    found = made(pod("p-0"), unspoken("other", gpus=4), SALE, at=T0 + LONGEST)

    assert bought(found) == ["gpu-1x"]


def test_a_pod_that_fits_is_not_bought_for_because_of_its_like() -> None:
    """A free node takes the one that was refused before it came, and its like."""
    found = made(node("n1"), pod("p-0"), unspoken("p-1"), SALE)

    assert bought(found) == []
    assert waiting(found) == {}


# ---- waiting for the rest


def test_a_lone_pod_is_bought_for_at_once() -> None:
    """Nothing else comes: there is nothing to wait for."""
    assert bought(made(pod("p-0"), SALE)) == ["gpu-1x"]


def test_pods_that_would_not_fill_the_best_node_wait_while_more_is_coming() -> None:
    """Ten alike, most of them not looked at yet: one full node now, and two pods wait for company."""
    found = made(pod("p-0"), *(unspoken(f"p-{number}") for number in range(1, 10)), SALE)

    assert bought(found) == ["gpu-8x"]
    assert {each.until for each in waiting(found).values()} == {T0 + LONGEST}
    assert len(waiting(found)) == 2


def test_what_waited_is_bought_for_once_kubernetes_has_spoken_of_all() -> None:
    """Nothing more is to come: the rest gets what fits it best."""
    found = made(*(pod(f"p-{number}") for number in range(10)), SALE)

    assert bought(found) == ["gpu-1x", "gpu-1x", "gpu-8x"]
    assert waiting(found) == {}


def test_kubernetes_is_not_waited_for_without_end() -> None:
    """Ten seconds on it has spoken of one alone, and all are bought for."""
    found = made(pod("p-0"), *(unspoken(f"p-{number}") for number in range(1, 10)), SALE, at=T0 + LONGEST)

    assert bought(found) == ["gpu-1x", "gpu-1x", "gpu-8x"]
    assert waiting(found) == {}


def test_a_mixed_lot_is_bought_for_once_nothing_more_comes() -> None:
    """Quiet for long enough, and Kubernetes has spoken of each."""
    assert waiting(made(*many(24), SALE, at=T0 + QUIET)) == {}


def test_a_mixed_lot_waits_whole() -> None:
    """Many shapes within a moment: the best fleet for a part of them is not a part of the best fleet."""
    found = made(*many(24), SALE)

    assert bought(found) == []
    assert len(waiting(found)) == 24


def test_few_pods_of_which_kubernetes_has_spoken_are_no_burst() -> None:
    """Three of three shapes are bought for at once."""
    assert waiting(made(*many(3), SALE)) == {}


def test_a_mixed_lot_waits_for_pods_that_kubernetes_has_not_come_to() -> None:
    """One of another shape has no room and nobody spoke of it: what is bought is to be bought for both."""
    found = made(pod("p-0"), unspoken("other", gpus=3), SALE)

    assert {key: each.until for key, each in waiting(found).items()} == {"pod/uid-p-0": T0 + LONGEST}


def test_a_pod_that_nobody_ever_speaks_of_is_not_waited_for_for_ever() -> None:
    """Its scheduler may be another one, or none."""
    later = T0 + LONGEST

    assert bought(made(pod("p-0", at=later), unspoken("other", gpus=3), SALE, at=later)) == ["gpu-1x"]


def test_nobody_waits_longer_than_the_policy_allows() -> None:
    """Pods keep coming without end: after ten seconds all that is there is bought for."""
    first = pod("first", gpus=4)
    just_now = many(24, at=T0 + LONGEST)
    steady = [pod(f"s-{second}", gpus=2, at=T0 + second * SECOND) for second in range(1, 10)]
    held = made(first, *steady, *just_now, SALE, at=T0 + LONGEST - timedelta(milliseconds=1))
    late = made(first, *steady, *just_now, SALE, at=T0 + LONGEST)

    assert waiting(held).keys() >= {"pod/uid-first"}
    assert waiting(late) == {}


def test_what_has_waited_since_long_ago_is_no_part_of_the_burst() -> None:
    """It is bought for, and so does not cut the wait of the others short."""
    found = made(pod("old", gpus=4, at=T0 - 60 * SECOND), *many(24), SALE)

    assert bought(found) == ["gpu-4x"]
    assert len(waiting(found)) == 24


@pytest.mark.parametrize("urgent", [job("now", gpus=1, priority=1000), job("gang", members=2)])
def test_gangs_and_urgent_work_wait_for_nobody(urgent: Story) -> None:
    """They are bought for beside a burst that waits."""
    found = made(urgent, *many(24), SALE, on_sale())

    assert not any(key.startswith("job/") for key in waiting(found))


def test_a_gang_that_has_room_for_a_part_waits_for_nobody() -> None:
    """What it lacks is bought beside the burst, whole, though one of its members has a place."""
    found = made(node("free", sized(4)), job("gang", members=3, gpus=4), *many(24), SALE)

    assert "job/gang" not in waiting(found)
    assert sum(isinstance(each, BuyNode) and "job/gang" in str(each.reason) for each in found.decisions) >= 1


def test_no_wait_at_all_is_a_policy_as_well() -> None:
    """With wait_seconds_max = 0 each plan buys for what it knows."""
    at_once = policy(batching=BatchingPolicy(wait_seconds_max=0.0))

    assert waiting(made(*many(24), SALE, under=at_once)) == {}


def test_a_clock_that_is_ahead_holds_nobody_up() -> None:
    """Pods of an API server whose clock is an hour ahead are bought for at once."""
    assert waiting(made(*many(24, at=T0 + 3600 * SECOND), SALE)) == {}


# ---- afterwards


def test_the_next_plan_comes_when_the_wait_is_over() -> None:
    """Not with the next regular tick; and where nobody waits it says nothing."""
    held = made(*many(24), SALE, at=T0 + SECOND)

    assert replan_seconds(held, 5.0) == 2.0
    assert replan_seconds(made(pod("p-0"), SALE), 5.0) is None


def test_the_wait_is_told_in_words() -> None:
    """How many wait with it, and until when."""
    reason = next(iter(waiting(made(*many(24), SALE)).values()))

    assert reason.sentence() == (
        "More work is just coming, and what is bought for all of it at once costs less: the 24 that are here wait "
        "for the rest, until 2026-11-21 12:00:03 UTC at most."
    )


def test_the_second_opinion_refuses_a_wait_that_is_too_long_or_for_nobody() -> None:
    """Held back as before, but for an hour; and a lone pod that is told to wait."""
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

    assert any("longer than it may" in each for each in told)
    assert any("nothing else waits" in each for each in told_alone)


def test_what_cannot_be_bought_anyway_is_told_why() -> None:
    """A limit is the reason, not the burst."""
    found = made(*many(24), SALE, under=policy(nodes_count_max=0))

    assert waiting(found) == {}
    assert {each.reason.tag() for each in found.deferred} == {"nodes_limit"}


def test_the_first_that_was_spoken_of_late_waits_with_those_that_came_last() -> None:
    """Kubernetes came to it after seconds; it is as much a part of the burst as what was made just now."""
    first = pod("p-0", unschedulable_since=T0 + 5 * SECOND)
    found = made(
        first, *(unspoken(f"p-{number}", T0 + 5 * SECOND) for number in range(1, 10)), SALE, at=T0 + 5 * SECOND
    )

    assert bought(found) == ["gpu-8x"]
    assert len(waiting(found)) == 2
