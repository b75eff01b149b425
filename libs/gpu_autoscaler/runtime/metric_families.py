"""Every metric family: its name, meaning, labels, and the services that export it. `docs/reference/metrics.md` is made
from this table.

Names follow docs/decisions.md#metric-names. Labels come from LABELS alone and never carry ids. A family about the
cluster has one owner, so that a sum over processes counts nothing twice; only families about the process itself have
several. Where a service has replicas, the families marked LEADING and TICKED come from the active one alone.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

PREFIX = "gpu_autoscaler"
LABELS = frozenset(
    {
        "service", "domain", "pool", "gpu_kind", "capacity_type", "direction", "reason", "cause", "outcome",
        "stream", "lane", "code", "budget", "period", "source",
    }
)  # fmt: skip

FACT_OUTCOMES = ("done", "redelivered", "retried", "stale", "set_aside", "bug")
NODE_REPORT_OUTCOMES = ("published", "known", "refused", "replaced", "dropped")
NODE_LOGIN_OUTCOMES = ("accepted", "refused", "failed", "dropped")
TICK_OUTCOMES = ("done", "stale", "retried", "bug")
LOOP_RESTART_CAUSES = ("interrupted", "stalled", "bug")
SNAPSHOT_OUTCOMES = ("saved", "not_saved", "restored")
REFUSED_REQUEST = "refused_request"  # a client's request that is invalid: its author corrects it, no operator
DEAD_LETTER_REASONS = (
    "unknown_type", "invalid_fact", "permanent_error", "bug", "max_deliveries", "poison_message", REFUSED_REQUEST,
)  # fmt: skip
DIRECTIONS = ("up", "down")
ESTIMATE_OUTCOMES = ("within", "outside", "unknown")  # the estimated range; unknown: no range was estimated
LAUNCHED, REFUSED = "launched", "refused"
OTHER = "other"  # the label of whatever a bounded table does not name
SPEND_BUDGETS_COUNT_MAX = 50  # exported by name, those with the largest share first

# Codes of refused launches by which they are counted: those that a driver gives a meaning (`providers/*/translate.py`),
# and our own. Clouds have hundreds more; those are counted as `other`, and the log names them.
REFUSAL_CODES = (
    # Amazon Web Services, also reported by Karpenter
    "InsufficientInstanceCapacity", "InsufficientHostCapacity", "UnfulfillableCapacity", "ReservationCapacityExceeded",
    "SpotMaxPriceTooLow", "Unsupported", "InsufficientFreeAddressesInSubnet", "VcpuLimitExceeded",
    "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "MaxFleetCountExceeded", "UnauthorizedOperation",
    "AccessDenied", "AccessDeniedException", "AuthFailure", "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
    "OptInRequired", "PendingVerification", "MissingParameter", "ValidationError", "InvalidParameterValue",
    # Azure
    "AllocationFailed", "ZonalAllocationFailed", "OverconstrainedAllocationRequest",
    "OverconstrainedZonalAllocationRequest", "SkuNotAvailable", "NotAvailableForSubscription", "MaxPriceTooLow",
    "SubnetIsFull", "QuotaExceeded", "OperationNotAllowed", "AuthorizationFailed", "LinkedAuthorizationFailed",
    "RequestDisallowedByPolicy", "ReadOnlyDisabledSubscription", "MarketplacePurchaseEligibilityFailed",
    "InvalidParameter", "InvalidRequestContent", "ResourceNotFound", "ResourceGroupNotFound", "SubscriptionNotFound",
    "NotFound", "BadRequest", "PropertyChangeNotAllowed", "LocationNotAvailableForResourceType",
    # Google Cloud
    "ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "REGION_RESOURCE_POOL_EXHAUSTED",
    "RESOURCE_POOL_EXHAUSTED", "INSUFFICIENT_CAPACITY", "RESERVATION_CAPACITY_EXCEEDED", "RESERVATION_NOT_READY",
    "UNSUPPORTED_OPERATION", "RESIZE_REQUEST_TIMED_OUT", "IP_SPACE_EXHAUSTED", "IP_SPACE_EXHAUSTED_WITH_DETAILS",
    "QUOTA_EXCEEDED", "quotaExceeded", "PERMISSIONS_ERROR", "forbidden", "accessNotConfigured",
    # Karpenter's own, and the API server's about its objects
    "InsufficientCapacityError", "NodeClassNotReady", "Forbidden", "Invalid",
    # Our drivers' own, before the cloud is called
    "GangTooLarge", "LedgerFull", "MaxSize", "NoGroup", "NoPendingPod", "NoReservation", "NoScaleSet", "NoSubnet",
    "NothingLaunched", "OfferNotInGroup", "OfferNotInScaleSet", "ScaleSetFull", "ScaleSetNotOwned",
)  # fmt: skip

# Services by what they do, as their classes and specs declare it (tests/tidy/test_metrics.py compares them).
EVERY = ("*",)
CONSUMING = ("scheduler", "scaler", "cost_tracker")
TICKING = (
    "dcgm_ingest", "spot_watcher", "scheduler", "scaler", "shadow", "policy_watcher", "announcer", "cost_tracker",
    "gateway",
)  # fmt: skip
FOLDING = (*TICKING, "node_gateway")
PUBLISHING = (
    "pod_watcher", "dcgm_ingest", "spot_watcher", "node_gateway", "scheduler", "scaler", "shadow", "policy_watcher",
    "cost_tracker", "gateway",
)  # fmt: skip
RESYNCING = ("pod_watcher", "scheduler", "scaler")
LEASED = ("scaler",)
WITH_POLICY_FILE = (
    "spot_watcher/central", "scheduler", "scaler", "shadow", "policy_watcher", "announcer", "gateway",
)  # fmt: skip
SCALER = ("scaler",)
SCHEDULER = ("scheduler",)
COST_TRACKER = ("cost_tracker",)
NODE_GATEWAY = ("node_gateway",)
# A service with roles exports some families in one role only: `sensing.role`.
NOTICES = ("spot_watcher/node", "spot_watcher/nodes")
OFFERS = ("spot_watcher/central",)

Kind = Literal["counter", "gauge", "histogram"]
Exported = Literal["always", "leading", "ticked"]
LEADING: Exported = "leading"  # while the process is the active replica of its service
TICKED: Exported = "ticked"  # while it is, from the end of its first tick on: before, the value would be a false zero


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One metric family."""

    name: str  # as the table names it: a counter's has no suffix `_total`
    kind: Kind
    owners: tuple[str, ...]  # services, or service/role
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()  # of the only label: these start at zero
    exported: Exported = "always"
    is_unknown_at_start: bool = False
    buckets: tuple[float, ...] = ()
    prefix: str = PREFIX

    @property
    def full_name(self) -> str:
        """The name of the family on `/metrics`."""
        return f"{self.prefix}_{self.name}" if self.prefix else self.name

    def is_exported_by(self, service: str, role: str | None = None) -> bool:
        """Return whether processes of this service, in this role, export the family."""
        return self.owners == EVERY or service in self.owners or f"{service}/{role}" in self.owners


