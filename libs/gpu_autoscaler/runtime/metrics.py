"""Every metric, declared once. Names follow docs/decisions.md#metric-names.

Labels come from LABELS alone and never carry ids. Unknown is NaN, never zero; counters and reasons start at zero.
"""

import platform
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gpu_autoscaler.core.provisioning.forecast_step import ForecastGauges
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import BuyReason
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.drain import DrainReason, KeepReason, ReleaseReason
from gpu_autoscaler.runtime.snapshot_codec import REFUSAL_REASONS

PREFIX = "gpu_autoscaler"
LABELS = frozenset(
    {"service", "domain", "pool", "gpu_kind", "capacity_type", "direction", "reason", "cause", "outcome"}
)

FACT_OUTCOMES = ("done", "redelivered", "retried", "stale", "set_aside", "bug")
TICK_OUTCOMES = ("done", "stale", "retried", "bug")
LOOP_RESTART_CAUSES = ("interrupted", "stalled", "bug")
SNAPSHOT_OUTCOMES = ("saved", "not_saved", "restored")
DEAD_LETTER_REASONS = ("unknown_type", "invalid_fact", "permanent_error", "bug", "max_deliveries", "poison_message")
DIRECTIONS = ("up", "down")
ESTIMATE_OUTCOMES = ("within", "outside", "unknown")  # the estimated range; unknown: no range was estimated

_FAST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_SECONDS = (1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 3600.0)
_USD = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 1000.0)
_NAN = float("nan")


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


