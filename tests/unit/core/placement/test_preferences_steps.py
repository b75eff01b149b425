"""Preferences in each step that places work: purchases, job starts and removals."""

from datetime import timedelta
from typing import Any

import pytest
from tests.support.stories import HOUR, T0, Story, given, job, node, offer, on_sale, pod, policy
from tests.unit.core.placement.test_preferences import (
    A,
    B,
    bought,
    dropped,
    likes_zone,
    near,
    place_of,
    preferring,
    spread,
)

from gpu_autoscaler.core.disruption.repack import place_elsewhere
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.drain import NodeUnderused
from gpu_autoscaler.model.scheduling import LabelRequirement, NodePreference, NodeSelectorTerm, Taint

MODELS = ("H100", "A100")  # either will do, the first one rather
MARKED = Taint(key="team", effect="PreferNoSchedule")


def of_model(model: str, usd_per_hour: float = 8.0) -> Offer:
    """A node of eight GPUs of this model."""
    return offer(f"big-{model}", model=model, capacity_type=CapacityType.ON_DEMAND, usd_per_hour=usd_per_hour)


def likes_type(name: str, weight: int) -> NodePreference:
    """A preference of one instance type."""
    term = NodeSelectorTerm((LabelRequirement(labels.INSTANCE_TYPE, "In", (name,)),))
    return NodePreference(weight=weight, term=term)


def starts_on(*stories: Story) -> list[tuple[str, ...]]:
    """The nodes of each job that starts now."""
    return [each.node_names for each in schedule(given(*stories), policy(), T0).placements]


# ---- scale-up


def test_of_equal_cost_the_first_gpu_model_is_bought() -> None:
    """Nothing is dropped then; if the other one is cheaper, it is bought and the preference is reported."""
    wish = job("a", gpu_models=MODELS)
    (kept,) = bought(wish, on_sale(of_model("A100"), of_model("H100")))
    (cheap,) = bought(wish, on_sale(of_model("A100", 7.99), of_model("H100")))

    assert (kept.offer.gpu_model, dropped(kept)) == ("H100", ())
    assert cheap.offer.gpu_model == "A100"
    assert [(each.preference, each.kept_by) for each in dropped(cheap)] == [
        ("GPU model H100 first", of_model("H100").key)
    ]


def test_weights_of_node_preferences_are_added_up() -> None:
    """Two lighter ones outweigh one heavier one, if a node satisfies both."""
    wishes = (likes_zone("zone-a", 50), likes_zone("zone-b", 30), likes_type(B.instance_type, 1))
    both = (likes_zone("zone-a", 50), likes_zone("zone-b", 30), NodePreference(weight=30, term=wishes[1].term))

    assert [buy.offer.zone for buy in bought(preferring("a", nodes=wishes), on_sale(A, B))] == ["zone-a"]
    assert [buy.offer.zone for buy in bought(preferring("a", nodes=both), on_sale(A, B))] == ["zone-b"]


def test_an_avoided_taint_precedes_the_order_of_gpu_models() -> None:
    """The better model is in the pool with the taint: the order of models is dropped first."""
    pools = policy(
        pools=(
            NodePool(name="better", gpu_models=("H100",), taints=(MARKED,)),
            NodePool(name="other", gpu_models=("A100",)),
        )
    )
    (buy,) = bought(job("a", gpu_models=MODELS), on_sale(of_model("A100"), of_model("H100")), under=pools)

    assert buy.pool == "other"
    assert [each.preference for each in dropped(buy)] == ["GPU model H100 first"]


@pytest.mark.parametrize(
    ("first_dropped", "kept", "zone"),
    [
        ({"together": near(labels.ZONE, 100)}, {"apart": near(labels.ZONE, 1)}, "zone-b"),
        ({"apart": near(labels.ZONE, 100)}, {"nodes": (likes_zone("zone-a", 1),)}, "zone-a"),
        ({"nodes": (likes_zone("zone-a", 100),)}, {"spreads": spread()}, "zone-b"),
    ],
    ids=["near before far", "far before liked nodes", "liked nodes before even spread"],
)
def test_purchases_drop_preferences_in_the_same_order(
    first_dropped: dict[str, Any], kept: dict[str, Any], zone: str
) -> None:
    """A web pod runs in zone a. Weights count within a kind, never between kinds."""
    there = (node("n1", of=offer(zone="zone-a")), pod("w", on="n1", gpus=8, labels={"app": "web"}))
    (buy,) = bought(*there, preferring("a", **first_dropped, **kept), on_sale(A, B))

    assert buy.offer.zone == zone


