"""A gang that is bought in part: completed with other offers if possible, else its nodes are released."""

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
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

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingDrainCancelled
from gpu_autoscaler.model.decisions import DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer_limits import Cooldown
from gpu_autoscaler.model.reasons.drain import GangAbandoned

SPOT = offer()
ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
GANG = "job/train"
NOW = T0 + 30 * SECOND
MAX_DELIVERIES_CONSUMER = GangAbandoned(gang=GANG, defer_reason="offers_unavailable")


def half_refused() -> tuple[Story, ...]:
    """Four nodes were ordered for a gang of four; two launches were refused."""
    orders = [purchase(f"member-{number}", SPOT, gang=GANG) for number in range(4)]
    return (
        job("train", gpus=8, members=4),
        *(bought(order) for order in orders[:2]),
        *(bought(order, is_refused=True) for order in orders[2:]),
    )


def checked(state: ClusterState, under: ScalingPolicy | None = None) -> Plan:
    """The current plan, accepted by the plan check."""
    return accepted_plan(state, under, NOW)


def releases(made: Plan) -> list[tuple[object, object]]:
    """Released instances, with the reason."""
    return [(each.provider_id, each.reason) for each in made.releases]


def test_a_partly_refused_gang_is_completed_with_another_offer() -> None:
    """Two launches are refused: two nodes of another offer are bought, booting ones are kept."""
    made = checked(given(*half_refused(), on_sale(SPOT, ON_DEMAND), as_of=NOW))

    assert [each.offer.key for each in made.purchases] == [ON_DEMAND.key] * 2
    assert releases(made) == []


def test_the_nodes_of_an_impossible_gang_are_released() -> None:
    """The only offer is refused: booting nodes are released at once, each with the reason."""
    made = checked(given(*half_refused(), on_sale(SPOT), as_of=NOW))

    assert releases(made) == [
        (provider_id("member-0"), MAX_DELIVERIES_CONSUMER),
        (provider_id("member-1"), MAX_DELIVERIES_CONSUMER),
    ]
    assert [each.reason.tag() for each in made.deferred if each.subject == GANG] == ["offers_unavailable"]


def test_a_launch_in_progress_is_waited_for() -> None:
    """It is unknown whether there is an instance to release."""
    ordered = bought(purchase("late", SPOT, gang=GANG), is_launched=False)
    made = checked(given(*half_refused(), ordered, on_sale(SPOT), as_of=NOW))

    assert [given_back for given_back, _ in releases(made)] == [provider_id("member-0"), provider_id("member-1")]


def test_nodes_that_other_work_needs_are_not_released() -> None:
    """A waiting pod takes one of the booting nodes."""
    made = checked(given(*half_refused(), pod("other", gpus=8), on_sale(SPOT), as_of=NOW))

    assert len(releases(made)) == 1


def ready_member() -> Story:
    """A ready node bought for the gang, empty for a moment."""
    story = node("ready", SPOT, at=T0)
    order = purchase("buy-ready", SPOT, gang=GANG, at=T0)
    return (*bought(order), story[-1])


@pytest.mark.parametrize("is_node_known", [False, True])
def test_a_release_canceled_for_work_is_not_repeated_at_once(*, is_node_known: bool) -> None:
    """The release found work there that the state does not show yet."""
    order = purchase("member-0", SPOT, gang=GANG)
    release = ReleaseInstance(
        action_id=ActionId("release-0"),
        provider_id=provider_id("member-0"),
        order_action_id=ActionId("member-0"),
        reason=MAX_DELIVERIES_CONSUMER,
    )
    over = ScalingDrainCancelled(
        action_id=release.action_id,
        plan_id=PlanId("plan-1"),
        drain_action_id=release.action_id,
        node_uid=NodeUid("uid-member-0"),
        node_name="member-0",
        cancelled_at=NOW - SECOND,
        abandoned_because="pod default/other has come: it is in use",
    )
    boots = msgspec.structs.replace(node("member-0", SPOT, gpus_allocatable=0)[-1].fact, action_id=order.action_id)
    story = (
        job("train", gpus=8, members=4),
        bought(order),
        bought(purchase("member-1", SPOT, gang=GANG), is_refused=True),
        (TimedFact(boots, T0),) if is_node_known else (),
        planned(release, plan_id="plan-1", at=NOW - 2 * SECOND),
        (TimedFact(over, NOW - SECOND),),
        on_sale(SPOT),
    )
    made = checked(given(*story, as_of=NOW))

    assert releases(made) == []
    (wait,) = [each.reason for each in made.deferred if each.subject == "order/member-0"]
    assert wait == Cooldown(remaining_seconds=299.0)
    hasty = policy(removal={**msgspec.to_builtins(policy().removal), "drain_retry_seconds": 1.0})
    assert [one for one, _ in releases(checked(given(*story, as_of=NOW), hasty))] == [provider_id("member-0")]


def test_a_ready_node_of_an_abandoned_gang_drains_at_once() -> None:
    """Neither the idle time nor its age keeps it."""
    lone = given(job("train", gpus=8, members=4), ready_member(), refused(), on_sale(SPOT), as_of=NOW)
    (drain,) = [
        each for each in checked(lone, policy(disruption_ratio_max=1.0)).decisions if isinstance(each, DrainNode)
    ]

    assert (drain.node_name, drain.reason, drain.is_voluntary) == ("ready", MAX_DELIVERIES_CONSUMER, True)


def test_a_ready_node_with_work_stays() -> None:
    """A pod runs there: the node is in use, whatever it was bought for."""
    used = given(
        job("train", gpus=8, members=4), ready_member(), refused(), pod("a", on="ready"), on_sale(SPOT), as_of=NOW
    )

    assert [each for each in checked(used).decisions if isinstance(each, DrainNode)] == []


def refused() -> Story:
    """The only offer is unavailable."""
    return bought(purchase("refused", SPOT, gang=GANG), is_refused=True)


def test_a_gang_is_not_abandoned_without_a_list_of_offers() -> None:
    """A missing list is not an empty list."""
    assert releases(checked(given(*half_refused(), as_of=NOW))) == []


def test_a_gang_is_bought_again_after_the_back_off() -> None:
    """All missing nodes are bought."""
    later = T0 + 4 * MINUTE
    state = given(*half_refused(), on_sale(SPOT, at=later), as_of=later)
    made = plan(state, policy(), later)

    assert len(made.purchases) == 2
    assert releases(made) == []
