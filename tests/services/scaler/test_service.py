"""When the scaler publishes: fenced by the last plan, and only what is new."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    job,
    offer,
    on_sale,
    planned,
    policy,
    purchase,
    record,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.prewarm_settings import ForecastPolicy
from gpu_autoscaler.core.provisioning.batching import PLAN_INTERVAL_MAX
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.events.node import InstanceChanges, NodeInstanceListed, NodeInstanceObserved, NodeWatched
from gpu_autoscaler.events.policy import PolicyChanged
from gpu_autoscaler.events.scaling import ScalingDecisionsRestored, ScalingNodeLaunched, ScalingPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.decisions import AnnounceReservationEnd, CancelIdleJob
from gpu_autoscaler.model.ids import ActionId, JobId, PlanId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.upkeep import JobIdle
from gpu_autoscaler.providers.protocol import Instance
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.publisher import as_outcome
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables
from gpu_autoscaler_services.scaler.inventory import InstancesListed
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery
from gpu_autoscaler_services.scaler.service import Digests, Scaler
from gpu_autoscaler_services.scaler.upkeep import UpkeepSteps

SECOND = timedelta(seconds=1)


async def no_instances() -> AsyncIterator[InstancesListed]:
    """A cloud without instances."""
    yield InstancesListed(instances=(), listed_at=T0)


class _NoExecution:
    """An executor that does nothing."""


def scaler(view: StateView, with_policy: ScalingPolicy | None = None, tables: Tables | None = None) -> Scaler:
    """Return a scaler that only plans."""
    return Scaler(
        view,
        with_policy or policy(),
        executor=_NoExecution(),  # type: ignore[arg-type]  # nothing is carried out here
        recovery=DecisionRecovery(MemoryStore(Tables() if tables is None else tables), with_policy or policy()),
        instances=no_instances(),
        digests=Digests(policy="p", core="c"),
        metrics=Metrics("scaler", CollectorRegistry()),
    )


def view_of(*stories: Story) -> StateView:
    """Return the view of these stories at T0."""
    view = StateView()
    view.advance(given(*stories), {"JOB": 1})
    return view


async def test_plan_is_fenced_by_its_parent() -> None:
    """One fact with cut and digests, from which its id follows."""
    view = view_of(on_sale(offer()), job("train"), planned(plan_id="before"))
    outcome = await scaler(view).on_tick(T0)
    assert isinstance(outcome, Outcome)
    (made,) = outcome.facts
    assert isinstance(made, ScalingPlanMade)
    assert made.plan.decisions
    assert outcome.expected_last_sequence == made.plan.parent_sequence == view.state.last_plan_sequence == 1
    assert (made.cut, made.policy_digest, made.core_digest) == (view.cut, "p", "c")
    assert await scaler(view).on_tick(T0) == outcome


async def test_empty_plan_is_not_published() -> None:
    """An empty cluster without work makes no plans."""
    assert as_outcome(await scaler(view_of(on_sale(offer()))).on_tick(T0)).facts == ()


async def test_unchanged_deferrals_are_published_once() -> None:
    """Repeated only if the stream did not store the plan."""
    view = view_of(on_sale(offer()), job("train", gpus=99))
    service = scaler(view)
    first = await service.on_tick(T0)
    assert isinstance(first, Outcome)
    assert (
        as_outcome(await service.on_tick(T0 + SECOND)).facts != ()
    )  # the plan was not stored: nothing has been folded
    view.advance(given(on_sale(offer()), job("train", gpus=99), planned(plan_id="taken")), {"SCALING": 1})
    assert as_outcome(await service.on_tick(T0 + 2 * SECOND)).facts == ()


async def test_a_tick_is_left_out_until_a_fact_arrives_or_time_changes_the_plan() -> None:
    """The plan notes the instant; a new policy file needs a tick as well."""
    stories = (on_sale(offer()), job("train", gpus=99), planned(plan_id="taken"))
    view = view_of(on_sale(offer()), job("train", gpus=99))
    service = scaler(view)
    assert service.needs_tick(T0)
    assert as_outcome(await service.on_tick(T0)).facts != ()
    assert service.needs_tick(T0 + SECOND)  # whether it is stored is not known yet
    view.advance(given(*stories), {"SCALING": 1})
    outcome = as_outcome(await service.on_tick(T0 + SECOND))
    assert (outcome.facts, outcome.next_tick_seconds) == ((), None)
    assert outcome.next_change_at is not None
    assert not service.needs_tick(outcome.next_change_at - SECOND / 1000)
    assert service.needs_tick(outcome.next_change_at)
    service.use_policy(policy(nodes_count_max=7), "policy.toml")
    assert service.needs_tick(T0 + 2 * SECOND)
    service.use_policy(policy(), "policy.toml")
    await service.on_tick(T0 + 2 * SECOND)
    view.advance(given(*stories, job("more")), {"JOB": 2})
    assert service.needs_tick(T0 + 3 * SECOND)


async def test_a_published_plan_says_when_time_changes_the_next_one() -> None:
    """A plan a day at the latest; unknown while the demand sample of the minute is due with the next tick."""
    stories = (on_sale(offer()), job("train", gpus=99))
    made = as_outcome(await scaler(view_of(*stories)).on_tick(T0))
    assert made.facts
    assert made.next_change_at is not None
    assert T0 < made.next_change_at <= T0 + PLAN_INTERVAL_MAX
    sampling = policy(forecast=ForecastPolicy(is_on=True))
    assert as_outcome(await scaler(view_of(*stories), sampling).on_tick(T0)).next_change_at is None


async def test_plan_is_made_once_a_day_without_news() -> None:
    """Its stream keeps the parent of the next plan, however quiet the cluster is."""
    view = StateView()
    view.advance(given(planned(plan_id="before")), {"SCALING": 1})
    service = scaler(view)
    assert as_outcome(await service.on_tick(T0 + MINUTE)).facts == ()
    view.advance(given(planned(plan_id="before", at=T0 + MINUTE), as_of=T0 + 24 * HOUR), {"SCALING": 1})
    assert as_outcome(await service.on_tick(T0 + 24 * HOUR)).facts == ()
    view.advance(given(planned(plan_id="before"), as_of=T0 + 24 * HOUR), {"SCALING": 1})
    outcome = await service.on_tick(T0 + 24 * HOUR)
    assert isinstance(outcome, Outcome)
    (made,) = outcome.facts
    assert isinstance(made, ScalingPlanMade)
    assert (made.plan.decisions, made.plan.deferred, made.plan.parent_sequence) == ((), (), 1)


async def test_plan_names_the_facts_that_it_takes_into_account() -> None:
    """So that a discarded parent differs from an unknown plan."""
    view = view_of(on_sale(offer()), job("train"), planned(plan_id="before"))
    view.advance(view.state, {"SCALING": 41})
    outcome = await scaler(view).on_tick(T0)
    assert isinstance(outcome, Outcome)
    assert outcome.folded_sequence == 41


def instance(state: str) -> Instance:
    """Return an instance of ours."""
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


async def test_instance_is_published_on_state_change() -> None:
    """Its state is its version; each list is published as a difference, as proof of absence."""
    view = StateView()
    service = scaler(view)
    first = await service.on_item(InstancesListed(instances=(instance("running"),), listed_at=T0))
    assert [type(fact) for fact in first] == [NodeInstanceObserved, NodeInstanceListed]  # type: ignore[union-attr]
    view.advance(given(tuple(TimedFact(fact, T0) for fact in first), is_synced=False), {})  # type: ignore[union-attr]
    again = await service.on_item(InstancesListed(instances=(instance("running"),), listed_at=T0 + SECOND))
    assert again == [NodeWatched(epoch=0, version=0, watched_at=T0 + SECOND, instances=InstanceChanges(since=T0))]
    ended = await service.on_item(InstancesListed(instances=(instance("terminated"),), listed_at=T0 + SECOND))
    assert [type(fact) for fact in ended] == [NodeInstanceObserved, NodeWatched]  # type: ignore[union-attr]


async def test_the_launch_of_a_late_instance_is_published_once() -> None:
    """The executor stops asking the cloud at the deadline of the order; before that the launch is its answer."""
    decision = purchase("a")
    view = view_of(bought(decision, is_launched=False))
    service = scaler(view)

    async def published(listed_at: datetime) -> list[Fact]:
        facts = await service.on_item(InstancesListed(instances=(instance("running"),), listed_at=listed_at))
        assert isinstance(facts, list)
        return facts

    assert not any(isinstance(fact, ScalingNodeLaunched) for fact in await published(decision.deadline_at - SECOND))
    facts = await published(decision.deadline_at)
    (launched,) = (fact for fact in facts if isinstance(fact, ScalingNodeLaunched))
    assert (launched.action_id, launched.plan_id, launched.provider_id) == ("a", "plan-a", "sim:///a/i-1")

    view.advance(fold(view.state, record([TimedFact(launched, decision.deadline_at)])), {"SCALING": 3})
    assert not any(isinstance(fact, ScalingNodeLaunched) for fact in await published(decision.deadline_at + SECOND))


async def test_new_stream_defers_planning_until_resources_are_listed() -> None:
    """The store has plans: what they bought shows in the cloud once it is listed."""
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
    assert [past.decision for past in restored.past] == [purchase("buy")]
    assert first.expected_last_sequence == 0
    view.advance(given(on_sale(offer()), job("train"), (TimedFact(restored, T0),)), {"JOB": 1})
    after = await scaler(view, tables=tables).on_tick(T0)
    assert isinstance(after, Outcome)
    (made,) = after.facts
    assert isinstance(made, ScalingPlanMade)
    assert made.plan.decisions == ()


async def test_open_decisions_are_read_from_recent_plans() -> None:
    """Counted back from the last plan, however long no scaler ran."""
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
    assert [past.decision.action_id for past in restored.past] == ["buy-1", "buy-2"]


async def test_a_limited_number_of_plans_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones: at two plans a second they are those of most of an hour."""
    monkeypatch.setattr("gpu_autoscaler_services.scaler.recovery.PLANS_COUNT_MAX", 2)
    monkeypatch.setattr("gpu_autoscaler_services.scaler.recovery._PAGE_COUNT", 1)
    store = MemoryStore(Tables())
    for number in range(4):
        decided = planned(purchase(f"buy-{number}"), plan_id=f"plan-{number}")[0].fact
        assert isinstance(decided, ScalingPlanMade)
        await store.record_plan(decided, made_at=T0)
    outcome = await DecisionRecovery(store, policy()).before_first_plan(given(as_of=T0), T0)
    assert outcome is not None
    (restored,) = outcome.facts
    assert isinstance(restored, ScalingDecisionsRestored)
    assert [past.decision.action_id for past in restored.past] == ["buy-2", "buy-3"]


