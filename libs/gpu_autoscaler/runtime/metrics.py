"""Every metric there is, declared once, with names that dashboards of the field know (CHECKLIST S122, S156 to S158).

Labels come from LABELS alone; ids never. What is not known is NaN, never zero; counters and reasons start at zero.
A new metric is one line here.
"""

import platform
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gpu_autoscaler.core.foresight import ForecastGauges
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons import BuyReason, DrainReason, DeferReason, KeepReason, ReleaseReason
from gpu_autoscaler.runtime.snapshot_codec import REFUSAL_REASONS

PREFIX = "gpu_autoscaler"
LABELS = frozenset({"service", "domain", "pool", "gpu_kind", "capacity_type", "direction", "reason", "outcome"})

FACT_OUTCOMES = ("done", "again", "retried", "stale", "set_aside", "bug")
TICK_OUTCOMES = ("done", "stale", "retried", "bug")
LOOP_RESTART_CAUSES = ("interrupted", "stood_still", "bug")
SNAPSHOT_RESULTS = ("kept", "not_saved", "used")
DEAD_LETTER_REASONS = ("unknown_type", "invalid_fact", "permanent_error", "bug", "given_up", "poison_message")
DIRECTIONS = ("up", "down")
ESTIMATE_OUTCOMES = ("within", "outside", "unknown")  # of the range; unknown: none was given

_FAST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_SECONDS = (1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 3600.0)
_USD = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 1000.0)
_NAN = float("nan")


def reason_tags(*unions: Any) -> tuple[str, ...]:  # noqa: ANN401 - a union of reasons has no type of its own
    """Return the names of all reasons in these unions."""
    return tuple(reason.tag() for union in unions for reason in get_args(union))


_HELD_BACK_TAGS = reason_tags(DeferReason)


@cache
def package_version() -> str:
    """The version of this distribution that is installed. Looked up once: it takes longer than most plans do."""
    try:
        return version("gpu-autoscaler")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


