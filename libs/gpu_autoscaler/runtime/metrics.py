"""The metrics of one process. `runtime/metric_families.py` declares the families and who exports them.

A process registers the families that its service owns. The others exist unregistered, so that shared code may set them
anywhere. Unknown is NaN, never zero; counters and reasons start at zero.
"""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpu_autoscaler.core.limits.spend import SpendUse
from gpu_autoscaler.core.provisioning.forecast_gauges import NO_FORECAST, ForecastGauges
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import BuyReason
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.drain import DrainReason, KeepReason, ReleaseReason
from gpu_autoscaler.model.reasons.upkeep import UpkeepReason
from gpu_autoscaler.runtime.metric_families import (
    BY_NAME,
    DEAD_LETTER_REASONS,
    FACT_OUTCOMES,
    LAUNCHED,
    OTHER,
    REFUSAL_CODES,
    REFUSED,
    SPEND_BUDGETS_COUNT_MAX,
    Exported,
    Family,
)
from gpu_autoscaler.runtime.snapshot_codec import REFUSAL_REASONS

_NAN = float("nan")
_CODES = frozenset(REFUSAL_CODES)


def reason_tags(*unions: Any) -> tuple[str, ...]:  # noqa: ANN401 - a union of reasons has no type of its own
    """Return the tags of all reasons in these unions."""
    return tuple(reason.tag() for union in unions for reason in get_args(union))


_DEFER_TAGS = reason_tags(DeferReason)


@cache
def package_version() -> str:
    """Return the installed version of this distribution. Cached: the lookup takes longer than most plans do."""
    try:
        return version("gpu-autoscaler")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


