"""A job leaves free capacity unused where a new node costs less than to keep that one for it."""

from datetime import datetime
from typing import Any

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    MINUTE,
    SECOND,
    T0,
    Story,
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

from gpu_autoscaler.core.next_change import TrackedInstant
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected, GangIncomplete

LARGE = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
SMALL = offer("g5.xlarge", gpus=1, cpu=4, memory_gib=16, usd_per_hour=0.5)
SALE = on_sale(LARGE, SMALL)


def busy(*gpus: int) -> Story:
    """A large node with a pod of these GPUs each."""
    pods = [pod(f"p{number}", on="n1", gpus=count) for number, count in enumerate(gpus)]
    return (*node("n1", LARGE), *(fact for story in pods for fact in story))


def small(**changes: Any) -> Story:  # noqa: ANN401 - fields of the job
    """A job of one GPU."""
    return job("train", **{"gpus": 1, **changes})


def of_plan(*stories: Story, at: datetime = T0, under: ScalingPolicy | None = None) -> list[str]:
    """Keys of the offers that the plan buys."""
    made = accepted_plan(given(*stories, as_of=at), under or policy(), at)
    return [buy.offer.key for buy in made.purchases]


def of_schedule(*stories: Story, at: datetime = T0, under: ScalingPolicy | None = None) -> list[str]:
    """Nodes of the jobs that start."""
    made = schedule(given(*stories, as_of=at), under or policy(), at)
    return [name for placement in made.placements for name in placement.node_names]


def ordered() -> Story:
    """A node that boots for the job."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=2, price_micro_usd_per_hour=500_000)
    return bought(purchase("own", SMALL, reason=reason))


def test_a_job_gets_a_new_node_rather_than_keep_an_expensive_one() -> None:
    """The plan buys, the scheduler waits for it, and both tell why the free GPUs are not used."""
    state = given(SALE, busy(4), small())
    made = accepted_plan(state, policy(), T0)
    (buy,) = made.purchases
    assert buy.offer.key == SMALL.key
    assert isinstance(buy.reason, UnmetDemand)
    assert buy.reason.nodes_avoided_count == 1
    assert buy.reason.sentence().startswith(
        "Keeping 1 node with free capacity for job train would cost more than a new one; "
    )

    scheduled = schedule(state, policy(), T0)
    (held,) = scheduled.deferred
    assert scheduled.placements == ()
    assert isinstance(held.reason, GangIncomplete)
    assert (held.reason.members_placed, held.reason.nodes_avoided_count) == (0, 1)
    assert held.reason.sentence().endswith(" 1 node with free capacity would cost more to keep than a new one.")
    assert "new_node_wait_seconds_max" in held.reason.remedy()


def test_it_waits_for_its_own_node_and_for_no_longer_than_the_policy_allows() -> None:
    """The schedule notes when it places the job without it."""
    own, later = ordered(), T0 + 5 * MINUTE
    state = given(SALE, busy(4), small(), own, as_of=T0 + 4 * MINUTE)
    as_of = TrackedInstant.of(T0 + 4 * MINUTE)
    (held,) = schedule(state, policy(), as_of).deferred
    assert isinstance(held.reason, CapacityExpected)
    assert as_of.next_change_at == later

    assert of_plan(SALE, busy(4), small(), own, at=T0 + MINUTE) == []
    assert of_schedule(SALE, busy(4), small(), own, at=later - SECOND) == []
    assert of_schedule(SALE, busy(4), small(), own, at=later) == ["n1"]


def test_without_a_purchase_it_uses_what_is_free() -> None:
    """A limit, a freeze or the cloud may prevent it: then the job waits for half a minute only."""
    limited = policy(nodes_count_max=1)
    made = accepted_plan(given(SALE, busy(4), small()), limited, T0)
    assert list(made.purchases) == []
    expected = [held.reason for held in made.deferred if held.subject == "job/train"]
    assert expected == [CapacityExpected(node="n1", expected_at=None)]

    story = (SALE, busy(4), small())
    assert of_schedule(*story, at=T0 + 29 * SECOND, under=limited) == []
    assert of_schedule(*story, at=T0 + 30 * SECOND, under=limited) == ["n1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"priority": PRIORITY_NAMES["high"]},
        {"gpus": 2},  # only another large node takes it
        {"start_by_at": T0 + 10 * MINUTE},
        {"within": "topology.kubernetes.io/zone"},
    ],
    ids=str,
)
def test_work_that_is_urgent_or_that_no_cheaper_node_takes_uses_the_free_capacity(changes: dict[str, Any]) -> None:
    """Whatever the node costs."""
    assert of_schedule(SALE, busy(4), small(**changes)) == ["n1"]
    assert of_plan(SALE, busy(4), small(**changes)) == []


def test_the_first_job_of_a_strict_queue_lets_no_other_wait_with_it() -> None:
    """A job that came later needs what is free: it would wait for the first one's new node."""
    strict = policy(queues=[{"name": "all", "scheduling_policy": "fcfs-strict"}])
    assert of_schedule(SALE, busy(4), small(), under=strict) == ["n1"]
    assert of_plan(SALE, busy(4), small(), under=strict) == []