class Metrics:
    """The metrics of one process, in a registry of their own, so that two may live in one test."""

    def __init__(self, service: str, registry: CollectorRegistry | None = None) -> None:
        self.service = service
        self.registry = CollectorRegistry() if registry is None else registry
        self.before_scrape: Callable[[], None] | None = None  # brings figures up to date that are counted when asked for
        self._declare_plumbing()
        self._declare_decisions()
        self._declare_fleet()
        self._declare_waits_and_money()

    def _declare_plumbing(self) -> None:
        build = self._gauge("build_info", "Always 1; the labels say what runs.", "service", "version", "python")
        build.labels(self.service, package_version(), platform.python_version()).set(1)
        self.is_ready = self._gauge("ready", "1 while /readyz says yes.")
        self.is_leader = self._gauge("leader", "1 while this process is the active one of its service.")
        self.is_bus_connected = self._gauge("bus_connected", "1 while the broker answers.")
        self.facts_handled = self._counter(
            "facts_handled", "Facts given to doors, by how it went.", "domain", "outcome"
        )
        self.facts_published = self._counter("facts_published", "Facts stored by the broker.", "domain")
        self.facts_folded = self._counter("facts_folded", "Facts folded into the state.", "domain")
        self.handle_seconds = self._histogram(
            "handle_seconds", "Time of one fact in its door.", _FAST_SECONDS, "domain"
        )
        self.consumer_lag = self._gauge("consumer_lag", "Messages that wait for this consumer.", "domain")
        self.ticks = self._counter("ticks", "Ticks, by how they went.", "outcome")
        self.loop_restarts = self._counter(
            "loop_restarts",
            "Loops that something outside interrupted, that got no further, or a bug of ours.",
            "reason",
        )
        self.dead_letters = self._counter("dead_letters", "Messages set aside.", "domain", "reason")
        self.snapshots = self._counter("snapshots", "Snapshots of the state, by what became of them.", "outcome")
        self.snapshots_refused = self._counter("snapshots_refused", "Snapshots that a start could not use.", "reason")
        self.policy_changes = self._counter("policy_changes", "Policies that came into force while this process ran.")
        self.policy_file_errors = self._gauge(
            "policy_file_errors", "Above 0: the file is refused, and the last good policy stays in force."
        )
        for outcome in TICK_OUTCOMES:
            self.ticks.labels(outcome)
        for reason in LOOP_RESTART_CAUSES:
            self.loop_restarts.labels(reason)
        for outcome in SNAPSHOT_RESULTS:
            self.snapshots.labels(outcome)
        for reason in REFUSAL_REASONS:
            self.snapshots_refused.labels(reason)

    def declare_domain(self, domain: str) -> None:
        """Start the counters of a domain at zero: a rate from the first event on."""
        for outcome in FACT_OUTCOMES:
            self.facts_handled.labels(domain, outcome)
        for reason in DEAD_LETTER_REASONS:
            self.dead_letters.labels(domain, reason)
        self.facts_published.labels(domain)
        self.facts_folded.labels(domain)

    def _declare_decisions(self) -> None:
        self.decision_seconds = self._histogram("decision_seconds", "Time of one tick in its door.", _FAST_SECONDS)
        self.batch_window_seconds = self._histogram(
            "batch_window_seconds", "Quiet windows before a tick: a burst was listened to.", _FAST_SECONDS
        )
        self.reconcile_errors = self._counter("reconcile_errors", "Ticks that failed.")
        # As boards of the field call them (CHECKLIST S123): without our prefix, and not as counters are named today.
        self.controller_errors = Gauge("controller_reconcile_errors", "Ticks that failed.", registry=self.registry)
        self.controller_duration = Gauge(
            "controller_reconcile_duration", "Seconds of the last tick; NaN before.", registry=self.registry
        )
        self.controller_duration.set(_NAN)
        self.decisions = self._counter("decisions", "Decisions of accepted plans.", "reason")
        self.deferred = self._gauge("deferred", "What the last plan held back.", "reason")
        self.plans_stale = self._counter("plans_stale", "Plans refused by the stream: another was first.")
        self.plans_refused = self._counter("plans_refused", "Plans that the second opinion refused. Must stay zero.")
        self.scaling_actions = self._counter("scaling_actions", "Nodes made or removed.", "direction")
        self.scaling_duration = self._histogram(
            "scaling_duration_seconds", "From decision to the cloud's confirmation.", _WAIT_SECONDS, "direction"
        )
        self.scale_up_cooldown = self._gauge("scale_up_cooldown_remaining_seconds", "Until purchases are free again.")
        self.scale_down_cooldown = self._gauge(
            "scale_down_cooldown_remaining_seconds", "Until removals are free again."
        )
        for tag in reason_tags(BuyReason, DrainReason, ReleaseReason, KeepReason):
            self.decisions.labels(tag)
        self.set_deferred({})
        for direction in DIRECTIONS:
            self.scaling_actions.labels(direction)

    def set_deferred(self, counts: Mapping[str, int]) -> None:
        """Say what the last plan held back, by reason; reasons that are not in `counts` are none."""
        for tag in _HELD_BACK_TAGS:
            self.deferred.labels(tag).set(counts.get(tag, 0))

    def count_refused_plan(self) -> None:
        """The second opinion refused a plan."""
        self.plans_refused.inc()

    def page(self) -> CollectorRegistry:
        """Return the registry with every figure up to date. Called on the loop; the text may be made elsewhere."""
        if self.before_scrape is not None:
            self.before_scrape()
        return self.registry

    def set_forecast(self, foresight: ForecastGauges) -> None:
        """Say what the forecast says; NaN where there is none."""
        utilization, confidence = foresight.utilization_ratio, foresight.confidence_ratio
        self.predicted_utilization.set(_NAN if utilization is None else utilization)
        self.prediction_confidence.set(_NAN if confidence is None else confidence)

    def _declare_fleet(self) -> None:
        self.nodes = self._gauge("nodes", "Nodes in the cluster.", "capacity_type")
        self.node_count = self._gauge("node_count", "Alias of nodes, all capacity types together.")
        self.desired_nodes = self._gauge("desired_node_count", "Nodes that count, orders in flight included.")
        self.cluster_utilization = self._unknown("cluster_utilization", "Mean GPU utilisation, 0 to 1.")
        self.pending_pods = self._gauge("pending_pods", "Pods that the cluster's scheduler finds no room for.")
        self.underutilized_nodes = self._unknown("underutilized_nodes", "Nodes with GPUs used below 20 %.")
        self.dcgm_up = Gauge(
            "dcgm_up", "1: every exporter that was asked last answered; NaN: none was asked.", registry=self.registry
        )
        self.dcgm_up.set(_NAN)
        self.spot_interruptions = self._counter("spot_interruptions", "Notices received.")
        self.metadata_unreachable_nodes = self._gauge(
            "metadata_unreachable_nodes", "Ready nodes whose metadata does not answer: a notice would be missed."
        )
        self.unparsed_queue_messages = self._counter("unparsed_queue_messages", "Of a cloud's queue: left there, not understood.")
        self.spot_warnings = self._gauge("spot_termination_warnings", "Notices that stand.")
        self.price_age = self._unknown("price_age_seconds", "Age of the oldest price of what is for sale; NaN: none.")
        self.spot_savings = self._unknown("spot_savings_percentage", "Saved against on-demand, 0 to 100.")
        self.monthly_cost = self._gauge(
            "estimated_monthly_cost_usd", "Of what runs now, for 730 hours.", "capacity_type"
        )
        self.monthly_savings = self._unknown("estimated_monthly_savings_usd", "By spot, for 730 hours.")
        self.predicted_utilization = self._unknown(
            "predicted_utilization", "Foreseen in half an hour; above 1: more than there is; NaN without."
        )
        self.prediction_confidence = self._unknown("prediction_confidence", "Of the forecast; NaN without one.")
        for capacity_type in CapacityType:
            self.nodes.labels(capacity_type.value)
            self.monthly_cost.labels(capacity_type.value)

    def _declare_waits_and_money(self) -> None:
        self.queue_wait = self._histogram("queue_wait_seconds", "From request to placement (S157).", _WAIT_SECONDS)
        self.time_to_gpu = self._histogram("time_to_gpu_seconds", "From request to running (S156).", _WAIT_SECONDS)
        self.node_ready = self._histogram(
            "node_ready_seconds", "From decision to GPUs that pods can use (S158).", _WAIT_SECONDS
        )
        self.cost = self._counter("cost_micro_usd", "Charged so far: allocated and idle add up.", "outcome")
        self.instances_without_price = self._gauge("instances_without_price", "Running, but nobody says the price.")
        self.start_error = self._histogram(
            "job_start_error_seconds", "How far off the expected start of a job was.", _WAIT_SECONDS
        )
        self.cost_error = self._histogram("job_cost_error_usd", "How far off its expected cost was.", _USD)
        self.estimates = self._counter("job_estimates_scored", "Expected starts beside what came.", "outcome")
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
