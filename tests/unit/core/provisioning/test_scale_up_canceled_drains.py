"""Drains by choice that are canceled for new work: where that costs no more, or nothing else is available."""

import pytest
from tests.support.stories import MINUTE, T0, drained, given, job, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.drain import DemandReturned


def test_returning_demand_cancels_a_drain() -> None:
    """Keeping a draining node costs less than buying another."""
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
def test_an_expensive_node_is_not_kept_for_little_work(sale: Offer, what: type) -> None:
    """One GPU on a node of $10 an hour: a small one is bought, unless its boot costs as much or it has no price."""
    state = given(node("n1"), drained("n1"), pod("a", gpus=1), on_sale(sale), as_of=T0 + MINUTE)
    made = plan(state, policy(), T0 + MINUTE)

    assert [type(each) for each in made.decisions] == [what]
    assert check(made, state, policy()) == ()


def test_an_expensive_node_is_kept_if_a_limit_forbids_another() -> None:
    """A cheaper node may not be bought."""
    sale = on_sale(offer("small", gpus=1, usd_per_hour=1.0))
    state = given(node("n1"), drained("n1"), pod("a", gpus=1), sale, as_of=T0 + MINUTE)
    made = plan(state, policy(nodes_count_max=1), T0 + MINUTE)

    assert [type(each) for each in made.decisions] == [CancelDrain]
    assert [each for each in made.deferred if each.subject == "pod/uid-a" and each.reason.tag() == "nodes_limit"] == []


def test_many_pods_keep_a_node_that_one_would_not() -> None:
    """Eight small nodes cost more than the draining one."""
    sale = on_sale(offer("small", gpus=1, usd_per_hour=1.5))
    eight = [pod(f"p{number}", gpus=1) for number in range(8)]
    state = given(node("n1"), drained("n1"), *eight, sale, as_of=T0 + MINUTE)

    assert [type(each) for each in plan(state, policy(), T0 + MINUTE).decisions] == [CancelDrain]


def test_a_drain_is_canceled_when_its_pods_fit_nowhere_else() -> None:
    """Their new capacity was taken: the node stays."""
    state = given(node("n1"), pod("a", on="n1"), drained("n1"), on_sale(), as_of=T0 + MINUTE)
    (decision,) = plan(state, policy(), T0 + MINUTE).decisions

    assert isinstance(decision, CancelDrain)


def test_an_incomplete_gang_cancels_no_drain() -> None:
    """Half a gang is no reason to keep a node."""
    state = given(node("n1"), drained("n1"), job("train", members=3), on_sale(), as_of=T0 + MINUTE)

    assert plan(state, policy(nodes_count_max=2), T0 + MINUTE).decisions == ()
