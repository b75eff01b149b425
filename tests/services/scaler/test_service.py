"""When the scaler speaks: behind the last plan's fence, and only when there is something to say."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import msgspec
from prometheus_client import CollectorRegistry
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    Told,
    bought,
    given,
    job,
    offer,
    on_sale,
    planned,
    policy,
    purchase,
)

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.node import NodeInstanceListed, NodeInstanceObserved
from gpu_autoscaler.events.policy import PolicyChanged
from gpu_autoscaler.events.scaling import ScalingDecisionsRestored, ScalingPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.protocol import Instance
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables
from gpu_autoscaler_services.scaler.inventory import InstancesListed
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery
from gpu_autoscaler_services.scaler.service import Digests, Scaler

SECOND = timedelta(seconds=1)


async def no_instances() -> AsyncIterator[InstancesListed]:
    """A cloud that has nothing."""
    yield InstancesListed(instances=(), listed_at=T0)


class _NoHands:
    """Writes nothing: these tests are about what is said."""

    @property
    def finalizers(self) -> "_NoHands":
        return self

    @property
    def checkpoint_notices(self) -> "_NoHands":
        return self

    @property
    def orphaned_nodes(self) -> "_NoHands":
        return self

    async def remove(self, *_: object) -> tuple[()]:
        """Leave every node's object where it is."""
        return ()

    async def write_due(self, *_: object, **__: object) -> None:
        """Leave every node as it is."""

    async def tell(self, *_: object) -> None:
        """Tell nobody."""


def scaler(view: StateView, with_policy: ScalingPolicy | None = None, tables: Tables | None = None) -> Scaler:
    """A scaler that only plans."""
    return Scaler(
        view,
        with_policy or policy(),
        executor=_NoHands(),  # type: ignore[arg-type]  # nothing is carried out here
        recovery=DecisionRecovery(MemoryStore(Tables() if tables is None else tables), with_policy or policy()),
        instances=no_instances(),
        digests=Digests(policy="p", core="c"),
        figures=Metrics("scaler", CollectorRegistry()),
    )


def view_of(*stories: Story) -> StateView:
    """What the stories add up to at T0."""
    view = StateView()
    view.advance(given(*stories), {"JOB": 1})
    return view


async def test_unmet_demand_is_planned_behind_the_last_plans_fence() -> None:
    """One fact, the parent's sequence as its fence, cut and digests with it; the id follows from them."""
    view = view_of(on_sale(offer()), job("train"), planned(plan_id="before"))
    outcome = await scaler(view).on_tick(T0)
    assert isinstance(outcome, Outcome)
    (made,) = outcome.facts
    assert isinstance(made, ScalingPlanMade)
    assert made.plan.decisions
    assert outcome.expected_last_sequence == made.plan.parent_sequence == view.state.last_plan_sequence == 1
    assert (made.cut, made.policy_digest, made.core_digest) == (view.cut, "p", "c")
    assert await scaler(view).on_tick(T0) == outcome


async def test_nothing_to_say_is_not_said() -> None:
    """An empty cluster without work makes no plans."""
    assert await scaler(view_of(on_sale(offer()))).on_tick(T0) == ()


async def test_what_is_held_back_is_said_once() -> None:
    """The same thing for the same kind of reason is said again only where the stream never took it."""
    view = view_of(on_sale(offer()), job("train", gpus=99))
    service = scaler(view)
    first = await service.on_tick(T0)
    assert isinstance(first, Outcome)
    assert await service.on_tick(T0 + SECOND) != ()  # the plan was not stored: nothing has been folded
    view.advance(given(on_sale(offer()), job("train", gpus=99), planned(plan_id="taken")), {"SCALING": 1})
    assert await service.on_tick(T0 + 2 * SECOND) == ()


def instance(state: str) -> Instance:
    """An instance of ours."""
    return Instance(
        provider_id=ProviderId("sim:///a/i-1"),
        action_id=ActionId("a"),
        state=state,  # type: ignore[arg-type]
        instance_type="p4d.24xlarge",
        zone="a",
        capacity_type=CapacityType.SPOT,
        price_micro_usd_per_hour=1,
        launched_at=T0,
    )


async def test_an_instance_is_told_of_when_it_moves_on() -> None:
    """Its state is its version; the list is told each time, as the proof of what is absent."""
    view = StateView()
    service = scaler(view)
    first = await service.on_item(InstancesListed(instances=(instance("running"),), listed_at=T0))
    assert [type(fact) for fact in first] == [NodeInstanceObserved, NodeInstanceListed]  # type: ignore[union-attr]
    view.advance(given(tuple(Told(fact, T0) for fact in first), is_synced=False), {})  # type: ignore[union-attr]
    again = await service.on_item(InstancesListed(instances=(instance("running"),), listed_at=T0 + SECOND))
    assert [type(fact) for fact in again] == [NodeInstanceListed]  # type: ignore[union-attr]
    ended = await service.on_item(InstancesListed(instances=(instance("terminated"),), listed_at=T0 + SECOND))
    assert [type(fact) for fact in ended] == [NodeInstanceObserved, NodeInstanceListed]  # type: ignore[union-attr]