async def test_policy_change_is_published_before_its_first_plan() -> None:
    """Repeated until the stream has it, with each difference; then plans carry the new digest."""
    view = view_of(on_sale(offer()), job("train"))
    service, other = scaler(view), policy(nodes_count_max=0)
    service.use_policy(other, "policy.toml")
    first = await service.on_tick(T0)
    assert isinstance(first, tuple)
    (change,) = first
    assert isinstance(change, PolicyChanged)
    assert (change.before_digest, change.differences, change.changed_at) == ("p", ("nodes_count_max: 100 -> 0",), T0)
    assert await service.on_tick(T0) == first

    view.advance(given(on_sale(offer()), job("train"), (TimedFact(change, T0),)), {"POLICY": 1})
    outcome = await service.on_tick(T0)
    assert isinstance(outcome, Outcome)
    (made,) = outcome.facts
    assert isinstance(made, ScalingPlanMade)
    assert made.policy_digest == change.policy_digest == policy_digest(other)
    assert not made.plan.decisions


async def test_reservation_end_is_decided_and_published_once_and_ahead() -> None:
    """As a notice with the end as its deadline, when the node must start to drain."""
    until = T0 + HOUR
    paid = msgspec.structs.replace(offer(), paid_from=T0 - HOUR, paid_until=until)
    story = bought(purchase("buy-1", paid))

    def decided(at: datetime, *more: Story) -> list[AnnounceReservationEnd]:
        state = given(story, *more, as_of=at)
        made = plan(state, policy(), at)
        assert [violation for violation in check(made, state, policy()) if violation.action_ids] == []
        return [act for act in made.upkeep_decisions if isinstance(act, AnnounceReservationEnd)]

    at = until - 10 * MINUTE
    assert decided(at - SECOND) == []
    (act,) = decided(at)
    (notice,) = await UpkeepSteps(None, None, None, None, None, None, lambda: at).take(act, PlanId("p"))  # type: ignore[arg-type]
    assert isinstance(notice, SpotNoticeReceived)
    assert (notice.kind, notice.reclaim_at, notice.channel) == ("paid_period_over", until, "calendar")
    assert decided(at + MINUTE, (TimedFact(notice, at),)) == []


async def test_an_idle_job_is_canceled_by_a_fact_of_its_decision() -> None:
    """A plan that is delivered again publishes an equal fact, and none after the time of the next attempt."""
    act = CancelIdleJob(
        action_id=ActionId("act"), job_id=JobId("train"), retry_at=T0 + MINUTE,
        reason=JobIdle(idle_seconds=3_600.0, idle_seconds_max=1_800.0, busy_ratio_max=0.05),
    )  # fmt: skip
    (canceled,) = await UpkeepSteps(None, None, None, None, None, None, lambda: T0).take(act, PlanId("p"))  # type: ignore[arg-type]
    assert isinstance(canceled, JobCancelRequested)
    assert (canceled.job_id, canceled.requested_by) == ("train", "gpu-autoscaler")
    assert canceled.note == "its GPU utilization was at most 5 % for 1 h"
    assert canceled.condition() == "job_cancel_requested/train/act"
    late = UpkeepSteps(None, None, None, None, None, None, lambda: T0 + MINUTE)  # type: ignore[arg-type]
    assert await late.take(act, PlanId("p")) == ()
