"""Why something was decided, and why something was held back. Reasons are data: a log line, a metric label
(the tag) and a sentence on the dashboard are three views of one struct.

A new reason is a struct here, its sentence in `core/explain.py`, and its name in one of the unions below.
"""

from gpu_autoscaler.model.boot_reasons import BootTimedOut as BootTimedOut  # noqa: PLC0414 - named here for all
from gpu_autoscaler.model.directives import Attribution
from gpu_autoscaler.model.hints import RebalanceRecommended
from gpu_autoscaler.model.ids import NodeUid, PodUid
from gpu_autoscaler.model.money_reasons import HourlyPriceLimit as HourlyPriceLimit  # noqa: PLC0414 - named here for all
from gpu_autoscaler.model.money_reasons import SpendEnforcementBlocked as SpendEnforcementBlocked  # noqa: PLC0414 - named here for all
from gpu_autoscaler.model.money_reasons import SpendExhausted as SpendExhausted  # noqa: PLC0414 - named here for all
from gpu_autoscaler.model.money_reasons import SpendLimit as SpendLimit  # noqa: PLC0414 - named here for all
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.passed import DroppedPreference, RejectedOffer
from gpu_autoscaler.model.reason import Reason
from gpu_autoscaler.model.shape_reasons import ShapeReason
from gpu_autoscaler.model.use_reasons import TelemetryUnreliable, UtilizationUnconfirmed, UtilizationHigh
from gpu_autoscaler.model.waits import (
    BatchWindowOpen,
    GangBackoff,
    GangPending,
    GangIncomplete,
    GangTimedOut,
    SpotAwaited,
    SpotExcluded,
)

# ---- why a node is bought


class UnmetDemand(Reason, frozen=True, kw_only=True, tag="unmet_demand"):
    """Work waits that nothing which runs, boots or is ordered can take."""

    demand: tuple[str, ...]  # keys of the demand items that this node is for, e.g. job/<id>, pod/<uid>
    offers_considered: int
    price_micro_usd_per_hour: int
    instead_of: RejectedOffer | None = None  # None: nothing for sale that would do has less price
    dropped: tuple[DroppedPreference, ...] = ()  # what the work would have liked and does not get


class ReplacesAtRiskNode(Reason, frozen=True, kw_only=True, tag="replaces_at_risk_node"):
    """A node with work on it will be gone soon; this one takes its place."""

    node_uid: NodeUid
    node_name: str
    reclaim_at: Instant | None
    demand: tuple[str, ...] = ()
    instead_of: RejectedOffer | None = None  # as with unmet demand
    dropped: tuple[DroppedPreference, ...] = ()  # as with unmet demand


class BelowMinimum(Reason, frozen=True, kw_only=True, tag="below_minimum"):
    """The policy wants at least this many nodes."""

    nodes_count: int
    nodes_count_min: int


class ReplacesNodes(Reason, frozen=True, kw_only=True, tag="replaces_nodes"):
    """Nodes are to go by our choice, and their pods have no other place: this one is to be ready before they drain."""

    cause: str  # as budgets name it: underused, drifted, expired, sick
    node_uids: tuple[NodeUid, ...]
    node_names: tuple[str, ...]
    demand: tuple[str, ...]  # keys of the pods that are to move, pod/<uid>


class CapacityBuffer(Reason, frozen=True, kw_only=True, tag="capacity_buffer"):
    """Nobody waits yet, but so many GPUs are to be free: for headroom, or for demand that is foreseen."""

    demand: tuple[str, ...]  # headroom/<name>, or forecast/<GPU model, or any>
    free_gpu_count: int  # there or on their way, with what waits served
    wanted_gpu_count: int


class BelowOverride(Reason, frozen=True, kw_only=True, tag="below_override"):
    """Somebody wants at least so many nodes or GPUs for a while."""

    demand: tuple[str, ...]  # override/<scope>
    attribution: Attribution
    unit: str  # node or GPU
    count: int  # there or on their way, and staying
    count_min: int


# ---- why a node goes


class NodeIdle(Reason, frozen=True, kw_only=True, tag="node_idle"):
    """No pod that counts ran here for longer than the policy allows."""

    idle_seconds: float
    idle_seconds_max: float


class NodeUnderused(Reason, frozen=True, kw_only=True, tag="node_underused"):
    """Every pod here provably fits elsewhere and may be disturbed."""

    pods: tuple[PodUid, ...]
    saving_micro_usd_per_hour: int | None  # None: nobody knows its price, and its use alone is why it goes
    utilization_ratio: float | None = None  # where its GPUs being used so little is why it was looked at


class NodeExpired(Reason, frozen=True, kw_only=True, tag="node_expired"):
    """The node is older than the policy lets nodes become."""

    age_seconds: float
    age_seconds_max: float


