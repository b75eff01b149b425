"""Instances of launches whose response was lost, seen after their order was closed."""

import pytest
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    instance,
    job,
    offer,
    on_sale,
    planned,
    policy,
    provider_id,
    purchase,
    synced,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.events.scaling import ScalingNodeTerminated
from gpu_autoscaler.model.decisions import BuyNode, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, PlanId
from gpu_autoscaler.model.reasons.drain import BootTimedOut

ORDER, RELEASE, LATE = purchase("order"), ActionId("release"), T0 + HOUR
DECIDED = ReleaseInstance(
    action_id=RELEASE,
    provider_id=None,
    order_action_id=ORDER.action_id,
    reason=BootTimedOut(booting_seconds=900.0, boot_seconds_max=900.0),
)
NOTHING = ScalingNodeTerminated(
    action_id=RELEASE,
    plan_id=PlanId("plan-2"),
    provider_id=None,
    order_action_id=ORDER.action_id,
    node_name=None,
    terminated_at=T0 + 16 * MINUTE,
)
CLOSED = (
    *bought(ORDER, is_launched=False),
    *planned(DECIDED, plan_id="plan-2", at=T0 + 15 * MINUTE),
    TimedFact(NOTHING, T0 + 16 * MINUTE),
)
SHOWN = (*CLOSED, *instance(ORDER, at=T0 + 14 * MINUTE))


def test_an_order_without_an_instance_is_closed() -> None:
    """Nothing counts and nothing is terminated."""
    assert node_views(given(CLOSED, as_of=LATE), LATE) == ()


def test_a_late_instance_is_terminated() -> None:
    """It is billed, so its observation outweighs the closed order."""
    state = given(SHOWN, as_of=LATE)
    result = plan(state, policy(), LATE)

    (decision,) = result.decisions
    assert isinstance(decision, ReleaseInstance)
    assert decision.provider_id == provider_id("order")
    assert check(result, state, policy()) == ()

    ended = TimedFact(
        ScalingNodeTerminated(
            action_id=decision.action_id,
            plan_id=PlanId("plan-3"),
            provider_id=decision.provider_id,
            order_action_id=ORDER.action_id,
            node_name=None,
            terminated_at=LATE,
        ),
        LATE,
    )
    over = given(SHOWN, planned(decision, plan_id="plan-3", at=LATE), (ended,), as_of=LATE)
    assert node_views(over, LATE) == ()


@pytest.mark.parametrize("silent", ["node.listed", "pod.listed"])
@pytest.mark.parametrize("event", [bought(ORDER), instance(purchase("nobodys"))], ids=["late", "orphan"])
def test_without_a_fresh_watch_of_nodes_nothing_is_released(event: Story, silent: str) -> None:
    """Its node may exist already."""
    seen = synced(event, as_of=LATE)
    blind = tuple(each for each in seen if each.fact.subject_root() != silent)
    assert len(blind) == len(seen) - 1
    assert plan(given(event, as_of=LATE), policy(), LATE).decisions
    assert plan(given(event, blind, is_synced=False), policy(), LATE).decisions == ()


def test_a_late_instance_counts_against_limits() -> None:
    """Until its end is confirmed; the plan check counts it too."""
    state = given(SHOWN, on_sale(offer()), job("train"), as_of=LATE)
    one = policy(nodes_count_max=1)

    assert [each for each in plan(state, one, LATE).decisions if isinstance(each, BuyNode)] == []
    bought_one_more = plan(state, policy(), LATE)
    assert bought_one_more.purchases
    assert any("2 nodes of at most 1" in each for each in check(bought_one_more, state, one))
