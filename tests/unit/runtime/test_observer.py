"""Metrics follow from facts and state, and one service exports each of them."""

import math
from datetime import datetime

import pytest
from tests.support.braked_fleet import BROKE, BrakedFleet
from tests.support.purchases import spread
from tests.support.stories import given, job, node, notice, offer, on_sale, pod, provider_id, synced
from tests.support.timed_facts import HOUR, MINUTE, SECOND, T0, Story, TimedFact, record

from gpu_autoscaler.core.deferred_groups import grouped
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.gpu import GpuNodeSummarized, GpuSummary
from gpu_autoscaler.events.job import JobPlaced, JobStarted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn
from gpu_autoscaler.model.decisions import Cut, Deferred, Plan
from gpu_autoscaler.model.ids import JobId, NodeUid, PlanId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer_limits import Cooldown, Frozen
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.observer import Observer
from gpu_autoscaler.runtime.projection import StateView


def observer(service: str, *stories: Story, as_of: datetime = T0) -> tuple[Observer, Metrics]:
    """Return an observer of a service that knows these stories."""
    metrics = Metrics(service)
    return Observer(metrics, StateView(given(*stories, as_of=as_of))), metrics


def figure(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the value that /metrics shows; None: no such line."""
    return metrics.page().get_sample_value(f"gpu_autoscaler_{name}", labels)


def placed(attempt: int = 1) -> JobPlaced:
    """The job has a place two minutes after it was asked for."""
    return JobPlaced(job_id=JobId("a"), attempt=attempt, node_uids=(), node_names=(), placed_at=T0 + 2 * MINUTE)


def test_the_wait_in_the_queue_ends_with_the_first_placement() -> None:
    """From request to placement; a second attempt is no second wait."""
    watch, metrics = observer("scheduler", job("a"))
    watch.published(placed())
    watch.published(placed(attempt=2))
    assert figure(metrics, "queue_wait_seconds_count") == 1
    assert figure(metrics, "queue_wait_seconds_sum") == 120


def test_the_time_to_gpu_ends_when_all_members_run() -> None:
    """From request to running, reported by the scheduler alone, and once for each job."""
    started = JobStarted(epoch=1, version=1, job_id=JobId("a"), kube_job="x/a", started_at=T0 + 3 * MINUTE)
    news = record([TimedFact(started, T0 + 3 * MINUTE)])
    for service, expected in (("scheduler", 1), ("gateway", None)):
        watch, metrics = observer(service, job("a"))
        watch.folded(given(job("a")), news)
        watch.folded(given(job("a"), (TimedFact(started, T0),)), news)
        assert figure(metrics, "time_to_gpu_seconds_count") == expected


def test_a_node_is_ready_when_its_gpus_can_be_used() -> None:
    """From decision to allocatable GPUs: a Ready node without its GPUs is not there yet."""
    before = given(node("n", gpus_allocatable=0))
    watch, metrics = observer("scaler", node("n", gpus_allocatable=0))
    told = node("n", version=2)[-1]
    watch.folded(before, record([TimedFact(told.fact, T0 + 90 * SECOND)]))
    assert figure(metrics, "node_ready_seconds_count") == 1
    assert figure(metrics, "node_ready_seconds_sum") == pytest.approx(90, abs=1)


def test_deferred_reasons_of_a_plan_are_labels() -> None:
    """The reasons of the last plan, counted; those of the plan before are gone."""
    watch, metrics = observer("scaler")
    watch.ticked(T0)
    held = (
        Deferred(step="release_idle", subject="node/n", reason=Cooldown(remaining_seconds=30.0)),
        Deferred(step="cover_demand", subject="job/a", reason=Cooldown(remaining_seconds=7.0)),
    )
    for deferred in ((Deferred(step="cover_demand", subject="cluster", reason=Frozen()),), held):
        plan = grouped(Plan(as_of=T0, parent_sequence=0, deferred=deferred), EMPTY_STATE)
        watch.published(ScalingPlanMade(plan_id=PlanId("p"), plan=plan, cut=Cut(), policy_digest="p", core_digest="c"))
    assert figure(metrics, "deferred", reason="cooldown") == 2
    assert figure(metrics, "deferred", reason="frozen") == 0
    assert figure(metrics, "scale_down_cooldown_remaining_seconds") == 30
    assert figure(metrics, "scale_up_cooldown_remaining_seconds") == 7


def test_only_the_scaler_reports_the_fleet() -> None:
    """Two services that know the nodes do not count them twice."""
    stories = (node("n1"), node("n2"), pod("waits", gpus=1))
    for service, nodes, waiting in (("scaler", 2, 1), ("gateway", None, None)):
        watch, metrics = observer(service, *stories)
        watch.ticked(T0 + SECOND)
        assert figure(metrics, "node_count") == nodes
        assert figure(metrics, "pending_pods") == waiting
        by_type = [figure(metrics, "nodes", capacity_type=name) for name in ("spot", "on-demand", "reserved")]
        assert sum(count or 0 for count in by_type) == (nodes or 0)


def test_the_fleet_is_counted_where_somebody_looks() -> None:
    """Ticks count nothing; the page shows what is known when it is asked for, also what came after the last tick."""
    metrics, view = Metrics("scaler"), StateView(given(node("n1")))
    watch = Observer(metrics, view)
    watch.ticked(T0 + SECOND)
    assert metrics.registry.get_sample_value("gpu_autoscaler_node_count") == 0
    view.advance(given(node("n1"), node("n2")), {})
    assert figure(metrics, "node_count") == 2


def test_a_fleet_is_estimated_for_a_month() -> None:
    """What runs is estimated for a month of 730 hours, by how it was bought."""
    watch, metrics = observer("scaler", node("n1"))
    watch.ticked(T0 + SECOND)
    told = [figure(metrics, "estimated_monthly_cost_usd", capacity_type=name) or 0.0 for name in ("spot", "on-demand")]
    price = node("n1")[0].fact.plan.decisions[0].offer.price_micro_usd_per_hour  # type: ignore[attr-defined]
    assert sum(told) == pytest.approx(price / 1e6 * 730)


def test_the_cost_of_spreading_spot_is_that_of_present_nodes_for_a_month() -> None:
    """Of three nodes one was bought because the share of a capacity pool excluded a cheaper offer."""
    nodes = (node("n1"), node("n2", offer(usd_per_hour=2.5), reason=spread(2.5, 2.0)), node("n3", is_ours=False))
    watch, metrics = observer("scaler", *nodes)
    watch.ticked(T0 + SECOND)
    assert figure(metrics, "estimated_monthly_spread_cost_usd") == pytest.approx(0.5 * 730)


def test_a_node_without_a_price_is_not_free() -> None:
    """The monthly cost of its kind is unknown; the other kinds are exported."""
    watch, metrics = observer("scaler", node("n1", offer(usd_per_hour=None)))
    watch.ticked(T0 + SECOND)
    told = [figure(metrics, "estimated_monthly_cost_usd", capacity_type=name) for name in ("spot", "on-demand")]
    assert [math.isnan(usd or 0.0) for usd in told] == [True, False]


def test_what_is_not_known_any_more_is_not_shown_as_it_was() -> None:
    """A fleet that fell silent, or is gone, has no utilization and saves nothing; a notice said again stands again."""
    summary = GpuNodeSummarized(
        epoch=1, version=1, node_uid=NodeUid("uid-n"), node_name="n", window_started_at=T0, window_seconds=60.0,
        scrapes_expected_count=6, scrapes_answered_count=6,
        gpus=(GpuSummary(gpu="0", gpu_uuid="g", samples_count=6, utilization_ratio_mean=0.5),),
    )  # fmt: skip
    withdrawn = SpotNoticeWithdrawn(
        provider_id=provider_id("buy-n"), kind="terminate", provider_event="1", withdrawn_at=T0 + MINUTE
    )
    again = (*notice("n"), TimedFact(withdrawn, T0 + MINUTE), *notice("n", at=T0 + 2 * MINUTE))
    state = given(node("n"), (TimedFact(summary, T0),), again, on_sale(offer(capacity_type=CapacityType.ON_DEMAND)))
    metrics = Metrics("scaler")
    view = StateView(state)
    watch = Observer(metrics, view)
    watch.ticked(T0 + 2 * MINUTE)
    assert figure(metrics, "cluster_utilization") == 0.5
    assert figure(metrics, "spot_termination_warnings") == 1
    view.advance(EMPTY_STATE, {})
    watch.ticked(T0 + 3 * MINUTE)
    unknown = ("cluster_utilization", "underutilized_nodes", "estimated_monthly_savings_usd", "spot_savings_percentage")
    assert [math.isnan(figure(metrics, name) or 0.0) for name in unknown] == [True] * 4


def test_each_notice_is_counted_where_it_is_read() -> None:
    """The spot watcher publishes it once, and counts it once."""
    watch, metrics = observer("spot_watcher")
    watch.published(
        SpotNoticeReceived(
            provider_id=ProviderId("i"), kind="terminate", provider_event="e", reclaim_at=T0 + HOUR, received_at=T0
        )
    )
    assert figure(metrics, "spot_interruptions_total") == 1


def test_a_tripped_brake_is_shown_until_somebody_resumes() -> None:
    """By the scaler, as of its last tick."""
    world = BrakedFleet(BROKE)
    for number in range(5):
        world.add(f"n{number}")
    metrics = Metrics("scaler")
    view = StateView(world.state)
    watch = Observer(metrics, view)
    values = []
    for step in (world.look, world.plan, world.resume):
        step()
        view.advance(world.state, {})
        watch.ticked(world.now)
        values.append(figure(metrics, "brake_tripped"))
    assert values == [0, 1, 0]


def test_the_age_of_a_list_grows_until_it_comes_again() -> None:
    """Of each source by itself; what was never listed has an infinite age."""
    *of_kubernetes, _of_the_cloud = synced((), as_of=T0)
    metrics = Metrics("scaler")
    watch = Observer(metrics, StateView(fold(EMPTY_STATE, record(of_kubernetes))))
    watch.ticked(T0 + 90 * SECOND)
    assert figure(metrics, "list_age_seconds", source="nodes") == 90
    assert figure(metrics, "list_age_seconds", source="pods") == 90
    assert figure(metrics, "list_age_seconds", source="instances") == math.inf
