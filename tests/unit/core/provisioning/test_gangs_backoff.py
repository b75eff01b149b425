"""A gang that was bought for in vain: all its nodes are released at once, and the next try waits, longer each time."""

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
    planned,
    pod,
    policy,
    provider_id,
    purchase,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, job_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.provisioning_settings import GangPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingNodeTerminated
from gpu_autoscaler.model.decisions import Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, PlanId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_limits import GpusLimit
from gpu_autoscaler.model.reasons.defer_waits import GangBackoff, GangTimedOut
from gpu_autoscaler.model.reasons.drain import GangAbandoned

SPOT = offer()
GANG = "job/train"
MAX_DELIVERIES_CONSUMER = GangAbandoned(gang=GANG, defer_reason="offers_unavailable")
WAITING = job("train", gpus=8, members=4)


def abandoned(at: datetime, *, number: int = 0, reason: GangAbandoned = MAX_DELIVERIES_CONSUMER) -> Story:
    """A node of the gang that was bought and released at this instant."""
    name = f"given-up-{number}"
    release = ReleaseInstance(
        action_id=ActionId(f"release-{number}"),
        provider_id=provider_id(name),
        order_action_id=ActionId(name),
        reason=reason,
    )
    gone = ScalingNodeTerminated(
        action_id=release.action_id, plan_id=PlanId(f"plan-release-{number}"), provider_id=release.provider_id,
        order_action_id=release.order_action_id,
        node_name=None,
        terminated_at=at,
    )  # fmt: skip
    return (
        *bought(purchase(name, SPOT, gang=GANG, at=at - MINUTE), at=at - MINUTE),
        *planned(release, plan_id=f"plan-release-{number}", at=at),
        TimedFact(gone, at),
    )


def made(state: ClusterState, as_of: datetime, under: ScalingPolicy | None = None) -> Plan:
    """The plan of this instant, accepted by the plan check."""
    return accepted_plan(state, under, as_of)


def held(found: Plan) -> list[object]:
    """Why the gang waits."""
    return [each.reason for each in found.deferred if each.subject == GANG]


def after(tries: int, later: timedelta) -> tuple[ClusterState, datetime]:
    """The state after this many abandoned tries, an hour apart at most, and this much time."""
    at = [T0 + number * 5 * MINUTE for number in range(tries)]
    as_of = at[-1] + later
    stories = [abandoned(each, number=number) for number, each in enumerate(at)]
    return given(WAITING, *stories, on_sale(SPOT, at=as_of), as_of=as_of), as_of


@pytest.mark.parametrize(("tries", "seconds"), [(1, 60), (2, 120), (3, 240), (5, 960), (6, 1800), (9, 1800)])
def test_each_failed_purchase_doubles_the_wait_up_to_its_maximum(tries: int, seconds: int) -> None:
    """Nothing is bought a second before; all four nodes are bought after."""
    state, early = after(tries, timedelta(seconds=seconds - 1))
    waiting = made(state, early)
    state, late = after(tries, timedelta(seconds=seconds))

    assert waiting.purchases == []
    assert held(waiting) == [GangBackoff(gang=GANG, abandoned_count=tries, retry_at=early + SECOND)]
    assert len(made(state, late).purchases) == 4


def test_the_wait_is_explained() -> None:
    """With its end, and what happens then."""
    state, as_of = after(1, 10 * SECOND)
    retry = f"{T0 + MINUTE:%Y-%m-%d %H:%M:%S}"

    line = job_line("train", StatusView.of(state, policy(), as_of, plan(state, policy(), as_of)))
    assert "could not all be obtained (once) and were released" in line
    assert f"the next attempt is at {retry}" in line


def test_a_waiting_gang_uses_existing_capacity() -> None:
    """Four nodes are empty meanwhile."""
    nodes = [node(f"n{number}", SPOT, at=T0) for number in range(4)]
    state = given(WAITING, abandoned(T0), *nodes, on_sale(SPOT), as_of=T0 + SECOND)

    assert [type(each).__name__ for each in held(made(state, T0 + SECOND))] == ["CapacityExpected"]


