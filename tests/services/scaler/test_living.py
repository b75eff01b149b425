"""Everything open is published again in a form from which it can be rebuilt."""

from datetime import datetime, timedelta

import pytest
from tests.support.stories import (
    HOUR,
    T0,
    Story,
    TimedFact,
    bought,
    drained,
    given,
    instance,
    notice,
    planned,
    policy,
    provider_id,
    purchase,
    record,
    synced,
)

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeInstanceListed, NodeInstanceObserved
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDocumentsAccepted
from gpu_autoscaler.events.scaling import (
    ScalingDecisionsRestored,
    ScalingNodeTerminated,
    ScalingOrderResynced,
    ScalingPlanMade,
)
from gpu_autoscaler.model.directives import Freeze
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.model.policy_documents import PolicyDocument
from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables
from gpu_autoscaler.sim.invariants.readability import living_differences
from gpu_autoscaler_services.scaler import recovery
from gpu_autoscaler_services.scaler.living import living
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery

LATER = T0 + timedelta(days=3)
FROZEN = PolicyDirectiveGiven(
    directive=Freeze(), reason="release", given_by="ada", given_at=T0, until=T0 + timedelta(days=20)
)
DOCUMENTS = PolicyDocumentsAccepted(
    documents=(PolicyDocument(name="gpu", uid="u", generation=1, created_at=T0),), accepted_at=T0
)
STORIES: dict[str, Story] = {
    "order": bought(purchase("buy-a")),
    "instance": instance(purchase("buy-a")),
    "drain": drained("n1"),
    "notice": notice("n1", reclaim_at=T0 + timedelta(days=9)),
    "directive": (TimedFact(FROZEN, T0),),
    "documents": (TimedFact(DOCUMENTS, T0),),
}


@pytest.mark.parametrize("name", STORIES)
def test_open_objects_can_be_rebuilt_from_what_is_published_again(name: str) -> None:
    """A reader that finds nothing else in the streams knows as much of them; one that knows them learns nothing."""
    original = given(STORIES[name])
    again = record([TimedFact(fact, LATER) for fact in living(original)])
    rebuilt = fold(given(synced(STORIES[name], as_of=T0), is_synced=False), again)
    assert living_differences(original, rebuilt, FACTS) == []
    assert again
    assert living_differences(original, fold(original, again), FACTS) == []


BUY = purchase("buy-a")
ENDED_AT = T0 + timedelta(minutes=30)
TERMINATED = ScalingNodeTerminated(
    action_id=BUY.action_id,
    plan_id=PlanId("plan-buy-a"),
    provider_id=provider_id("buy-a"),
    order_action_id=BUY.action_id,
    node_name=None,
    terminated_at=ENDED_AT,
)
# The cloud no longer lists the instance.
ENDED: Story = (
    *bought(BUY),
    *instance(BUY, state="terminated", at=ENDED_AT),
    TimedFact(TERMINATED, ENDED_AT),
    TimedFact(NodeInstanceListed(provider_ids=(), listed_at=ENDED_AT + HOUR), ENDED_AT + HOUR),
)


def charged(to_at: datetime, *, is_final: bool) -> TimedFact:
    """The ledger has charged the instance up to then."""
    span = CostAccrued(
        provider_id=provider_id("buy-a"),
        node_name=None,
        instance_type=BUY.offer.instance_type,
        capacity_type=BUY.offer.capacity_type,
        from_at=T0,
        to_at=to_at,
        total_micro_usd=1,
        idle_micro_usd=1,
        shares=(),
        price_micro_usd_per_hour=1,
        price_source="test",
        price_at=T0,
        is_final=is_final,
    )
    return TimedFact(span, to_at)


def test_what_has_ended_is_published_again_until_it_is_charged() -> None:
    """A cost tracker that was away, and that starts from what the streams still have, charges it to its end."""
    half = charged(T0 + timedelta(minutes=10), is_final=False)
    for story in (ENDED, (*ENDED, half)):
        state = given(story, is_synced=False)
        again = list(living(state))

        (order,) = (fact for fact in again if isinstance(fact, ScalingOrderResynced))
        (seen,) = (fact for fact in again if isinstance(fact, NodeInstanceObserved))
        rebuilt = fold(EMPTY_STATE, record([TimedFact(fact, ENDED_AT + HOUR) for fact in again]))

        assert (order.terminated, seen.terminated_at) == (TERMINATED, ENDED_AT)
        assert rebuilt.orders == state.orders
        assert rebuilt.instances == state.instances
    assert list(living(given((*ENDED, charged(ENDED_AT, is_final=True)), is_synced=False))) == []


def test_an_instance_that_no_list_had_is_published_again_until_it_is_charged() -> None:
    """Its order alone tells of its launch and its end."""
    story = tuple(told for told in ENDED if not isinstance(told.fact, NodeInstanceObserved))
    (order,) = living(given(story, is_synced=False))
    assert isinstance(order, ScalingOrderResynced)
    assert (order.launched is not None, order.terminated) == (True, TERMINATED)
    refused = bought(purchase("buy-b"), is_refused=True)
    assert list(living(given(refused, is_synced=False))) == []


async def test_ends_of_lost_streams_are_published_before_the_first_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost tracker was away when the instance ended, and when all streams were lost: only the last snapshot of the
    scaler has the end. Repeated until the state has it, some in each tick; not once it is charged or too old.
    """
    lost, now, tables = given(ENDED, is_synced=False), ENDED_AT + HOUR, Tables()
    decided = planned(BUY, plan_id="plan-buy-a")[0].fact
    assert isinstance(decided, ScalingPlanMade)
    await MemoryStore(tables).record_plan(decided, made_at=T0)

    async def published(state: ClusterState, at: datetime = now) -> list[type[Fact]]:
        outcome = await DecisionRecovery(MemoryStore(tables), policy(), lost).before_first_plan(state, at)
        assert outcome is not None
        facts.extend(outcome.facts)
        return [type(fact) for fact in outcome.facts]

    facts: list[Fact] = []
    new = given(as_of=now)
    assert await published(new) == [NodeInstanceObserved, ScalingOrderResynced]
    known = fold(new, record([TimedFact(fact, now) for fact in facts]))
    assert (known.orders, known.instances) == (lost.orders, lost.instances)
    assert await published(known) == [ScalingDecisionsRestored]

    monkeypatch.setattr(recovery, "ENDS_COUNT_MAX", 1)
    assert await published(new) == [NodeInstanceObserved]
    seen = fold(new, record([TimedFact(facts[0], now)]))
    assert await published(seen) == [ScalingOrderResynced]

    charge = record([charged(ENDED_AT, is_final=True)])
    assert await published(fold(new, charge)) == [ScalingDecisionsRestored]
    late = now + timedelta(days=1)
    assert await published(given(as_of=late), late) == [ScalingDecisionsRestored]