async def test_no_plan_is_made_on_a_new_stream_before_the_world_is_listed() -> None:
    """The store says that there were plans: what they bought shows in the cloud, once somebody has looked."""
    tables = Tables()
    decided = planned(purchase("buy"), plan_id="lost")[0].fact
    assert isinstance(decided, ScalingPlanMade)
    await MemoryStore(tables).record_plan(decided, made_at=T0)
    view = StateView()
    view.advance(given(on_sale(offer()), job("train"), is_synced=False), {"JOB": 1})
    assert await scaler(view, tables=tables).on_tick(T0) == Outcome()
    view.advance(given(on_sale(offer()), job("train")), {"JOB": 1})
    first = await scaler(view, tables=tables).on_tick(T0)
    assert isinstance(first, Outcome)
    (restored,) = first.facts
    assert isinstance(restored, ScalingDecisionsRestored)
    assert [recovery.decision for recovery in restored.recovery] == [purchase("buy")]
    assert first.expected_last_sequence == 0
    view.advance(given(on_sale(offer()), job("train"), (Told(restored, T0),)), {"JOB": 1})
    after = await scaler(view, tables=tables).on_tick(T0)
    assert isinstance(after, Outcome)
    (made,) = after.facts
    assert isinstance(made, ScalingPlanMade)
    assert made.plan.decisions == ()


async def test_what_was_open_is_read_from_plans_of_a_bounded_time() -> None:
    """Counted back from the last plan; whoever was away for long goes on with what was open when he went."""
    tables = Tables()
    store = MemoryStore(tables)
    for number, at in enumerate((T0 - HOUR, T0 - MINUTE, T0)):
        decided = planned(purchase(f"buy-{number}", at=at), plan_id=f"plan-{number}", at=at)[0].fact
        assert isinstance(decided, ScalingPlanMade)
        await store.record_plan(decided, made_at=at)
    later = T0 + 5 * MINUTE
    outcome = await DecisionRecovery(store, policy()).before_first_plan(given(as_of=later), later)
    assert outcome is not None
    (restored,) = outcome.facts
    assert isinstance(restored, ScalingDecisionsRestored)
    assert [recovery.decision.action_id for recovery in restored.recovery] == ["buy-1", "buy-2"]


async def test_a_change_of_policy_is_said_before_the_first_plan_by_it() -> None:
    """Until the stream has it, with each value that differs; then plans carry the new digest."""
    view = view_of(on_sale(offer()), job("train"))
    service, other = scaler(view), policy(nodes_count_max=0)
    service.use_policy(other, "policy.toml")
    first = await service.on_tick(T0)
    assert isinstance(first, tuple)
    (said,) = first
    assert isinstance(said, PolicyChanged)
    assert (said.before_digest, said.differences, said.changed_at) == ("p", ("nodes_count_max: 100 -> 0",), T0)
    assert await service.on_tick(T0) == first

    view.advance(given(on_sale(offer()), job("train"), (Told(said, T0),)), {"POLICY": 1})
    outcome = await service.on_tick(T0)
    assert isinstance(outcome, Outcome)
    (made,) = outcome.facts
    assert isinstance(made, ScalingPlanMade)
    assert made.policy_digest == said.policy_digest == policy_digest(other)
    assert not made.plan.decisions


async def test_the_end_of_a_paid_period_is_said_once_and_in_time() -> None:
    """As a notice with the end as its deadline, when the node is to drain; not before, and not again."""
    until = T0 + HOUR
    paid = msgspec.structs.replace(offer(), paid_from=T0 - HOUR, paid_until=until)
    order = bought(purchase("buy-1", paid))
    view = view_of(order)

    async def said(at: datetime) -> list[SpotNoticeReceived]:
        seen = msgspec.structs.replace(instance("running"), action_id=ActionId("buy-1"))
        facts = await scaler(view).on_item(InstancesListed(instances=(seen,), listed_at=at))
        assert isinstance(facts, list)
        return [fact for fact in facts if isinstance(fact, SpotNoticeReceived)]

    assert await said(until - 11 * MINUTE) == []
    (notice,) = await said(until - 10 * MINUTE)
    assert (notice.kind, notice.reclaim_at) == ("paid_period_over", until)
    view.advance(given(order, (Told(notice, until - 10 * MINUTE),)), {"SPOT": 1})
    assert await said(until - 9 * MINUTE) == []