# ---- scheduling, and room that is there


def test_a_job_starts_on_its_first_gpu_model() -> None:
    """Both models are free; if the first is taken it starts on the other: a preference never makes it wait."""
    nodes = (node("n1", of_model("A100")), node("n2", of_model("H100")))
    wish = job("a", gpu_models=MODELS, is_preemptible=False)

    assert starts_on(*nodes, wish) == [("n2",)]
    assert starts_on(*nodes, pod("w", on="n2", gpus=8), wish) == [("n1",)]


def test_preferred_host_anti_affinity() -> None:
    """Hosts with its kind come last; without another it runs there, and nothing is bought for a preference."""
    nodes = (node("n1"), node("n2"), pod("w", on="n1", gpus=1, labels={"app": "web"}))
    alone = preferring("a", gpus=1, apart=near(labels.HOSTNAME))

    assert place_of(*nodes, pod("plain", gpus=1)) == "n1"
    assert place_of(*nodes, alone) == "n2"
    assert place_of(*nodes, pod("full", on="n2", gpus=8), alone) == "n1"
    assert bought(*nodes, pod("full", on="n2", gpus=8), alone, on_sale(A)) == []


# ---- when nodes go


LITTLE = (node("n1"), node("n2", offer(zone="zone-a")), node("n3", offer(zone="zone-b")))


def hosts(state: ClusterState) -> list[str]:
    """Where the pods of n1 would go."""
    draft = Draft.start(state, T0 + HOUR)
    view = next(each for each in draft.views if each.name == "n1")
    places = place_elsewhere((view,), draft.pods["n1"], draft, state)
    return sorted(draft.free_capacity[key].name for key in places.hosts)


@pytest.mark.parametrize("zone", ["zone-a", "zone-b"])
def test_moved_pods_use_their_preferred_node(zone: str) -> None:
    """Both nodes have capacity, and one is fuller."""
    moved = preferring("a", on="n1", gpus=1, nodes=(likes_zone(zone),))
    state = given(*LITTLE, moved, pod("b", on="n2", gpus=6), pod("c", on="n3", gpus=6), as_of=T0 + HOUR)

    assert hosts(state) == [{"zone-a": "n2", "zone-b": "n3"}[zone]]


def test_a_preference_keeps_no_unneeded_node() -> None:
    """The pod prefers the zone of its node, and fits only elsewhere: the node is removed all the same."""
    moved = preferring("a", on="n1", gpus=1, nodes=(likes_zone("zone-c"),))
    nodes = (node("n1", offer(zone="zone-c")), node("n2", offer(zone="zone-a")))
    state = given(*nodes, moved, pod("b", on="n2", gpus=6), as_of=T0 + HOUR)
    gone = [each for each in plan(state, policy(), T0 + HOUR).decisions if isinstance(each, DrainNode)]

    assert [(each.node_name, type(each.reason)) for each in gone] == [("n1", NodeUnderused)]


@pytest.mark.parametrize("zone", ["zone-a", "zone-b"])
def test_a_replacement_follows_the_preferences_of_its_work(zone: str) -> None:
    """An expired node, and two offers of equal cost; the preferred one is not bought if it costs more."""
    old = T0 + timedelta(days=8)
    work = preferring("a", on="n1", nodes=(likes_zone(zone),))
    for dearer, expected in ((0.0, zone), (0.01, "zone-a")):
        sold = (A, offer(zone="zone-b", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=8.0 + dearer))
        state = given(node("n1", offer(zone="zone-c")), work, on_sale(*sold, at=old), as_of=old)
        buys = [each for each in plan(state, policy(), old).decisions if isinstance(each, BuyNode)]

        assert [(each.offer.zone, type(each.reason)) for each in buys] == [(expected, ReplacesNodes)]