def test_a_late_node_of_a_waiting_gang_is_released_and_is_no_new_try() -> None:
    """A launch in progress when the gang was abandoned is done now."""
    late = bought(purchase("late", SPOT, gang=GANG))
    state = given(WAITING, abandoned(T0), late, on_sale(SPOT), as_of=T0 + SECOND)
    (release,) = [each for each in made(state, T0 + SECOND).decisions if isinstance(each, ReleaseInstance)]

    assert release.reason == GangAbandoned(gang=GANG, defer_reason="gang_backoff")
    again = given(WAITING, abandoned(T0), abandoned(T0 + SECOND, number=1, reason=release.reason), as_of=T0 + MINUTE)
    assert again.gangs[GANG].abandoned_count == 1


def test_nodes_released_by_one_plan_are_one_try() -> None:
    """A gang is abandoned as a whole."""
    releases = [
        ReleaseInstance(
            action_id=ActionId(f"r{number}"),
            provider_id=None,
            order_action_id=ActionId(f"o{number}"),
            reason=MAX_DELIVERIES_CONSUMER,
        )
        for number in range(2)
    ]

    assert given(planned(*releases)).gangs[GANG].abandoned_count == 1


def test_old_failures_are_forgotten() -> None:
    """Hours later the wait starts from its minimum."""
    later = T0 + 8 * HOUR
    sign_of_life = planned(plan_id="later", at=later)

    assert given(abandoned(T0), sign_of_life, drained_sign(later), as_of=later).gangs == {}


def drained_sign(at: datetime) -> Story:
    """Another order ends at this instant: the stream's hour goes on."""
    return abandoned(at, number=7, reason=GangAbandoned(gang="job/other", defer_reason="gang_backoff"))


# ---- the deadline of the whole


def half_there(second_at: datetime) -> tuple[Story, ...]:
    """Three of four members are ready and empty; the fourth was bought again now and boots."""
    ready = [
        (*bought(purchase(f"buy-n{number}", SPOT, gang=GANG, at=T0)), node(f"n{number}", SPOT)[-1])
        for number in range(3)
    ]
    reason = UnmetDemand(demand=(GANG,), offers_considered=1, price_micro_usd_per_hour=10_000_000)
    last = purchase("last", SPOT, gang=GANG, at=second_at, reason=reason)
    return (WAITING, *ready, bought(last, at=second_at))


def test_a_gang_in_time_waits_for_its_last_node() -> None:
    """Ten minutes after the first purchase there is time left."""
    as_of = T0 + 9 * MINUTE
    state = given(*half_there(T0 + 5 * MINUTE), on_sale(SPOT), as_of=as_of)

    assert [type(each).__name__ for each in held(made(state, as_of))] == ["CapacityExpected"]


def test_the_nodes_of_a_timed_out_gang_are_all_released() -> None:
    """Half an hour after the first purchase the last node still boots."""
    as_of = T0 + 30 * MINUTE
    state = given(*half_there(T0 + 20 * MINUTE), on_sale(SPOT), as_of=as_of)
    found = made(state, as_of, policy(disruption_ratio_max=1.0))
    going = {each.node_name for each in found.drains}
    released = [each.provider_id for each in found.releases]

    assert held(found) == [GangTimedOut(gang=GANG, bought_seconds=1800.0, complete_seconds_max=1800.0)]
    assert (going, released) == ({"n0", "n1", "n2"}, [provider_id("last")])
    assert found.purchases == []