class Metrics:
    """The metrics of one process, in a registry of their own, so that two may coexist in one test."""

    def __init__(self, service: str, registry: CollectorRegistry | None = None) -> None:
        self.service = service
        self.registry = CollectorRegistry() if registry is None else registry
        self.before_scrape: Callable[[], None] | None = None  # updates the gauges that are computed on demand
        self._declare_process()
        self._declare_decisions()
        self._declare_fleet()
        self._declare_waits_and_spend()

    def _declare_process(self) -> None:
        build = self._gauge(
            "build_info", "Always 1; the labels carry service and versions.", "service", "version", "python"
        )
        build.labels(self.service, package_version(), platform.python_version()).set(1)
        self.is_ready = self._gauge("ready", "1 while /readyz reports ready.")
        self.is_leader = self._gauge("leader", "1 while this process is the active replica of its service.")
        self.is_bus_connected = self._gauge("bus_connected", "1 while connected to the broker.")
        self.facts_handled = self._counter("facts_handled", "Facts handled, by outcome.", "domain", "outcome")
        self.facts_published = self._counter("facts_published", "Facts stored by the broker.", "domain")
        self.facts_resynced = self._counter(
            "facts_resynced", "Facts about living objects stored again before their stream discards them.", "domain"
        )
        self.facts_dated_ahead = self._counter(
            "facts_dated_ahead", "Facts dated back because their publisher's clock was over a minute ahead.", "domain"
        )
        self.facts_folded = self._counter("facts_folded", "Facts folded into the state.", "domain")
        self.handle_seconds = self._histogram("handle_seconds", "Time to handle one fact.", _FAST_SECONDS, "domain")
        self.consumer_lag = self._gauge("consumer_lag", "Messages waiting for this consumer.", "domain")
        self.ticks = self._counter("ticks", "Ticks, by outcome.", "outcome")
        self.loop_restarts = self._counter(
            "loop_restarts",
            "Restarts of loops: interrupted by an external error, stalled, or failed by a bug.",
            "cause",
        )
        self.dead_letters = self._counter("dead_letters", "Messages set aside as dead letters.", "domain", "reason")
        self.snapshots = self._counter("snapshots", "Snapshots of the state, by outcome.", "outcome")
        self.snapshots_refused = self._counter("snapshots_refused", "Snapshots unusable at a start.", "reason")
        self.policy_changes = self._counter("policy_changes", "Policy changes applied since the start.")
        self.policy_file_errors = self._gauge(
            "policy_file_errors", "Errors in the policy file. Above 0: the last valid policy stays active."
        )
        for outcome in TICK_OUTCOMES:
            self.ticks.labels(outcome)
        for cause in LOOP_RESTART_CAUSES:
            self.loop_restarts.labels(cause)
        for outcome in SNAPSHOT_OUTCOMES:
            self.snapshots.labels(outcome)
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

    def _declare_decisions(self) -> None:
        self.decision_seconds = self._histogram("decision_seconds", "Time of one tick.", _FAST_SECONDS)
        self.batch_window_seconds = self._histogram(
            "batch_window_seconds", "Time that a tick waited for the end of a burst of urgent facts.", _FAST_SECONDS
        )
        self.reconcile_errors = self._counter("reconcile_errors", "Failed ticks.")
        # Gauges without our prefix, as existing dashboards expect (docs/decisions.md#metric-names).
        self.controller_errors = Gauge("controller_reconcile_errors", "Failed ticks.", registry=self.registry)
        self.controller_duration = Gauge(
            "controller_reconcile_duration", "Seconds of the last tick; NaN before the first.", registry=self.registry
        )
        self.controller_duration.set(_NAN)
        self.decisions = self._counter("decisions", "Decisions of published plans, by reason.", "reason")
        self.deferred = self._gauge("deferred", "Actions deferred by the last plan, by reason.", "reason")
        self.plans_stale = self._counter("plans_stale", "Plans rejected because another plan was published first.")
        self.plans_refused = self._counter(
            "plans_refused", "Plans in which the plan check found violations. Must stay zero."
        )
        self.set_aside = self._gauge(
            "set_aside", "Demand, nodes and pools set aside because the plan check refused decisions for them."
        )
        self.plan_age = self._unknown(
            "plan_age_seconds",
            "Time since the last tick that published a plan or had nothing to add; NaN: this process does not plan.",
        )
        self.scaling_actions = self._counter("scaling_actions", "Nodes launched or terminated.", "direction")
        self.scaling_duration = self._histogram(
            "scaling_duration_seconds", "From decision to confirmation by the cloud.", _WAIT_SECONDS, "direction"
        )
        self.scale_up_cooldown = self._gauge(
            "scale_up_cooldown_remaining_seconds", "Remaining cool-down before the next purchase."
        )
        self.scale_down_cooldown = self._gauge(
            "scale_down_cooldown_remaining_seconds", "Remaining cool-down before the next removal."
        )
        for tag in reason_tags(BuyReason, DrainReason, ReleaseReason, KeepReason):
            self.decisions.labels(tag)
        self.set_deferred({})
        for direction in DIRECTIONS:
            self.scaling_actions.labels(direction)

    def set_deferred(self, counts: Mapping[str, int]) -> None:
        """Set how many actions the last plan deferred, by reason tag; a tag missing in `counts` is zero."""
        for tag in _DEFER_TAGS:
            self.deferred.labels(tag).set(counts.get(tag, 0))

    def count_refused_plan(self) -> None:
        """Count a plan that the plan check rejected."""
        self.plans_refused.inc()

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

    def set_forecast(self, gauges: ForecastGauges) -> None:
        """Set the gauges of the forecast; NaN without one."""
        utilization, confidence = gauges.utilization_ratio, gauges.confidence_ratio
        self.predicted_utilization.set(_NAN if utilization is None else utilization)
        self.prediction_confidence.set(_NAN if confidence is None else confidence)

    def _declare_fleet(self) -> None:
        self.nodes = self._gauge("nodes", "Nodes in the cluster.", "capacity_type")
        self.node_count = self._gauge("node_count", "Sum of gpu_autoscaler_nodes over all capacity types.")
        self.desired_nodes = self._gauge("desired_node_count", "Nodes in use or expected, launches in flight included.")
        self.cluster_utilization = self._unknown("cluster_utilization", "Mean GPU utilization, 0 to 1; NaN: unknown.")
        self.pending_pods = self._gauge("pending_pods", "Pods that the Kubernetes scheduler cannot place.")
        self.underutilized_nodes = self._unknown(
            "underutilized_nodes", "Nodes with a mean GPU utilization below 20 %; NaN: unknown."
        )
        self.dcgm_up = Gauge(
            "dcgm_up", "1: every DCGM exporter answered the last scrape; NaN: none was scraped.", registry=self.registry
        )
        self.dcgm_up.set(_NAN)
        self.spot_interruptions = self._counter("spot_interruptions", "Interruption notices received.")
        self.metadata_unreachable_nodes = self._gauge(
            "metadata_unreachable_nodes", "Ready nodes with unreachable metadata: a notice there would be missed."
        )
        self.unparsed_queue_messages = self._counter(
            "unparsed_queue_messages",
            "Messages left in the cloud's interruption queue because they could not be parsed.",
        )
        self.spot_warnings = self._gauge("spot_termination_warnings", "Active interruption notices.")
        self.price_age = self._unknown("price_age_seconds", "Age of the oldest price of an available offer; NaN: none.")
        self.spot_savings = self._unknown("spot_savings_percentage", "Savings against on-demand prices, 0 to 100.")
        self.monthly_cost = self._gauge(
            "estimated_monthly_cost_usd", "Cost of the current nodes for 730 hours.", "capacity_type"
        )
        self.monthly_savings = self._unknown(
            "estimated_monthly_savings_usd", "Savings by spot on the current nodes for 730 hours."
        )
        self.predicted_utilization = self._unknown(
            "predicted_utilization",
            "Forecast utilization in 30 minutes; above 1: exceeds the capacity; NaN: no forecast.",
        )
        self.prediction_confidence = self._unknown(
            "prediction_confidence", "Confidence of the forecast, 0 to 1; NaN: no forecast."
        )
        for capacity_type in CapacityType:
            self.nodes.labels(capacity_type.value)
            self.monthly_cost.labels(capacity_type.value)

    def _declare_waits_and_spend(self) -> None:
        self.queue_wait = self._histogram("queue_wait_seconds", "From request to placement of a job.", _WAIT_SECONDS)
        self.time_to_gpu = self._histogram("time_to_gpu_seconds", "From request to start of a job.", _WAIT_SECONDS)
        self.node_ready = self._histogram(
            "node_ready_seconds", "From decision to GPUs that pods can use.", _WAIT_SECONDS
        )
        self.cost = self._counter("cost_micro_usd", "Accrued cost; allocated and idle add up to the bill.", "outcome")
        self.instances_without_price = self._gauge("instances_without_price", "Running instances of unknown price.")
        self.start_error = self._histogram(
            "job_start_error_seconds", "Absolute error of a job's estimated start.", _WAIT_SECONDS
        )
        self.cost_error = self._histogram("job_cost_error_usd", "Absolute error of a job's estimated cost.", _USD)
        self.estimates = self._counter(
            "job_estimates_scored", "Estimated starts, by whether the start was within the range.", "outcome"
        )
        for outcome in ESTIMATE_OUTCOMES:
            self.estimates.labels(outcome)
        for outcome in ("allocated", "idle"):
            self.cost.labels(outcome)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=PREFIX, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=PREFIX, registry=self.registry)

    def _unknown(self, name: str, text: str) -> Gauge:
        gauge = self._gauge(name, text)
        gauge.set(_NAN)
        return gauge

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=PREFIX, registry=self.registry, buckets=buckets)
