"""Capacity before anybody waits for it: the policy's minimum."""

from tests.support.stories import MINUTE, T0, given, node, notice, offer, on_sale, policy

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.reasons import BelowMinimum, WatchStale

CHEAP = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, usd_per_hour=0.5)


def bought(state: ClusterState, nodes_count_min: int) -> list[BuyNode]:
    """What is bought to keep this minimum."""
    made = plan(state, policy(nodes_count_min=nodes_count_min), T0)
    return [decision for decision in made.decisions if isinstance(decision, BuyNode)]


def test_the_minimum_is_kept_with_the_cheapest_nodes() -> None:
    """Nodes that the policy wants are bought although nobody waits; those that are there count."""
    two = bought(given(on_sale(offer(), CHEAP)), 2)

    assert [decision.offer.key for decision in two] == [CHEAP.key, CHEAP.key]
    assert two[0].reason == BelowMinimum(nodes_count=0, nodes_count_min=2)
    assert len(bought(given(node("n1"), on_sale(CHEAP)), 2)) == 1
    assert bought(given(node("n1"), node("n2"), on_sale(CHEAP)), 2) == []


def test_a_node_that_leaves_does_not_count() -> None:
    """The cloud takes the only one: another is bought at once."""
    state = given(node("n1"), notice("n1", reclaim_at=T0 + MINUTE), on_sale(CHEAP))

    assert [decision.reason for decision in bought(state, 1)] == [BelowMinimum(nodes_count=1, nodes_count_min=1)]


def test_the_minimum_is_not_counted_on_an_old_picture() -> None:
    """Nodes that were not listed may be there all the same."""
    state = given(on_sale(CHEAP), is_synced=False)
    (held,) = [each for each in plan(state, policy(nodes_count_min=1), T0).held_back if each.step == "prepare"]

    assert bought(state, 1) == []
    assert held.subject == "cluster"
    assert isinstance(held.reason, WatchStale)