def test_nodes_of_an_earlier_start_are_not_late() -> None:
    """They were bought half an hour ago and worked since; the gang lost its place, and one more node boots."""
    as_of = T0 + 30 * MINUTE
    ran = [
        (
            *pod(f"train-{number}", on=f"n{number}", gpus=8, at=T0),
            *pod(f"train-{number}", on=f"n{number}", gpus=8, at=as_of - MINUTE, version=2, phase="succeeded"),
        )
        for number in range(3)
    ]
    state = given(*half_there(as_of - MINUTE), *ran, on_sale(SPOT), as_of=as_of)

    assert [type(each).__name__ for each in held(made(state, as_of))] == ["CapacityExpected"]


def test_the_deadline_is_a_policy_setting() -> None:
    """Two hours may be right for nodes that boot slowly."""
    as_of = T0 + 30 * MINUTE
    state = given(*half_there(T0 + 20 * MINUTE), on_sale(SPOT), as_of=as_of)
    patient = policy(gangs=GangPolicy(complete_seconds_max=7200.0))

    assert [type(each).__name__ for each in held(made(state, as_of, patient))] == ["CapacityExpected"]


# ---- what Karpenter does


@pytest.mark.parametrize("owner", ["cluster", "pool/default"])
def test_a_gang_beyond_a_limit_buys_nothing(owner: str) -> None:
    """Four pods of eight GPUs under a limit of sixteen: Karpenter buys two nodes that never start it."""
    limited = (
        policy(gpu_count_max=16) if owner == "cluster" else policy(pools=(NodePool(name="default", gpu_count_max=16),))
    )
    state = given(WAITING, on_sale(SPOT))
    found = made(state, T0, limited)

    assert found.purchases == []
    assert held(found) == [GpusLimit(gpu_count=0, gpu_count_max=16, owner=owner)]


def test_a_pod_group_beyond_a_limit_buys_nothing() -> None:
    """The same four as pods of one PodGroup: each pod, and the group, is deferred with the reason."""
    name = {"scheduling.x-k8s.io/pod-group": "ring"}
    pods = [pod(f"ring-{number}", gpus=8, labels=name) for number in range(4)]
    found = made(given(*pods, on_sale(SPOT)), T0, policy(gpu_count_max=16))

    assert found.purchases == []
    assert {each.subject for each in found.deferred} == {
        "group/default/ring",
        *(f"pod/uid-ring-{number}" for number in range(4)),
    }
    assert {each.reason for each in found.deferred} == {GpusLimit(gpu_count=0, gpu_count_max=16)}


# ---- whole, wherever it can be had


def test_a_gang_is_bought_from_two_zones() -> None:
    """A pool's limit leaves two nodes in the first; the other two come from the next pool in one transaction."""
    pools = policy(
        pools=(
            NodePool(name="first", priority=1, zones=("zone-a",), nodes_count_max=2),
            NodePool(name="second", zones=("zone-b",)),
        )
    )
    found = made(given(WAITING, on_sale(SPOT, offer(zone="zone-b"))), T0, pools).purchases

    assert sorted(each.offer.zone for each in found) == ["zone-a", "zone-a", "zone-b", "zone-b"]
    assert {each.gang for each in found} == {GANG}


def test_the_plan_check_rejects_a_purchase_during_the_back_off() -> None:
    """And spot for work that must not run on it."""
    state, as_of = after(1, 10 * SECOND)
    bad = msgspec.structs.replace(
        plan(state, policy(), as_of),
        deferred=(),
        decisions=tuple(purchase(f"x{number}", SPOT, gang=GANG, at=as_of) for number in range(4)),
    )
    assert any("waits until" in mistake for mistake in check(bad, state, policy()))

    steady = given(job("a", is_preemptible=False), on_sale(SPOT))
    wanted = UnmetDemand(demand=("job/a",), offers_considered=1, price_micro_usd_per_hour=1)
    wrong = Plan(as_of=T0, parent_sequence=0, decisions=(purchase("x", SPOT, reason=wanted),))
    assert any("must not be interrupted" in mistake for mistake in check(wrong, steady, policy()))
    assert SPOT.capacity_type is CapacityType.SPOT
