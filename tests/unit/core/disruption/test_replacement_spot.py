"""Return to spot after interruptions, and rebalance recommendations."""

from datetime import datetime, timedelta

import msgspec
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    TimedFact,
    given,
    instance,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    provider_id,
    purchase,
)

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.events.spot import SpotRebalanceRecommended
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.defer import PodProtected, PodsFitNowhere
from gpu_autoscaler.model.reasons.drain import NodeUnderused, RebalanceRecommended

SPOT = offer()
ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
SALE = on_sale(SPOT, ON_DEMAND)


def made(*stories: Story, at: datetime = T0, under: ScalingPolicy | None = None) -> Plan:
    """The plan of this instant, which the plan check agrees with."""
    state, under = given(*stories, as_of=at), under or policy()
    return accepted_plan(state, under, at)


def replaced(*stories: Story, at: datetime, under: ScalingPolicy | None = None) -> list[str]:
    """The offers that are bought so that a node may go."""
    found = made(*stories, at=at, under=under)
    buys = found.purchases
    assert all(isinstance(each.reason, ReplacesNodes) for each in buys)
    return [each.offer.key for each in buys]


# ---- back to spot

BRIDGE = (node("n1", ON_DEMAND), pod("a", on="n1", gpus=8), SALE)
LATER = T0 + 31 * MINUTE


def storm(count: int, at: datetime = T0, of: Offer = SPOT) -> list[Story]:
    """Return interruptions of `count` spot instances of the offer at this instant."""
    found: list[Story] = []
    for number in range(count):
        (told,) = instance(purchase(f"taken-{of.key}-{number}", of), state="terminated", at=at)
        assert isinstance(told.fact, NodeInstanceObserved)
        found.append((TimedFact(msgspec.structs.replace(told.fact, terminated_at=at, is_reclaimed=True), at),))
    return found


def test_a_stand_in_for_spot_is_replaced_by_spot() -> None:
    """Half an hour after its purchase; spot is ready before the node drains."""
    assert replaced(*BRIDGE, at=T0 + 29 * MINUTE) == []
    assert replaced(*BRIDGE, at=LATER) == [SPOT.key]


def test_work_does_not_return_to_frequently_interrupted_spot() -> None:
    """Eight instances were interrupted there: the node stays until that has decayed."""
    assert replaced(*BRIDGE, *storm(8), at=LATER) == []
    assert replaced(*BRIDGE, *storm(8), at=T0 + 20 * HOUR) == [SPOT.key]


def test_work_excluded_from_spot_stays() -> None:
    """A pod critical to the cluster."""
    critical = pod("b", on="n1", gpus=1, priority=2_000_000_000)

    assert replaced(node("n1", ON_DEMAND), critical, SALE, at=LATER) == []


def test_a_small_saving_brings_nothing_back() -> None:
    """Spot at nine tenths of the price is not worth the move."""
    near = offer(usd_per_hour=29.0)

    assert replaced(node("n1", ON_DEMAND), pod("a", on="n1", gpus=8), on_sale(near, ON_DEMAND), at=LATER) == []


# ---- onto free spot

STAND_IN = (node("n1", ON_DEMAND), pod("a", on="n1", gpus=8), on_sale(ON_DEMAND))
LARGE = offer("large", gpus=16, usd_per_hour=30.0)


def drained(*stories: Story, at: datetime = LATER) -> list[str]:
    """The nodes that leave so that their work goes to free nodes; nothing is bought."""
    found = made(*STAND_IN, *stories, at=at)
    assert found.purchases == []
    assert all(isinstance(drain.reason, NodeUnderused) for drain in found.drains)
    return [drain.node_name for drain in found.drains]


def test_a_full_stand_in_for_spot_leaves_for_free_spot() -> None:
    """All eight GPUs are used, and eight are free on a spot node: half an hour after the purchase."""
    free = (node("n2", LARGE), pod("b", on="n2", gpus=8))

    assert drained(*free, at=T0 + 29 * MINUTE) == []
    assert drained(*free) == ["n1"]