class NodeDrifted(Reason, frozen=True, kw_only=True, tag="node_drifted"):
    """The node is not what the policy would buy today."""

    difference: str  # in words: "pool gpu is gone", "zone eu-1a is not allowed any more"


class NodeUnhealthy(Reason, frozen=True, kw_only=True, tag="node_unhealthy"):
    """Evidence over a while says that the node cannot be trusted with work."""

    evidence: str  # in words: "GPU 3 reported XID 79"
    unhealthy_seconds: float
    unhealthy_seconds_max: float
    is_fatal: bool = True  # False: it still works, and goes when its work may be moved


class SpotReclaim(Reason, frozen=True, kw_only=True, tag="spot_reclaim"):
    """The cloud takes the instance back."""

    notice_id: str
    kind: str
    reclaim_at: Instant | None  # None: the notice carried no deadline


class NodeDeleted(Reason, frozen=True, kw_only=True, tag="node_deleted"):
    """Somebody deleted the node object by hand, which our finalizer holds until node and instance are seen to."""

    deleted_at: Instant


class NodeLost(Reason, frozen=True, kw_only=True, tag="node_lost"):
    """Kubernetes had a node of the instance and has it no more: somebody deleted it, and no work can reach it."""


class NodeOrphaned(Reason, frozen=True, kw_only=True, tag="node_orphaned"):
    """An instance with our tag that no decision of ours stands behind any more."""

    seen_seconds: float


class GangAbandoned(Reason, frozen=True, kw_only=True, tag="gang_abandoned"):
    """Bought for a gang that cannot be completed now, and needed by nothing else."""

    gang: str  # key of the demand item, e.g. job/<id>
    defer_reason: str  # tag of the reason for which the rest of the gang is not bought


class AboveOverride(Reason, frozen=True, kw_only=True, tag="above_override"):
    """Empty, and there is more than somebody allows for a while."""

    attribution: Attribution
    unit: str  # node or GPU
    count: int
    count_max: int


class DemandReturned(Reason, frozen=True, kw_only=True, tag="demand_returned"):
    """Work came that this draining node can take; keeping it is cheaper than buying another."""

    demand: tuple[str, ...]


class NoticeWithdrawn(Reason, frozen=True, kw_only=True, tag="notice_withdrawn"):
    """The cloud takes its notice back; the node stays."""

    notice_id: str


# ---- why something was held back


class NoOfferFits(Reason, frozen=True, kw_only=True, tag="no_offer_fits"):
    """Nothing on sale can hold this, however many are bought."""

    detail: str  # what no offer has, in words: "no offer has 16 GPUs of model T4 on one node (most: 4)"


class OffersUnavailable(Reason, frozen=True, kw_only=True, tag="offers_unavailable"):
    """Offers would fit, but the cloud had no capacity lately."""

    offers: tuple[str, ...]
    retry_at: Instant


class PriceUnknown(Reason, frozen=True, kw_only=True, tag="price_unknown"):
    """Offers would fit, but none has a price; no price is not free."""

    offers: tuple[str, ...]


class NodesLimit(Reason, frozen=True, kw_only=True, tag="nodes_limit"):
    """The policy's number of nodes is reached, counting orders in flight."""

    nodes_count: int
    nodes_count_max: int
    owner: str = "cluster"  # whose limit it is: cluster, pool/<name>, zone/<name> or project/<name>


class GpusLimit(Reason, frozen=True, kw_only=True, tag="gpus_limit"):
    """The policy's number of GPUs is reached, counting orders in flight."""

    gpu_count: int
    gpu_count_max: int
    owner: str = "cluster"  # as with nodes


class Cooldown(Reason, frozen=True, kw_only=True, tag="cooldown"):
    """Too soon after the last action of this direction."""

    remaining_seconds: float


class Frozen(Reason, frozen=True, kw_only=True, tag="frozen"):
    """The policy says that nothing is to be changed, or somebody does for a while."""

    attribution: Attribution | None = None  # None: the policy


class PoolPaused(Reason, frozen=True, kw_only=True, tag="pool_paused"):
    """Somebody wants one pool to be left as it is for a while."""

    pool: str
    attribution: Attribution


class OverrideReached(Reason, frozen=True, kw_only=True, tag="override_reached"):
    """Somebody allows no more than there is, for a while."""

    attribution: Attribution
    unit: str  # node or GPU
    count: int
    count_max: int


class KeptByOverride(Reason, frozen=True, kw_only=True, tag="kept_by_override"):
    """Without the node there would be fewer than somebody wants for a while."""

    attribution: Attribution
    unit: str  # node or GPU
    count: int
    count_min: int


