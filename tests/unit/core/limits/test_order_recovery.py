"""Which decisions of a lost stream go on: what the world still shows of them decides, never a guess."""

import pytest
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    Told,
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
from gpu_autoscaler.core.nodes.views import NodePhase, node_views
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
    """One plan for each decision, in this order."""
    told = [planned(each, plan_id=f"plan-{number}")[0].fact for number, each in enumerate(decisions)]
    return [fact for fact in told if isinstance(fact, ScalingPlanMade)]


def world(*stories: Story) -> ClusterState:
    """What Kubernetes and the cloud show on a new stream: nothing of what was decided is known."""
    return given(*(tuple(each for each in story if each.fact.domain() != "scaling") for story in stories))


def opened(
    state: ClusterState, *decisions: AnyDecision, after: object = MINUTE, limits: ScalingPolicy | None = None
) -> list[str]:
    """Names of the actions that go on."""
    assert after is MINUTE or after is HOUR
    past = open_decisions(plans(*decisions), state, limits or policy(), T0 + after)
    assert not any(each.is_only_counted for each in past)
    return [each.decision.action_id for each in past]


def test_an_instance_that_boots_keeps_its_order() -> None:
    """It is there, and no node of it yet; also one that is late, which is then given back."""
    assert opened(world(instance(BUY)), BUY) == ["buy"]
    assert opened(world(instance(BUY)), BUY, after=HOUR) == ["buy"]


def test_an_order_that_nobody_shows_is_asked_for_again_under_its_token() -> None:
    """The call may have been under way; after its deadline it is nothing any more."""
    assert opened(world(), BUY) == ["buy"]
    assert opened(world(), BUY, after=HOUR) == []


def test_an_order_that_was_refused_is_not_asked_for_again() -> None:
    """That the cloud refused it is lost, but a later plan bought for the same demand: that one counts."""
    assert opened(world(), BUY, purchase("again", reason=WANTED)) == ["again"]
    external = UnmetDemand(demand=("job/other",), offers_considered=1, price_micro_usd_per_hour=1)
    other = purchase("other", reason=external)
    assert opened(world(), BUY, other) == ["buy", "other"]


def test_what_may_have_been_refused_is_asked_for_again_only_where_all_of_it_has_room() -> None:
    """Found by seed 27: the node bought in place of a refused one filled its pool, and the refusal was lost."""
    external = UnmetDemand(demand=("job/other",), offers_considered=1, price_micro_usd_per_hour=1)
    other = purchase("other", reason=external)
    state = world(instance(other))
    two = policy(pools=[{"name": BUY.pool, "nodes_count_max": 2}])
    assert opened(state, BUY, other, limits=two) == ["buy", "other"]
    one = policy(pools=[{"name": BUY.pool, "nodes_count_max": 1}])
    past = open_decisions(plans(BUY, other), state, one, T0 + MINUTE)
    assert {each.decision.action_id: each.is_only_counted for each in past} == {"buy": True, "other": False}


def test_a_node_that_registered_without_its_gpus_is_still_waited_for() -> None:
    """Found by seed 27: it was taken for one that had come up, no deadline held for it, and nobody gave it back."""
    bare = node("n1", gpus_allocatable=0)
    late = purchase("buy-n1")
    assert opened(world(bare), late) == ["buy-n1"]
    assert opened(world(bare), late, after=HOUR) == ["buy-n1"]


def test_what_is_over_is_not_begun_again() -> None:
    """The node is ready, or the instance has ended, or it was given back."""
    ready = node("n1")
    assert opened(world(ready), purchase("buy-n1")) == []
    assert opened(world(instance(BUY, state="terminated")), BUY, RELEASE) == []
    assert opened(world(instance(BUY)), BUY, RELEASE) == ["release"]


def test_a_silent_node_with_work_on_it_is_not_given_back() -> None:
    """It may have been in use and fallen silent: only an empty one can be an order that never became usable."""
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
def test_a_drain_goes_on_while_its_node_is_cordoned(
    is_cordoned: bool,  # noqa: FBT001 - a column of the table
    decisions: tuple[AnyDecision, ...],
    expected: list[str],
) -> None:
    """A node that takes pods is decided on anew; one that was to be left alone is uncordoned."""
    assert opened(world(node("n1", is_cordoned=is_cordoned)), *decisions) == expected


def test_of_two_drains_of_a_node_the_last_one_goes_on() -> None:
    """The first was given up: its word is lost, the second plan's is not."""
    assert isinstance(DRAIN, DrainNode)
    (again,) = (each.fact for each in drained("n1", action_id="again", is_started=False))
    assert isinstance(again, ScalingPlanMade)
    assert opened(world(node("n1", is_cordoned=True)), DRAIN, again.plan.decisions[0]) == ["again"]


def test_nothing_is_bought_for_demand_that_a_restored_order_covers() -> None:
    """Without its order a booting instance is no room, and the job would get a second one."""
    waiting, sale = job("train"), on_sale()
    state = world(waiting, sale, instance(BUY))
    assert [type(each) for each in plan(state, policy(), T0).decisions] == [BuyNode]
    past = open_decisions(plans(BUY), state, policy(), T0)
    told = Told(ScalingDecisionsRestored(past=past, restored_at=T0), T0)
    restored = given(
        *((each,) for story in (waiting, sale, instance(BUY)) for each in story if each.fact.domain() != "scaling"),
        (told,),
    )
    assert restored.restored_at == T0
    made = plan(restored, policy(), T0)
    assert made.decisions == ()
    assert check(made, restored, policy()) == ()
    (view,) = node_views(restored, T0)
    assert (view.phase, view.provider_id) == (NodePhase.LAUNCHED, provider_id("buy"))
    assert fold(restored, ()) is restored