def test_a_full_stand_in_for_spot_stays_without_good_spot() -> None:
    """Where spot is interrupted often, or has too little room, or where on-demand capacity is free."""
    beside, same = pod("b", on="n2", gpus=8), msgspec.structs.replace(LARGE, capacity_type=CapacityType.ON_DEMAND)

    assert drained(node("n2", LARGE), beside, *storm(8, of=LARGE)) == []
    assert drained(node("n2", LARGE), pod("b", on="n2", gpus=9)) == []
    assert drained(node("n2", same), beside) == []


def test_free_spot_that_stays_for_the_work_alone_must_be_cheaper() -> None:
    """It is empty, and would be kept for all of the work: 30 dollars instead of 32 save too little."""
    cheap, kept = msgspec.structs.replace(LARGE, price_micro_usd_per_hour=10_000_000), {labels.DO_NOT_DISRUPT: "true"}

    assert drained(node("n2", LARGE, annotations=kept)) == []
    assert drained(node("n2", cheap, annotations=kept)) == ["n1"]


# ---- hints

SETTLED = T0 + 10 * MINUTE  # work that just began is left alone


def hint(name: str, at: datetime = T0) -> Story:
    """The cloud hints that it may take this node."""
    return (TimedFact(SpotRebalanceRecommended(provider_id=provider_id(f"buy-{name}"), noticed_at=at), at),)


def test_work_with_other_capacity_moves_at_a_recommendation() -> None:
    """By choice, with the usual deadline."""
    stories = (node("n1"), node("n2"), pod("a", on="n1"), pod("b", on="n2"), hint("n1", SETTLED), SALE)
    (drain,) = made(*stories, at=SETTLED).decisions

    assert isinstance(drain, DrainNode)
    assert (drain.node_name, drain.is_voluntary, drain.reason) == ("n1", True, RebalanceRecommended(noticed_at=SETTLED))


def test_a_recommendation_buys_no_node() -> None:
    """Without other capacity the node stays, with the reason."""
    found = made(node("n1"), pod("a", on="n1"), hint("n1", SETTLED), SALE, at=SETTLED)

    assert found.decisions == ()
    assert PodsFitNowhere(pods=("uid-a",)) in [each.reason for each in found.deferred]  # type: ignore[arg-type]


def test_a_recommendation_moves_no_protected_work() -> None:
    """It is not a notice."""
    kept = pod("a", on="n1", annotations={"gpu-autoscaler.io/do-not-disrupt": "true"})
    found = made(node("n1"), node("n2"), kept, pod("b", on="n2"), hint("n1"), SALE)

    assert found.decisions == ()
    assert any(isinstance(each.reason, PodProtected) for each in found.deferred)


def test_no_new_work_is_placed_on_a_recommended_node() -> None:
    """Another node is bought; the job queue avoids it as well."""
    stories = (node("n1"), pod("a", on="n1"), job("train", gpus=4), hint("n1"), SALE)
    found = made(*stories)

    assert [type(each) for each in found.decisions] == [BuyNode]
    assert schedule(given(*stories), policy(), T0).placements == ()
    assert len(schedule(given(*stories[:3], SALE), policy(), T0).placements) == 1


def test_a_recommendation_expires() -> None:
    """Without an interruption within the hour the node is as good as any."""
    at = T0 + timedelta(hours=1)
    stories = (node("n1"), pod("a", on="n1"), job("train", gpus=4, at=at), hint("n1"), SALE)

    assert len(schedule(given(*stories, as_of=at - SECOND), policy(), at - SECOND).placements) == 0
    assert len(schedule(given(*stories, as_of=at), policy(), at).placements) == 1


def test_the_last_recommendation_counts() -> None:
    """In whatever order they arrive."""
    later, earlier = hint("n1", T0 + HOUR), hint("n1", T0)
    instance_id = provider_id("buy-n1")

    assert _hints(given(later, earlier)) == _hints(given(earlier, later)) == {instance_id: T0 + HOUR}
    assert _hints(given(earlier, hint("n2", T0 + 8 * HOUR))) == {provider_id("buy-n2"): T0 + 8 * HOUR}


def _hints(state: ClusterState) -> dict[ProviderId, datetime]:
    return dict(state.rebalance_recommended_at)