_FAST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_SECONDS = (1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 3600.0)
_USD = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 1000.0)


def _counter(name: str, owners: tuple[str, ...], text: str, *labels: str, values: tuple[str, ...] = ()) -> Family:
    return Family(name=name, kind="counter", owners=owners, text=text, labels=labels, values=values)


def _gauge(
    name: str,
    owners: tuple[str, ...],
    text: str,
    *labels: str,
    exported: Exported = "always",
    is_unknown_at_start: bool = False,
    prefix: str = PREFIX,
) -> Family:
    return Family(
        name=name, kind="gauge", owners=owners, text=text, labels=labels, exported=exported,
        is_unknown_at_start=is_unknown_at_start, prefix=prefix,
    )  # fmt: skip


def _fleet(name: str, text: str, *labels: str, is_unknown_at_start: bool = False) -> Family:
    return _gauge(name, SCALER, text, *labels, exported=TICKED, is_unknown_at_start=is_unknown_at_start)


def _histogram(name: str, owners: tuple[str, ...], text: str, buckets: tuple[float, ...], *labels: str) -> Family:
    return Family(name=name, kind="histogram", owners=owners, text=text, labels=labels, buckets=buckets)


FAMILIES: tuple[Family, ...] = (
    # ---- the process
    _gauge("build_info", EVERY, "Always 1; the labels carry service and versions.", "service", "version", "python"),
    _gauge("ready", EVERY, "1 while /readyz reports ready."),
    _gauge("bus_connected", EVERY, "1 while connected to the broker."),
    _gauge("bus_stock_parser", EVERY, "1 if the installed nats-py forces its own, slower parser on long reads."),
    _gauge("leader", LEASED, "1 while this process is the active replica of its service."),
    _counter(
        "loop_restarts",
        EVERY,
        "Restarts of loops: interrupted by an external error, stalled, or failed by a bug.",
        "cause",
        values=LOOP_RESTART_CAUSES,
    ),
    _counter("ticks", TICKING, "Ticks, by outcome.", "outcome", values=TICK_OUTCOMES),
    # ---- facts
    _counter("facts_handled", CONSUMING, "Facts handled, by outcome.", "domain", "outcome"),
    _histogram("handle_seconds", CONSUMING, "Time to handle one fact.", _FAST_SECONDS, "domain"),
    _counter("facts_published", PUBLISHING, "Facts stored by the broker.", "domain"),
    _counter(
        "facts_resynced", RESYNCING, "Facts about living objects stored again before their stream discards them.",
        "domain",
    ),
    _counter("facts_folded", FOLDING, "Facts folded into the state.", "domain"),
    _counter(
        "facts_dated_ahead", FOLDING, "Facts dated back because their publisher's clock was over a minute ahead.",
        "domain",
    ),
    _gauge("consumer_lag", FOLDING, "Messages waiting for this consumer.", "domain"),
    _counter("dead_letters", FOLDING, "Messages set aside as dead letters.", "domain", "reason"),
    _gauge(
        "effects_waiting", SCALER, "Effects that no handler has begun, or that wait for an API rate limit.", "lane",
        exported=LEADING,
    ),
    # ---- streams
    _gauge("stream_fill_ratio", SCALER, "Stored bytes of a stream, as share of its limit.", "stream", exported=LEADING),
    _gauge(
        "stream_oldest_age_seconds", SCALER, "Age of the oldest message of a stream; NaN: it has none.", "stream",
        exported=LEADING,
    ),
    _gauge(
        "stream_age_limit_seconds", SCALER, "Age after which a stream discards a message.", "stream", exported=LEADING
    ),
    # ---- watchers on nodes
    _counter(
        "node_reports", NODE_GATEWAY, "Reports of node watchers, by outcome.", "outcome", values=NODE_REPORT_OUTCOMES
    ),
    _counter(
        "node_logins", NODE_GATEWAY, "Logins of node watchers, by outcome.", "outcome", values=NODE_LOGIN_OUTCOMES
    ),
    # ---- snapshots and policy
    _counter("snapshots", FOLDING, "Snapshots of the state, by outcome.", "outcome", values=SNAPSHOT_OUTCOMES),
    _counter("snapshots_refused", FOLDING, "Snapshots unusable at a start.", "reason"),
    _counter("policy_changes", WITH_POLICY_FILE, "Policy changes applied since the start."),
    _gauge(
        "policy_file_errors", WITH_POLICY_FILE,
        "Errors in the policy file. Above 0: the last valid policy stays active.",
    ),
    # ---- plans
    _histogram("decision_seconds", SCALER, "Time of one tick.", _FAST_SECONDS),
    _histogram(
        "batch_window_seconds", SCALER, "Time that a tick waited for the end of a burst of urgent facts.", _FAST_SECONDS
    ),
    _counter("reconcile_errors", SCALER, "Failed ticks."),
    # Without our prefix, as existing dashboards expect (docs/decisions.md#metric-names).
    _gauge("controller_reconcile_errors", SCALER, "Failed ticks.", prefix=""),
    _gauge(
        "controller_reconcile_duration", SCALER, "Seconds of the last tick; NaN before the first.",
        exported=LEADING, is_unknown_at_start=True, prefix="",
    ),
    _counter("decisions", SCALER, "Decisions of published plans, by reason.", "reason"),
    _fleet("deferred", "Actions deferred by the last plan, by reason.", "reason"),
    _counter("plans_stale", SCALER, "Plans rejected because another plan was published first."),
    _counter("plans_refused", SCALER, "Plans in which the plan check found violations. Must stay zero."),
    _fleet("set_aside", "Demand, nodes and pools set aside because the plan check refused decisions for them."),
    _fleet("brake_tripped", "1 while the brake holds removals by force until somebody resumes."),
    _gauge(
        "plan_age_seconds", SCALER, "Time since the last tick that published a plan or had nothing to add.",
        exported=LEADING, is_unknown_at_start=True,
    ),
    _fleet("scale_up_cooldown_remaining_seconds", "Remaining cool-down before the next purchase."),
    _fleet("scale_down_cooldown_remaining_seconds", "Remaining cool-down before the next removal."),
    # ---- launches and removals
    _counter("scaling_actions", SCALER, "Nodes launched or terminated.", "direction", values=DIRECTIONS),
    _histogram(
        "scaling_duration_seconds", SCALER, "From decision to confirmation by the cloud.", _WAIT_SECONDS, "direction"
    ),
    _counter(
        "launches", SCALER,
        "Launches by outcome, and refused ones by the cloud's error code; `other`: codes that no driver knows.",
        "outcome", "code",
    ),
    _histogram("node_ready_seconds", SCALER, "From decision to GPUs that pods can use.", _WAIT_SECONDS),
    # ---- the fleet
    _fleet("nodes", "Nodes in the cluster.", "capacity_type"),
    _fleet("node_count", "Sum of gpu_autoscaler_nodes over all capacity types."),
    _fleet("desired_node_count", "Nodes in use or expected, launches in flight included."),
    _fleet("cluster_utilization", "Mean GPU utilization, 0 to 1; NaN: unknown.", is_unknown_at_start=True),
    _fleet("pending_pods", "Pods that the Kubernetes scheduler cannot place."),
    _fleet(
        "underutilized_nodes", "Nodes with a mean GPU utilization below 20 %; NaN: unknown.", is_unknown_at_start=True
    ),
    _fleet("spot_termination_warnings", "Active interruption notices."),
    _fleet(
        "list_age_seconds", "Age of what is known of the nodes, the pods and the cloud's instances; infinite: nothing.",
        "source",
    ),
    _fleet("price_age_seconds", "Age of the oldest price of an available offer; NaN: none.", is_unknown_at_start=True),
    _fleet("spot_savings_percentage", "Savings against on-demand prices, 0 to 100.", is_unknown_at_start=True),
    _fleet("estimated_monthly_cost_usd", "Cost of the current nodes for 730 hours.", "capacity_type"),
    _fleet(
        "estimated_monthly_savings_usd", "Savings by spot on the current nodes for 730 hours.", is_unknown_at_start=True
    ),
    _fleet(
        "estimated_monthly_spread_cost_usd",
        "What the current nodes cost more for 730 hours because a capacity pool had its share of spot.",
    ),
    _fleet(
        "predicted_utilization", "Forecast utilization in 30 minutes; above 1: exceeds the capacity; NaN: no forecast.",
        is_unknown_at_start=True,
    ),
    _fleet("prediction_confidence", "Confidence of the forecast, 0 to 1; NaN: no forecast.", is_unknown_at_start=True),
    _fleet(
        "spend_budget_used_ratio",
        "Spent share of each spend budget of the policy; above 1: exceeded; NaN: spend unknown. `other`: the largest "
        f"share beyond the first {SPEND_BUDGETS_COUNT_MAX} budgets.",
        "budget", "period",
    ),
    # ---- sensing
    _gauge(
        "dcgm_up", ("dcgm_ingest",), "1: every DCGM exporter answered the last scrape; NaN: none was scraped.",
        is_unknown_at_start=True, prefix="",
    ),
    _counter("spot_interruptions", ("spot_watcher",), "Interruption notices received."),
    _gauge(
        "metadata_unreachable_nodes", NOTICES,
        "Ready nodes with unreachable metadata: a notice there would be missed.",
    ),
    _counter(
        "unparsed_queue_messages", OFFERS,
        "Messages left in the cloud's interruption queue because they could not be parsed.",
    ),
    # ---- jobs
    _histogram("queue_wait_seconds", SCHEDULER, "From request to placement of a job.", _WAIT_SECONDS),
    _histogram("time_to_gpu_seconds", SCHEDULER, "From request to start of a job.", _WAIT_SECONDS),
    _histogram("job_start_error_seconds", SCHEDULER, "Absolute error of a job's estimated start.", _WAIT_SECONDS),
    _histogram("job_cost_error_usd", SCHEDULER, "Absolute error of a job's estimated cost.", _USD),
    _counter(
        "job_estimates_scored", SCHEDULER, "Estimated starts, by whether the start was within the range.", "outcome",
        values=ESTIMATE_OUTCOMES,
    ),
    _histogram(
        "job_duration_error_ratio", SCHEDULER,
        "Run time of a completed job over its prediction, or the inverse where that is larger; 1 is exact.",
        (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
    ),
    _counter(
        "job_durations_scored", SCHEDULER, "Predicted run times, by whether the run time was within the range.",
        "outcome", values=("within", "outside"),
    ),
    # ---- cost
    _counter(
        "cost_micro_usd", COST_TRACKER, "Accrued cost; allocated and idle add up to the bill.", "outcome",
        values=("allocated", "idle"),
    ),
    _gauge("instances_without_price", COST_TRACKER, "Running instances of unknown price."),
)  # fmt: skip

BY_NAME: Mapping[str, Family] = {family.name: family for family in FAMILIES}


def families_of(service: str, role: str | None = None) -> tuple[Family, ...]:
    """Return the families that processes of this service, in this role, export."""
    return tuple(family for family in FAMILIES if family.is_exported_by(service, role))
