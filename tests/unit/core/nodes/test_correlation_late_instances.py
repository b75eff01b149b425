"""A launch whose answer was lost may show late: after its order was closed as one that never became an instance."""

import pytest
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    Told,
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
    Told(NOTHING, T0 + 16 * MINUTE),
)
SHOWN = (*CLOSED, *instance(ORDER, at=T0 + 14 * MINUTE))


def test_an_order_that_never_became_an_instance_is_over() -> None:
    """Nothing is left of it to count or to end."""
    assert node_views(given(CLOSED, as_of=LATE), LATE) == ()


def test_an_instance_that_shows_after_all_is_ended() -> None:
    """It costs money: the cloud's word that it is there outweighs its word that it never was."""
    state = given(SHOWN, as_of=LATE)
    made = plan(state, policy(), LATE)

    (decision,) = made.decisions
    assert isinstance(decision, ReleaseInstance)
    assert decision.provider_id == provider_id("order")
    assert check(made, state, policy()) == ()

    ended = Told(
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
@pytest.mark.parametrize("told", [bought(ORDER), instance(purchase("nobodys"))], ids=["late", "orphan"])
def test_who_does_not_see_nodes_judges_no_boot_and_no_orphan(told: Story, silent: str) -> None:
    """Its node may have come long ago: nothing is given back until the watch says that it sees again."""
    seen = synced(told, as_of=LATE)
    blind = tuple(each for each in seen if each.fact.subject_root() != silent)
    assert len(blind) == len(seen) - 1
    assert plan(given(told, as_of=LATE), policy(), LATE).decisions
    assert plan(given(told, blind, is_synced=False), policy(), LATE).decisions == ()


def test_an_instance_that_shows_after_all_counts_against_the_limits() -> None:
    """Until the cloud says that it is gone, no other takes its place; the second opinion counts it too."""
    state = given(SHOWN, on_sale(offer()), job("train"), as_of=LATE)
    one = policy(nodes_count_max=1)

    assert [each for each in plan(state, one, LATE).decisions if isinstance(each, BuyNode)] == []
    bought_one_more = plan(state, policy(), LATE)
    assert any(isinstance(each, BuyNode) for each in bought_one_more.decisions)
    assert any("2 nodes of at most 1" in each for each in check(bought_one_more, state, one))
