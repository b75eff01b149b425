"""What an offer is worth: as promised, until a node that came of it says otherwise."""

import msgspec
from tests.support.stories import T0, Story, given, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import NodePool, ScalingPolicy
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import NodeDemands

SPOT = offer()
ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
VISION = policy(pools=(NodePool(name="default", labels={"team": "vision"}),))


def bought(*stories: Story, under: ScalingPolicy | None = None) -> list[str]:
    """The offers that are bought with both for sale."""
    made = plan(given(*stories, on_sale(SPOT, ON_DEMAND)), under or policy(), T0)
    return [decision.offer.key for decision in made.decisions if isinstance(decision, BuyNode)]


def came_with_cpu(cpu_milli: int) -> Story:
    """A node of the spot offer that came with this much CPU."""
    *before, last = node("n1")
    assert isinstance(last.fact, NodeObserved)
    allocatable = msgspec.structs.replace(last.fact.allocatable, cpu_milli=cpu_milli)
    fact = msgspec.structs.replace(last.fact, allocatable=allocatable)
    return (*before, msgspec.structs.replace(last, fact=fact))


def test_a_promised_label_is_believed_until_a_node_comes_without_it() -> None:
    """Then the next node of that offer would be no better; another offer might."""
    asking = pod("a", demands=NodeDemands(node_selector=(("team", "vision"),)))

    assert bought(asking, under=VISION) == [SPOT.key]
    assert bought(asking, node("n1", labels={"team": "vision"}), pod("b", on="n1", gpus=8), under=VISION) == [SPOT.key]
    assert bought(asking, node("n1"), under=VISION) == [ON_DEMAND.key]


def test_a_label_that_only_real_nodes_carry_is_learnt_from_them() -> None:
    """The driver names the product; once a node showed it, the next one is bought for who selects it."""
    asking = pod("a", demands=NodeDemands(node_selector=(("nvidia.com/gpu.product", "A100-SXM4-40GB"),)))
    came = node("n1", labels={"nvidia.com/gpu.product": "A100-SXM4-40GB"})

    assert bought(asking) == []
    assert bought(asking, came, pod("b", on="n1", gpus=8)) == [SPOT.key]


def test_a_node_that_came_smaller_corrects_its_offer() -> None:
    """A pod that needs what was promised goes elsewhere, one that needs less does not."""
    assert bought(pod("a", cpu=90), came_with_cpu(80_000)) == [ON_DEMAND.key]
    assert bought(pod("a", cpu=70), came_with_cpu(80_000), pod("b", on="n1", gpus=8)) == [SPOT.key]


def test_what_the_nodes_own_pods_take_is_not_sold_twice() -> None:
    """A DaemonSet that takes a quarter of the CPU does so on the next node as well."""
    daemon = pod("ds", on="n1", gpus=0, cpu=24, owner_kind="DaemonSet")

    assert bought(pod("a", cpu=90), node("n1"), daemon) == [ON_DEMAND.key]