@pytest.mark.parametrize(
    "under",
    [
        {"new_node_wait_seconds_max": 0.0},
        {"new_node_wait_seconds_max": 100.0},  # less than a boot
        {"removal": {"waiting_micro_usd_per_hour": 1_000_000_000}},
    ],
    ids=str,
)
def test_the_policy_decides_what_waiting_is_worth(under: dict[str, Any]) -> None:
    """A wait that costs more than it saves is none."""
    assert of_schedule(SALE, busy(4), small(), under=policy(**under)) == ["n1"]
    assert of_plan(SALE, busy(4), small(), under=policy(**under)) == []


def test_a_node_that_stays_anyway_takes_more_work() -> None:
    """The more jobs a node has, the less longer it stays for one more: with seven of them for an eighth of the run."""
    cheap = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=3.0)
    seven = [pod(f"p{number}", on="n1", gpus=1) for number in range(7)]
    story = (on_sale(cheap, SMALL), node("n1", cheap), small())

    assert of_schedule(*story) == []
    assert of_schedule(*story, *seven) == ["n1"]


def test_a_node_that_was_bought_for_the_job_is_used_whatever_it_costs() -> None:
    """Cheaper offers may have come back while it booted."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=32_000_000)
    mine = node("n1", LARGE, reason=reason)

    assert of_schedule(SALE, mine, small()) == ["n1"]
    assert of_plan(SALE, mine, small()) == []
    assert of_schedule(SALE, node("n1", LARGE), small()) == [], "bought for others"


def test_unknown_prices_and_nodes_of_others_are_used() -> None:
    """A node that we do not pay for costs nothing to keep, and none is bought at an unknown price."""
    assert of_schedule(SALE, node("n1", LARGE, is_ours=False), small()) == ["n1"]
    unpriced = offer("g5.xlarge", gpus=1, cpu=4, memory_gib=16, usd_per_hour=None)
    assert of_schedule(on_sale(LARGE, unpriced), busy(4), small()) == ["n1"]


def test_a_node_that_the_job_does_not_fit_on_is_no_reason() -> None:
    """Neither plan nor schedule tells of a node of another GPU model, and no time is waited for."""
    other = offer("p3.16xlarge", model="V100", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
    a10g = offer("g5.xlarge", gpus=1, model="A10G", cpu=4, memory_gib=16, usd_per_hour=0.5)
    state = given(on_sale(other, a10g), node("n1", other), small(model="A10G"))
    (buy,) = accepted_plan(state, policy(), T0).purchases
    assert isinstance(buy.reason, UnmetDemand)
    assert buy.reason.nodes_avoided_count == 0

    (held,) = schedule(state, policy(), T0).deferred
    assert isinstance(held.reason, GangIncomplete)
    assert held.reason.nodes_avoided_count == 0


def test_part_of_a_gang_goes_where_it_is_cheap() -> None:
    """Members that fit on a node that stays anyway are placed there, and the others get new nodes."""
    full = [pod(f"q{number}", on="n2", gpus=1) for number in range(7)]
    cheap = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=3.0)
    story = (on_sale(cheap, SMALL), node("n2", cheap), *full, small(members=2))

    assert of_plan(*story) == [SMALL.key]