class CapacityExpected(Reason, frozen=True, kw_only=True, tag="capacity_expected"):
    """A node that is ordered or booting, or room about to be free, will take this."""

    node: str  # action id or node name
    expected_at: Instant | None


class NotYetIdle(Reason, frozen=True, kw_only=True, tag="not_yet_idle"):
    """Empty, but not for long enough."""

    idle_seconds: float
    idle_seconds_max: float


class PodProtected(Reason, frozen=True, kw_only=True, tag="pod_protected"):
    """A pod that must not be disturbed keeps the node."""

    pod_uid: PodUid
    pod: str  # namespace/name
    protection: str  # the annotation, budget or rule that protects it


class NodeProtected(Reason, frozen=True, kw_only=True, tag="node_protected"):
    """The node itself is marked as one that must stay."""

    protection: str  # the annotation that protects it


class PodsFitNowhere(Reason, frozen=True, kw_only=True, tag="pods_fit_nowhere"):
    """Pods here have no other place."""

    pods: tuple[PodUid, ...]


class WatchStale(Reason, frozen=True, kw_only=True, tag="watch_stale"):
    """A failed or old list is not an empty cluster: hold still."""

    source: str  # pods, nodes, instances
    age_seconds: float | None  # None: never seen
    age_seconds_max: float


class DisruptionBudgetReached(Reason, frozen=True, kw_only=True, tag="disruption_budget_reached"):
    """Enough nodes are on their way out already."""

    disrupting_count: int
    disrupting_count_max: int


class SavingTooSmall(Reason, frozen=True, kw_only=True, tag="saving_too_small"):
    """Moving the pods would save less than the policy asks of a disturbance."""

    saving_ratio: float
    saving_ratio_min: float


class TooManyUnhealthy(Reason, frozen=True, kw_only=True, tag="too_many_unhealthy"):
    """So many nodes look sick that the fault is rather in the looking, or in all of them: nothing is done."""

    unhealthy_count: int
    nodes_count: int
    unhealthy_ratio_max: float


class MinimumReached(Reason, frozen=True, kw_only=True, tag="minimum_reached"):
    """Removing the node would pass the policy's minimum."""

    nodes_count: int
    nodes_count_min: int


class PodConstraintsViolated(Reason, frozen=True, kw_only=True, tag="pod_constraints_violated"):
    """Offers would fit, but wherever a node could be had stand pods too near, too far, or too many of them."""

    rules: tuple[str, ...]  # those of the pod, in words: "even over topology.kubernetes.io/zone within 1"


class KeptAsBuffer(Reason, frozen=True, kw_only=True, tag="kept_as_buffer"):
    """Empty, but its GPUs are kept free for what may come."""

    kept_for: str  # headroom/<name>, or forecast/<GPU model, or any>


class ForecastUncertain(Reason, frozen=True, kw_only=True, tag="forecast_uncertain"):
    """More demand is foreseen than there is room for, but the forecast has not been right enough to act on."""

    confidence_ratio: float | None  # None: too few of its hours were scored
    confidence_ratio_min: float


BuyReason = UnmetDemand | ReplacesAtRiskNode | ReplacesNodes | BelowMinimum | CapacityBuffer | BelowOverride | UtilizationHigh
DrainReason = (
    NodeIdle
    | NodeUnderused
    | NodeExpired
    | NodeDrifted
    | NodeUnhealthy
    | GangAbandoned
    | SpotReclaim
    | NodeDeleted
    | RebalanceRecommended
    | AboveOverride
    | SpendExhausted
    | BootTimedOut
)
ReleaseReason = BootTimedOut | NodeLost | NodeOrphaned | GangAbandoned | SpendExhausted
KeepReason = DemandReturned | NoticeWithdrawn
DeferReason = (
    NoOfferFits
    | PodConstraintsViolated
    | OffersUnavailable
    | PriceUnknown
    | NodesLimit
    | GpusLimit
    | HourlyPriceLimit
    | SpendLimit
    | SpendEnforcementBlocked
    | Cooldown
    | Frozen
    | PoolPaused
    | OverrideReached
    | KeptByOverride
    | CapacityExpected
    | NotYetIdle
    | PodProtected
    | NodeProtected
    | PodsFitNowhere
    | WatchStale
    | DisruptionBudgetReached
    | BatchWindowOpen
    | GangIncomplete
    | GangPending
    | GangTimedOut
    | GangBackoff
    | SpotAwaited
    | SpotExcluded
    | MinimumReached
    | SavingTooSmall
    | TooManyUnhealthy
    | KeptAsBuffer
    | TelemetryUnreliable
    | UtilizationUnconfirmed
    | ForecastUncertain
    | ShapeReason
)
