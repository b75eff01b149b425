"""Drains by choice that are canceled for new work: where that costs no more, or nothing else is available."""

from datetime import timedelta

import pytest
from tests.support.mixed_groups import spread
from tests.support.stories import MINUTE, T0, Story, drained, given, job, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.provisioning import scale_up
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


def _beside_drains_that_work_cancels(*apps: str) -> Story:
    """Zone b has room for the small pods that leave draining nodes of zone a. For each app two pods that need another
    GPU model, and one of less priority that stands alone, find no node.

    With the small pods in zone b the two are bought for in the cheaper zone a.
    """
    draining, other = offer("gpu8", zone="zone-a", usd_per_hour=10.0), offer("gpu8", zone="zone-b", usd_per_hour=11.0)
    a10 = [
        offer("a10", gpus=1, model="A10G", zone=f"zone-{zone}", usd_per_hour=usd) for zone, usd in (("a", 1), ("b", 2))
    ]
    story: Story = (*node("n0", other), *pod("busy", gpus=8, on="n0"), *on_sale(draining, other, *a10))
    for app in apps:
        story += (*node(f"n-{app}", draining), *drained(f"n-{app}"))
        story += pod(f"{app}-0", on=f"n-{app}", gpus=0, cpu=0.1, labels={"app": app}, pod_affinity=spread(app))
        for number in (1, 2):
            at = T0 + timedelta(seconds=number)
            story += pod(f"{app}-{number}", gpus=1, model="A10G", at=at, labels={"app": app}, pod_affinity=spread(app))
        story += pod(f"alone-{app}", gpus=8, priority=-1)
    return story


@pytest.mark.parametrize("apps", [("web",), ("web", "api")])
def test_pods_that_a_canceled_drain_returns_are_counted_where_they_run(apps: tuple[str, ...]) -> None:
    """Others are spread around them, also those that were planned for before the drain was canceled."""
    state = given(_beside_drains_that_work_cancels(*apps), as_of=T0 + MINUTE)
    made = plan(state, policy(), T0 + MINUTE)

    assert check(made, state, policy()) == ()
    assert [each.node_name for each in made.decisions if isinstance(each, CancelDrain)] == [
        f"n-{app}" for app in sorted(apps)
    ]
    assert [each.offer.zone for each in made.purchases].count("zone-b") == len(apps)


def test_the_last_try_cancels_no_drain_whose_pods_count_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is bought instead."""
    monkeypatch.setattr(scale_up, "_TRIES_COUNT_MAX", 1)
    state = given(_beside_drains_that_work_cancels("web"), as_of=T0 + MINUTE)
    made = plan(state, policy(), T0 + MINUTE)

    assert [each.offer.zone for each in made.decisions if isinstance(each, BuyNode)] == ["zone-a", "zone-a", "zone-a"]
    assert len(made.decisions) == len(made.purchases)
    assert check(made, state, policy()) == ()
