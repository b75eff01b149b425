"""Nodes that leave by choice and are kept for work that comes: where that costs no more, or nothing else can be had."""

import pytest
from tests.support.stories import MINUTE, T0, drained, given, job, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.drain import DemandReturned


def test_demand_that_returns_stops_a_drain() -> None:
    """Keeping a node that leaves by choice costs less than buying another."""
    state = given(node("n1"), drained("n1"), job("train"), on_sale(), as_of=T0 + MINUTE)
    (decision,) = plan(state, policy(), T0 + MINUTE).decisions

    assert isinstance(decision, CancelDrain)
    assert decision.drain_action_id == "drain-n1"
    assert decision.reason == DemandReturned(demand=("job/train",))


@pytest.mark.parametrize(
    ("sale", "what"),
    [
        (offer("small", gpus=1, usd_per_hour=1.0), BuyNode),
        (offer("small", gpus=1, usd_per_hour=9.8, boot_seconds=900.0), CancelDrain),
        (offer("small", gpus=1, usd_per_hour=None), CancelDrain),
    ],
)
def test_a_dear_node_is_not_kept_for_what_is_had_for_less(sale: Offer, what: type) -> None:
    """One GPU on a node of $10 an hour: a small one is bought, unless its boot makes it as dear, or nobody knows."""
    state = given(node("n1"), drained("n1"), pod("a", gpus=1), on_sale(sale), as_of=T0 + MINUTE)
    made = plan(state, policy(), T0 + MINUTE)

    assert [type(each) for each in made.decisions] == [what]
    assert check(made, state, policy()) == ()


def test_a_dear_node_is_kept_where_a_limit_forbids_another() -> None:
    """What costs less may not be bought: work does not wait for money that nobody may spend."""
    sale = on_sale(offer("small", gpus=1, usd_per_hour=1.0))
    state = given(node("n1"), drained("n1"), pod("a", gpus=1), sale, as_of=T0 + MINUTE)
    made = plan(state, policy(nodes_count_max=1), T0 + MINUTE)

    assert [type(each) for each in made.decisions] == [CancelDrain]
    assert [each for each in made.deferred if each.subject == "pod/uid-a" and each.reason.tag() == "nodes_limit"] == []


def test_many_pods_keep_a_node_that_one_would_not() -> None:
    """Eight small ones cost more than the node that leaves."""
    sale = on_sale(offer("small", gpus=1, usd_per_hour=1.5))
    eight = [pod(f"p{number}", gpus=1) for number in range(8)]
    state = given(node("n1"), drained("n1"), *eight, sale, as_of=T0 + MINUTE)

    assert [type(each) for each in plan(state, policy(), T0 + MINUTE).decisions] == [CancelDrain]


def test_a_drain_stops_when_its_pods_have_no_other_place() -> None:
    """The room they were to move to is taken: the node stays."""
    state = given(node("n1"), pod("a", on="n1"), drained("n1"), on_sale(), as_of=T0 + MINUTE)
    (decision,) = plan(state, policy(), T0 + MINUTE).decisions

    assert isinstance(decision, CancelDrain)


def test_a_gang_that_cannot_be_completed_stops_no_drain() -> None:
    """Half a gang is no reason to keep a node."""
    state = given(node("n1"), drained("n1"), job("train", members=3), on_sale(), as_of=T0 + MINUTE)

    assert plan(state, policy(nodes_count_max=2), T0 + MINUTE).decisions == ()