class _Conditional(Collector):
    """Families that are exported while a condition holds."""

    def __init__(self, is_exported: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self._is_exported = is_exported

    def collect(self) -> Iterable[Metric]:
        """Return the families, none while the condition does not hold."""
        return self.registry.collect() if self._is_exported() else ()


class Metrics:
    """The metrics of one process, in a registry of their own, so that two may coexist in one test.

    `role` is that of `sensing.role`: services with roles export some families in one of them only.
    """

    def __init__(self, service: str, registry: CollectorRegistry | None = None, *, role: str | None = None) -> None:
        self.service = service
        self._role = role
        self.registry = CollectorRegistry() if registry is None else registry
        self.before_scrape: Callable[[], None] | None = None  # updates the gauges that are computed on demand
        # Whether this process is the active one, and whether its active term has completed a tick: `Observer` sets them
        self.is_leading: Callable[[], bool] = lambda: False
        self.has_ticked: Callable[[], bool] = lambda: False
        self._spend: Callable[[], Sequence[SpendUse]] = tuple
        leading = _Conditional(lambda: self.is_leading() is True)  # the attribute of the time of the scrape
        ticked = _Conditional(lambda: self.is_leading() and self.has_ticked())
        self._registries: Mapping[Exported, CollectorRegistry] = {
            "always": self.registry, "leading": leading.registry, "ticked": ticked.registry
        }  # fmt: skip
        self._declare_process()
        self._declare_plans()
        self._declare_fleet()
        self._declare_jobs_and_cost()
        self.registry.register(leading)
        self.registry.register(ticked)

    def owns(self, name: str) -> bool:
        """Return whether this process exports the family of this name in the table."""
        return BY_NAME[name].is_exported_by(self.service, self._role)

    def _declare_process(self) -> None:
        self.build_info = self._gauge("build_info")
        self.build_info.labels(self.service, package_version(), platform.python_version()).set(1)
        self.is_ready = self._gauge("ready")
        self.is_leader = self._gauge("leader")
        self.is_bus_connected = self._gauge("bus_connected")
        self.is_bus_parser_stock = self._gauge("bus_stock_parser")
        self.facts_handled = self._counter("facts_handled")
        self.facts_published = self._counter("facts_published")
        self.facts_resynced = self._counter("facts_resynced")
        self.facts_dated_ahead = self._counter("facts_dated_ahead")
        self.facts_folded = self._counter("facts_folded")
        self.handle_seconds = self._histogram("handle_seconds")
        self.consumer_lag = self._gauge("consumer_lag")
        self.effects_waiting = self._gauge("effects_waiting")
        self.stream_fill = self._gauge("stream_fill_ratio")
        self.stream_oldest_age = self._gauge("stream_oldest_age_seconds")
        self.stream_age_limit = self._gauge("stream_age_limit_seconds")
        self.ticks = self._counter("ticks")
        self.loop_restarts = self._counter("loop_restarts")
        self.dead_letters = self._counter("dead_letters")
        self.snapshots = self._counter("snapshots")
        self.snapshots_refused = self._counter("snapshots_refused")
        self.policy_changes = self._counter("policy_changes")
        self.policy_file_errors = self._gauge("policy_file_errors")
        self.node_reports = self._counter("node_reports")
        self.node_logins = self._counter("node_logins")
        for reason in REFUSAL_REASONS:
            self.snapshots_refused.labels(reason)

    def declare_domain(self, domain: str) -> None:
        """Start the counters of a domain at zero, so that rates include the first event."""
        for outcome in FACT_OUTCOMES:
            self.facts_handled.labels(domain, outcome)
        for reason in DEAD_LETTER_REASONS:
            self.dead_letters.labels(domain, reason)
        self.facts_published.labels(domain)
        self.facts_folded.labels(domain)
        self.facts_resynced.labels(domain)
        self.facts_dated_ahead.labels(domain)

    def _declare_plans(self) -> None:
        self.decision_seconds = self._histogram("decision_seconds")
        self.batch_window_seconds = self._histogram("batch_window_seconds")
        self.reconcile_errors = self._counter("reconcile_errors")
        self.controller_errors = self._gauge("controller_reconcile_errors")
        self.controller_duration = self._gauge("controller_reconcile_duration")
        self.decisions = self._counter("decisions")
        self.deferred = self._gauge("deferred")
        self.plans_stale = self._counter("plans_stale")
        self.plans_refused = self._counter("plans_refused")
        self.set_aside = self._gauge("set_aside")
        self.brake_tripped = self._gauge("brake_tripped")
        self.plan_age = self._gauge("plan_age_seconds")
        self.scaling_actions = self._counter("scaling_actions")
        self.scaling_duration = self._histogram("scaling_duration_seconds")
        self.launches = self._counter("launches")
        self.scale_up_cooldown = self._gauge("scale_up_cooldown_remaining_seconds")
        self.scale_down_cooldown = self._gauge("scale_down_cooldown_remaining_seconds")
        self.launches.labels(LAUNCHED, "")
        for code in (*REFUSAL_CODES, OTHER):
            self.launches.labels(REFUSED, code)
        for tag in reason_tags(BuyReason, DrainReason, ReleaseReason, KeepReason, UpkeepReason):
            self.decisions.labels(tag)
        self.set_deferred({})

    def set_deferred(self, counts: Mapping[str, int]) -> None:
        """Set how many actions the last plan deferred, by reason tag; a tag missing in `counts` is zero."""
        for tag in _DEFER_TAGS:
            self.deferred.labels(tag).set(counts.get(tag, 0))

    def count_refused_plan(self) -> None:
        """Count a plan that the plan check rejected."""
        self.plans_refused.inc()

    def count_refused_launch(self, code: str) -> None:
        """Count a launch that the cloud refused with this code."""
        self.launches.labels(REFUSED, code if code in _CODES else OTHER).inc()

    def set_planned(self, clock_seconds: Callable[[], float] | None) -> None:
        """Let the age of the last plan count from now by this monotonic clock; None: this process does not plan."""
        if clock_seconds is None:
            self.plan_age.set_function(lambda: _NAN)
            return
        planned_at = clock_seconds()
        self.plan_age.set_function(lambda: clock_seconds() - planned_at)

    def page(self) -> CollectorRegistry:
        """Return the registry with every gauge up to date. Call on the event loop; rendering may run elsewhere."""
        if self.before_scrape is not None:
            self.before_scrape()
        return self.registry

    def forget_term(self) -> None:
        """Forget what only the active process knows: this one is active no more."""
        self.set_planned(None)
        self.set_deferred({})
        self.scale_up_cooldown.set(0)
        self.scale_down_cooldown.set(0)
        self.controller_duration.set(_NAN)
        self.set_forecast(NO_FORECAST)
        self._spend = tuple
        for gauge in (self.stream_fill, self.stream_oldest_age, self.stream_age_limit, self.effects_waiting):
            gauge.clear()

    def set_forecast(self, gauges: ForecastGauges) -> None:
        """Set the gauges of the forecast; NaN without one."""
        utilization, confidence = gauges.utilization_ratio, gauges.confidence_ratio
        self.predicted_utilization.set(_NAN if utilization is None else utilization)
        self.prediction_confidence.set(_NAN if confidence is None else confidence)

    def set_spend(self, uses: Callable[[], Sequence[SpendUse]]) -> None:
        """Use this function to compute how much of each spend budget is used, at every scrape."""
        self._spend = uses

    def update_spend(self) -> None:
        """Set the gauges of the spend budgets; those of budgets that the policy no longer has are gone."""
        gauge = self.spend_used
        gauge.clear()
        uses = sorted(self._spend(), key=lambda use: -1.0 if use.used_ratio is None else use.used_ratio, reverse=True)
        for use in uses[:SPEND_BUDGETS_COUNT_MAX]:
            gauge.labels(use.owner, use.period).set(_NAN if use.used_ratio is None else use.used_ratio)
        for use in reversed(uses[SPEND_BUDGETS_COUNT_MAX:]):  # the largest is set last
            gauge.labels(OTHER, use.period).set(_NAN if use.used_ratio is None else use.used_ratio)

    def _declare_fleet(self) -> None:
        self.nodes = self._gauge("nodes")
        self.node_count = self._gauge("node_count")
        self.desired_nodes = self._gauge("desired_node_count")
        self.cluster_utilization = self._gauge("cluster_utilization")
        self.pending_pods = self._gauge("pending_pods")
        self.underutilized_nodes = self._gauge("underutilized_nodes")
        self.dcgm_up = self._gauge("dcgm_up")
        self.spot_interruptions = self._counter("spot_interruptions")
        self.metadata_unreachable_nodes = self._gauge("metadata_unreachable_nodes")
        self.unparsed_queue_messages = self._counter("unparsed_queue_messages")
        self.spot_warnings = self._gauge("spot_termination_warnings")
        self.list_age = self._gauge("list_age_seconds")
        self.price_age = self._gauge("price_age_seconds")
        self.spot_savings = self._gauge("spot_savings_percentage")
        self.monthly_cost = self._gauge("estimated_monthly_cost_usd")
        self.monthly_savings = self._gauge("estimated_monthly_savings_usd")
        self.spread_cost = self._gauge("estimated_monthly_spread_cost_usd")
        self.predicted_utilization = self._gauge("predicted_utilization")
        self.prediction_confidence = self._gauge("prediction_confidence")
        self.spend_used = self._gauge("spend_budget_used_ratio")
        for capacity_type in CapacityType:
            self.nodes.labels(capacity_type.value)
            self.monthly_cost.labels(capacity_type.value)

    def _declare_jobs_and_cost(self) -> None:
        self.queue_wait = self._histogram("queue_wait_seconds")
        self.time_to_gpu = self._histogram("time_to_gpu_seconds")
        self.node_ready = self._histogram("node_ready_seconds")
        self.start_error = self._histogram("job_start_error_seconds")
        self.cost_error = self._histogram("job_cost_error_usd")
        self.estimates = self._counter("job_estimates_scored")
        self.duration_error = self._histogram("job_duration_error_ratio")
        self.durations = self._counter("job_durations_scored")
        self.cost = self._counter("cost_micro_usd")
        self.instances_without_price = self._gauge("instances_without_price")

    def _registry(self, family: Family) -> CollectorRegistry | None:
        """Return where the family is registered; None: another service exports it."""
        is_own = family.is_exported_by(self.service, self._role)
        return self._registries[family.exported] if is_own else None

    def _counter(self, name: str) -> Counter:
        family = BY_NAME[name]
        counter = Counter(
            name, family.text, family.labels, namespace=family.prefix, registry=self._registry(family)
        )  # fmt: skip
        for value in family.values:
            counter.labels(value)
        return counter

    def _gauge(self, name: str) -> Gauge:
        family = BY_NAME[name]
        gauge = Gauge(name, family.text, family.labels, namespace=family.prefix, registry=self._registry(family))
        if family.is_unknown_at_start:
            gauge.set(_NAN)
        return gauge

    def _histogram(self, name: str) -> Histogram:
        family = BY_NAME[name]
        return Histogram(
            name, family.text, family.labels, namespace=family.prefix, registry=self._registry(family),
            buckets=family.buckets,
        )  # fmt: skip
