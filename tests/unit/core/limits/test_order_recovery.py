"""Open decisions of a lost stream, by what Kubernetes and the cloud show."""

import pytest
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    drained,
    given,
    instance,
    job,
    node,
    on_sale,
    planned,
    pod,
    policy,
    provider_id,
    purchase,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.limits.order_recovery import open_decisions
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingDecisionsRestored, ScalingPlanMade
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.drain import BootTimedOut, DemandReturned

WANTED = UnmetDemand(demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=1)
BUY = purchase("buy", reason=WANTED)
(_DRAINED, *_) = drained("n1")
assert isinstance(_DRAINED.fact, ScalingPlanMade)
DRAIN = _DRAINED.fact.plan.decisions[0]
CANCEL = CancelDrain(
    action_id=ActionId("cancel"),
    drain_action_id=DRAIN.action_id,
    node_uid=NodeUid("uid-n1"),
    node_name="n1",
    reason=DemandReturned(demand=("job/train",)),
)
RELEASE = ReleaseInstance(
    action_id=ActionId("release"),
    provider_id=None,
    order_action_id=BUY.action_id,
    reason=BootTimedOut(booting_seconds=1, boot_seconds_max=1),
)


def plans(*decisions: AnyDecision) -> list[ScalingPlanMade]:
    """One plan per decision, in this order."""
    event = [planned(each, plan_id=f"plan-{number}")[0].fact for number, each in enumerate(decisions)]
    return [fact for fact in event if isinstance(fact, ScalingPlanMade)]


def world(*stories: Story) -> ClusterState:
    """What Kubernetes and the cloud show on a new stream, without any decision."""
    return given(*(tuple(each for each in story if each.fact.domain() != "scaling") for story in stories))


def opened(
    state: ClusterState, *decisions: AnyDecision, after: object = MINUTE, limits: ScalingPolicy | None = None
) -> list[str]:
    """The action ids that are open."""
    assert after is MINUTE or after is HOUR
    past = open_decisions(plans(*decisions), state, limits or policy(), T0 + after)
    assert not any(each.is_only_counted for each in past)
    return [each.decision.action_id for each in past]


def test_the_order_of_a_booting_instance_is_open() -> None:
    """Also of a late one, which is then released."""
    assert opened(world(instance(BUY)), BUY) == ["buy"]
    assert opened(world(instance(BUY)), BUY, after=HOUR) == ["buy"]


def test_an_unseen_order_is_launched_again_with_its_token() -> None:
    """The call may have been in flight; after its deadline it is closed."""
    assert opened(world(), BUY) == ["buy"]
    assert opened(world(), BUY, after=HOUR) == []


def test_a_refused_order_is_not_launched_again() -> None:
    """The refusal is lost, but a later plan bought for the same demand."""
    assert opened(world(), BUY, purchase("again", reason=WANTED)) == ["again"]
    elsewhere = UnmetDemand(demand=("job/other",), offers_considered=1, price_micro_usd_per_hour=1)
    other = purchase("other", reason=elsewhere)
    assert opened(world(), BUY, other) == ["buy", "other"]


def test_unseen_orders_are_launched_again_only_within_limits() -> None:
    """Found by simulator seed 27: the replacement of a refused node filled its pool."""
    elsewhere = UnmetDemand(demand=("job/other",), offers_considered=1, price_micro_usd_per_hour=1)
    other = purchase("other", reason=elsewhere)
    state = world(instance(other))
    two = policy(pools=[{"name": BUY.pool, "nodes_count_max": 2}])
    assert opened(state, BUY, other, limits=two) == ["buy", "other"]
    one = policy(pools=[{"name": BUY.pool, "nodes_count_max": 1}])
    past = open_decisions(plans(BUY, other), state, one, T0 + MINUTE)
    assert {each.decision.action_id: each.is_only_counted for each in past} == {"buy": True, "other": False}


def test_the_order_of_a_node_without_its_gpus_is_open() -> None:
    """Found by simulator seed 27: without it no deadline applied."""
    bare = node("n1", gpus_allocatable=0)
    late = purchase("buy-n1")
    assert opened(world(bare), late) == ["buy-n1"]
    assert opened(world(bare), late, after=HOUR) == ["buy-n1"]


def test_closed_decisions_are_not_restarted() -> None:
    """The node is ready, the instance terminated, or the order released."""
    ready = node("n1")
    assert opened(world(ready), purchase("buy-n1")) == []
    assert opened(world(instance(BUY, state="terminated")), BUY, RELEASE) == []
    assert opened(world(instance(BUY)), BUY, RELEASE) == ["release"]


def test_a_lost_node_with_work_is_not_released() -> None:
    """Only an empty node can be an order that never became usable."""
    silent = node("n1", is_ready=False)
    late = purchase("buy-n1")
    assert opened(world(silent, pod("train-0", on="n1")), late, after=HOUR) == []
    assert opened(world(silent), late, after=HOUR) == ["buy-n1"]
    assert opened(world(silent, pod("train-0", on="n1")), late) == ["buy-n1"]


@pytest.mark.parametrize(
    ("is_cordoned", "decisions", "expected"),
    [
        (True, (DRAIN,), [DRAIN.action_id]),
        (False, (DRAIN,), []),
        (True, (DRAIN, CANCEL), ["cancel"]),
        (False, (DRAIN, CANCEL), []),
    ],
)
def test_a_drain_is_open_while_its_node_is_cordoned(
    is_cordoned: bool,  # noqa: FBT001 - a column of the table
    decisions: tuple[AnyDecision, ...],
    expected: list[str],
) -> None:
    """A schedulable node is decided again."""
    assert opened(world(node("n1", is_cordoned=is_cordoned)), *decisions) == expected


def test_of_two_drains_of_a_node_the_last_is_open() -> None:
    """The first was canceled."""
    assert isinstance(DRAIN, DrainNode)
    (again,) = (each.fact for each in drained("n1", action_id="again", is_started=False))
    assert isinstance(again, ScalingPlanMade)
    assert opened(world(node("n1", is_cordoned=True)), DRAIN, again.plan.decisions[0]) == ["again"]


def test_demand_of_a_restored_order_is_not_bought_again() -> None:
    """Without its order a booting instance is no capacity."""
    waiting, sale = job("train"), on_sale()
    state = world(waiting, sale, instance(BUY))
    assert [type(each) for each in plan(state, policy(), T0).decisions] == [BuyNode]
    past = open_decisions(plans(BUY), state, policy(), T0)
    event = TimedFact(ScalingDecisionsRestored(past=past, restored_at=T0), T0)
    restored = given(
        *((each,) for story in (waiting, sale, instance(BUY)) for each in story if each.fact.domain() != "scaling"),
        (event,),
    )
    assert restored.restored_at == T0
    result = plan(restored, policy(), T0)
    assert result.decisions == ()
    assert check(result, restored, policy()) == ()
    (view,) = node_views(restored, T0)
    assert (view.phase, view.provider_id) == (NodePhase.LAUNCHED, provider_id("buy"))
    assert fold(restored, ()) is restored
