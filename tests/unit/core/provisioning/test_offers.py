"""The offer catalog: amounts and labels as promised, until a delivered node differs."""

import msgspec
from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    given,
    node,
    offer,
    on_sale,
    pod,
    policy,
    provider_id,
    record,
)

from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.provisioning.offers import OfferCatalog, OfferedNodes
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeGone, NodeObserved
from gpu_autoscaler.events.scaling import ScalingNodeTerminated
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import NodeDemands

SPOT = offer()
ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
VISION = policy(pools=(NodePool(name="default", labels={"team": "vision"}),))


def bought(*stories: Story, under: ScalingPolicy | None = None) -> list[str]:
    """The offers that are bought if both are available."""
    made = plan(given(*stories, on_sale(SPOT, ON_DEMAND)), under or policy(), T0)
    return [decision.offer.key for decision in made.purchases]


def delivered_with_cpu(cpu_milli: int) -> Story:
    """A node of the spot offer that was delivered with this much CPU."""
    *before, last = node("n1")
    assert isinstance(last.fact, NodeObserved)
    allocatable = msgspec.structs.replace(last.fact.allocatable, cpu_milli=cpu_milli)
    fact = msgspec.structs.replace(last.fact, allocatable=allocatable)
    return (*before, msgspec.structs.replace(last, fact=fact))


def test_a_promised_label_is_used_until_a_node_lacks_it() -> None:
    """The next node of that offer would lack it as well."""
    asking = pod("a", demands=NodeDemands(node_selector=(("team", "vision"),)))

    assert bought(asking, under=VISION) == [SPOT.key]
    assert bought(asking, node("n1", labels={"team": "vision"}), pod("b", on="n1", gpus=8), under=VISION) == [SPOT.key]
    assert bought(asking, node("n1"), under=VISION) == [ON_DEMAND.key]


def test_offered_nodes_are_derived_again_only_for_another_delivered_node() -> None:
    """A pod that ended on the node is no reason, one of the node itself is: it takes from what is for work."""

    def offered(state: ClusterState) -> OfferedNodes:
        return OfferCatalog(Draft.start(state, T0, VISION).views, state, VISION, T0).nodes

    state = given(node("n1"), pod("a", on="n1"), on_sale(SPOT))
    before = offered(state)

    ended, daemon = pod("a", on="n1", phase="succeeded", version=2), pod("b", on="n1", owner_kind="DaemonSet")
    assert offered(fold(state, record(ended))) is before
    assert offered(fold(state, record(daemon))) is not before


def test_a_label_of_delivered_nodes_is_learned() -> None:
    """The driver labels the product; after one such node, the offer is bought for pods that select it."""
    asking = pod("a", demands=NodeDemands(node_selector=(("nvidia.com/gpu.product", "A100-SXM4-40GB"),)))
    came = node("n1", labels={"nvidia.com/gpu.product": "A100-SXM4-40GB"})

    assert bought(asking) == []
    assert bought(asking, came, pod("b", on="n1", gpus=8)) == [SPOT.key]


def test_a_smaller_node_corrects_its_offer() -> None:
    """A pod that needs the promised amounts uses another offer, a smaller pod does not."""
    assert bought(pod("a", cpu=90), delivered_with_cpu(80_000)) == [ON_DEMAND.key]
    assert bought(pod("a", cpu=70), delivered_with_cpu(80_000), pod("b", on="n1", gpus=8)) == [SPOT.key]


def removed_after(gpus: int, *, minutes: float = 15) -> Story:
    """A node of the spot offer that had this many GPUs, was ready for this long, and is gone."""
    since = T0 - minutes * MINUTE
    came = node("n1", gpus_allocatable=gpus, labels={labels.POOL: "default"}, at=since)
    ended = ScalingNodeTerminated(
        action_id=ActionId("buy-n1"), plan_id=PlanId("plan-buy-n1"), order_action_id=ActionId("buy-n1"),
        provider_id=provider_id(ActionId("buy-n1")), node_name="n1", terminated_at=T0,
    )  # fmt: skip
    gone = NodeGone(epoch=EPOCH, version=2, node_uid=NodeUid("uid-n1"), name="n1")
    return (*came, TimedFact(ended, T0), TimedFact(gone, T0))


def test_an_offer_with_missing_gpus_is_not_bought_again() -> None:
    """Four GPUs of eight until it was released: work that needs eight uses another offer for an hour."""
    assert bought(pod("a", gpus=8), removed_after(4)) == [ON_DEMAND.key]
    assert bought(pod("a", gpus=4), removed_after(4)) == [SPOT.key]
    assert bought(pod("a", gpus=8), removed_after(8)) == [SPOT.key]
    later = given(pod("a", gpus=8), removed_after(4), on_sale(SPOT, ON_DEMAND), as_of=T0 + 2 * HOUR)
    made = plan(later, policy(), T0 + 2 * HOUR)
    assert [each.offer.key for each in made.purchases] == [SPOT.key]


def test_a_node_removed_while_booting_proves_nothing() -> None:
    """A spot node interrupted while it boots says nothing about the next one."""
    assert bought(pod("a", gpus=8), removed_after(0, minutes=2)) == [SPOT.key]


def test_the_requests_of_daemonsets_are_subtracted_from_the_offer() -> None:
    """A DaemonSet takes a quarter of the CPU on the next node as well."""
    daemon = pod("ds", on="n1", gpus=0, cpu=24, owner_kind="DaemonSet")

    assert bought(pod("a", cpu=90), node("n1"), daemon) == [ON_DEMAND.key]
