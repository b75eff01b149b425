"""Turns facts and state into metrics. `runtime/metric_families.py` says which service exports which."""

import math
from collections.abc import Callable, Sequence
from datetime import datetime

from gpu_autoscaler.core.deferred_groups import reason_counts
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.spread_cost import spread_micro_usd_per_hour
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.provisioning.price_age import oldest_seconds
from gpu_autoscaler.core.state.forced_removals import tripped_brake
from gpu_autoscaler.core.state.freshness import lists_seen_at
from gpu_autoscaler.core.state.rejections import set_aside_now
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobEstimateScored, JobPlaced, JobStarted
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.scaling import (
    ScalingLaunchRefused,
    ScalingNodeLaunched,
    ScalingNodeTerminated,
    ScalingPlanMade,
)
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.money import HOURS_PER_MONTH, MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer_limits import Cooldown
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.runtime.metric_families import LAUNCHED
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView

UNDERUTILIZED_RATIO = 0.2  # docs/decisions.md#utilization-triggers
# Steps of `plan` that remove nodes; every other step with a cool-down buys.
_REMOVING_STEPS = frozenset({"release_idle", "consolidate"})


class Observer:
    """Updates the metrics of one process."""

    def __init__(self, metrics: Metrics, view: StateView, is_leading: Callable[[], bool] = lambda: True) -> None:
        """`is_leading`: whether this process is the active one of its service; always, where it has no lease."""
        self._metrics = metrics
        self._view = view
        self._ticked_at: datetime | None = None
        metrics.is_leading = is_leading
        metrics.has_ticked = lambda: self._ticked_at is not None
        metrics.before_scrape = self._update_fleet

    def published(self, fact: Fact) -> None:
        """Count a fact that this service published."""
        match fact:
            case ScalingPlanMade():
                self._count_plan(fact)
            case ScalingNodeLaunched():
                order = self._view.state.orders.get(fact.action_id)
                self._count_action("up", None if order is None else order.planned_at, fact.launched_at)
                self._metrics.launches.labels(LAUNCHED, "").inc()
            case ScalingLaunchRefused():
                self._metrics.count_refused_launch(fact.code)
            case ScalingNodeTerminated():
                drain = self._view.state.drains.get(fact.action_id)
                self._count_action("down", None if drain is None else drain.planned_at, fact.terminated_at)
            case SpotNoticeReceived():
                self._metrics.spot_interruptions.inc()
            case JobPlaced(attempt=1):
                requested_at = self._requested_at(fact.job_id)
                if requested_at is not None:
                    self._metrics.queue_wait.observe(_seconds(requested_at, fact.placed_at))
            case JobEstimateScored(run=None):
                self._observe_estimate(fact)
            case JobEstimateScored(run=score) if score is not None:
                ratio = score.run_seconds / score.predicted_seconds
                self._metrics.duration_error.observe(max(ratio, 1 / ratio))
                self._metrics.durations.labels("within" if score.was_within else "outside").inc()
            case CostAccrued():
                self._metrics.cost.labels("idle").inc(fact.idle_micro_usd)
                self._metrics.cost.labels("allocated").inc(fact.total_micro_usd - fact.idle_micro_usd)
            case _:
                pass

    def folded(self, before: ClusterState, recorded: Sequence[Recorded]) -> None:
        """Count new (not historical) facts; `before` is the state before they were folded."""
        for item in recorded:
            fact = item.fact
            if isinstance(fact, JobStarted) and self._metrics.owns("time_to_gpu_seconds"):
                self._observe_start(before, fact)
            elif isinstance(fact, NodeObserved) and self._metrics.owns("node_ready_seconds"):
                self._observe_node_ready(before, fact, item.envelope.time)

    def ticked(self, as_of: datetime) -> None:
        """Record the time of the last tick: a scrape shows the fleet as of then."""
        self._ticked_at = as_of

    def term_ended(self) -> None:
        """Forget the fleet: another process is the active one now, and exports it."""
        self._ticked_at = None
        self._metrics.forget_term()

    def _update_fleet(self) -> None:
        """Compute the fleet's gauges at a scrape, not at each of the many ticks of a burst."""
        metrics = self._metrics
        if self._ticked_at is None or not (metrics.owns("nodes") and metrics.is_leading()):
            return
        state = self._view.state
        views = node_views(state, self._ticked_at)
        self._set_fleet(state, views)
        self._set_cost(state, views)
        metrics.update_spend()
        for source, seen_at in lists_seen_at(state).items():
            age = math.inf if seen_at is None else _seconds(seen_at, self._ticked_at)
            metrics.list_age.labels(source).set(age)
        age_seconds = oldest_seconds(state.offers, self._ticked_at)
        metrics.price_age.set(math.nan if age_seconds is None else age_seconds)

    def _observe_estimate(self, fact: JobEstimateScored) -> None:
        metrics = self._metrics
        outcome = "unknown" if fact.was_within is None else "within" if fact.was_within else "outside"
        metrics.estimates.labels(outcome).inc()
        if fact.start_error_seconds is not None:
            metrics.start_error.observe(abs(fact.start_error_seconds))
        if fact.cost_error_micro_usd is not None:
            metrics.cost_error.observe(abs(fact.cost_error_micro_usd) / MICRO_USD_PER_USD)

    def _count_plan(self, fact: ScalingPlanMade) -> None:
        metrics, plan = self._metrics, fact.plan
        for decision in (*plan.decisions, *plan.upkeep_decisions):
            metrics.decisions.labels(decision.reason.tag()).inc()
        cooldowns = {"up": 0.0, "down": 0.0}
        entries = [(deferred.step, deferred.reason) for deferred in plan.deferred]
        for step, reason in (*entries, *((group.step, group.reason) for group in plan.deferred_groups)):
            if isinstance(reason, Cooldown):
                direction = "down" if step in _REMOVING_STEPS else "up"
                cooldowns[direction] = max(cooldowns[direction], reason.remaining_seconds)
        metrics.set_deferred(reason_counts(plan))
        metrics.scale_up_cooldown.set(cooldowns["up"])
        metrics.scale_down_cooldown.set(cooldowns["down"])

    def _count_action(self, direction: str, planned_at: datetime | None, done_at: datetime) -> None:
        self._metrics.scaling_actions.labels(direction).inc()
        if planned_at is not None:
            self._metrics.scaling_duration.labels(direction).observe(_seconds(planned_at, done_at))

    def _requested_at(self, job_id: JobId) -> datetime | None:
        record = self._view.state.jobs.get(job_id)
        if record is None:
            return None
        return record.queued.spec.requested_at if record.queued is not None else record.requested_at

    def _observe_start(self, before: ClusterState, fact: JobStarted) -> None:
        record = before.jobs.get(fact.job_id)
        requested_at = self._requested_at(fact.job_id)
        if requested_at is not None and (record is None or record.started is None):
            self._metrics.time_to_gpu.observe(_seconds(requested_at, fact.started_at))

    def _observe_node_ready(self, before: ClusterState, fact: NodeObserved, at: datetime) -> None:
        order = None if fact.action_id is None else before.orders.get(fact.action_id)
        if order is None or order.decision is None or order.planned_at is None:
            return
        promised = order.decision.promised
        known = before.nodes.get(fact.node_uid)
        if _is_usable(fact, promised) and (known is None or not _is_usable(known, promised)):
            self._metrics.node_ready.observe(_seconds(order.planned_at, at))

    def _set_fleet(self, state: ClusterState, views: Sequence[NodeView]) -> None:
        metrics = self._metrics
        present = [view for view in views if view.node is not None and view.phase is not NodePhase.GONE]
        for capacity_type in CapacityType:
            metrics.nodes.labels(capacity_type.value).set(sum(view.capacity_type == capacity_type for view in present))
        metrics.node_count.set(len(present))
        metrics.desired_nodes.set(sum(view.is_counted for view in views))
        metrics.pending_pods.set(
            sum(_is_unschedulable(pod.phase, pod.unschedulable_since) for pod in state.pods.values())
        )
        if self._ticked_at is not None:
            metrics.set_aside.set(len(set_aside_now(state, self._ticked_at)))
        metrics.brake_tripped.set(tripped_brake(state) is not None)
        metrics.spot_warnings.set(sum(notice.is_active for notice in state.notices.values()))
        means = [
            [gpu.utilization_ratio_mean for gpu in view.telemetry.gpus if gpu.utilization_ratio_mean is not None]
            for view in present
            if view.telemetry is not None
        ]
        by_node = [sum(ratios) / len(ratios) for ratios in means if ratios]
        metrics.cluster_utilization.set(sum(by_node) / len(by_node) if by_node else math.nan)
        metrics.underutilized_nodes.set(sum(ratio < UNDERUTILIZED_RATIO for ratio in by_node) if by_node else math.nan)

    def _set_cost(self, state: ClusterState, views: Sequence[NodeView]) -> None:
        metrics = self._metrics
        monthly = dict.fromkeys(CapacityType, 0.0)
        for view in views:
            if view.is_counted and view.capacity_type is not None:
                price = view.price_micro_usd_per_hour  # an unknown price makes the sum unknown
                monthly[view.capacity_type] += math.nan if price is None else _usd_per_month(price)
        for capacity_type, usd in monthly.items():
            metrics.monthly_cost.labels(capacity_type.value).set(usd)
        on_demand = {
            (offer.instance_type, offer.zone): offer.price_micro_usd_per_hour
            for offer in (() if state.offers is None else state.offers.offers)
            if offer.capacity_type is CapacityType.ON_DEMAND
        }
        full = saved = 0.0
        for view in views:
            price, base = view.price_micro_usd_per_hour, on_demand.get((view.instance_type or "", view.zone or ""))
            if view.is_counted and price is not None and base is not None:
                full += _usd_per_month(base)
                saved += _usd_per_month(base - price)
        metrics.monthly_savings.set(saved if full > 0 else math.nan)
        metrics.spread_cost.set(_usd_per_month(spread_micro_usd_per_hour(views)))
        metrics.spot_savings.set(100.0 * saved / full if full > 0 else math.nan)


def _seconds(start: datetime, end: datetime) -> float:
    return max(0.0, (end - start).total_seconds())


def _usd_per_month(micro_usd_per_hour: int) -> float:
    return micro_usd_per_hour / MICRO_USD_PER_USD * HOURS_PER_MONTH


def _is_usable(node: NodeObserved, promised: Resources) -> bool:
    return node.is_ready and promised.gpus_fit_in(node.allocatable)


def _is_unschedulable(phase: str, unschedulable_since: datetime | None) -> bool:
    return phase == "pending" and unschedulable_since is not None
