"""The state of the cluster. Every field holds facts of one stream only.

Phases of nodes and states of jobs are computed when read, so the state does not depend on the order in which streams
arrive. Structs are frozen; `fold` replaces mappings and never changes them in place. Readers must not change them.
"""

from collections.abc import Mapping

import msgspec

from gpu_autoscaler.core.state.demand_history import DemandHistory
from gpu_autoscaler.core.state.node_shortfalls import ObservedAllocatable
from gpu_autoscaler.core.state.telemetry_history import NodeTelemetryHistory
from gpu_autoscaler.events import job, node, pod, policy, scaling, spot
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.forecasts import Score
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid, ProviderId
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped
from gpu_autoscaler.model.resources import Resources

Version = tuple[int, int]  # (epoch, version), comparable


class Tombstone(msgspec.Struct, frozen=True, gc=False):
    """A deleted entity. No observation up to this version restores it."""

    version: Version
    gone_at: Instant
    provider_id: ProviderId | None = None  # of a node: its instance
    lost: pod.PodGone | None = None  # of a pod of a job, deleted before it succeeded


class Usable(msgspec.Struct, frozen=True, gc=False):
    """The most GPUs that a node had while ready, and since when. It tells a lost node from one that never came up."""

    gpus: Resources  # GPUs and GPU slices only
    since: Instant


class Synced(msgspec.Struct, frozen=True, gc=False):
    """The last list of a source. None in its place: never listed, so nothing is known to be absent."""

    version: Version  # of the last list
    seen_at: Instant  # of the last list or bookmark


class JobRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """All facts about one job."""

    requested: job.JobRequested | None = None
    requested_at: Instant | None = None
    queued: job.JobQueued | None = None
    rejected: job.JobRejected | None = None
    rejected_at: Instant | None = None
    cancel_requested: job.JobCancelRequested | None = None
    placed: job.JobPlaced | None = None  # of the highest attempt
    preempted: job.JobPreempted | None = None  # of the highest attempt
    started: job.JobStarted | None = None  # of the highest version
    estimated: job.JobEstimated | None = None  # the first one
    scored: job.JobEstimateScored | None = None  # the first one
    finished: job.JobFinished | None = None  # the first one
    run_scored: job.JobEstimateScored | None = None  # the first one
    unknown_since: Instant | None = None  # first time that neither a request nor an acceptance was known
    completed_pods: tuple[PodUid, ...] = ()  # members that completed and whose pods are gone, sorted

    @property
    def completed_count(self) -> int:
        """Members that need no pod any more and have none: a Job creates no other in place of one that completed. Other
        runtimes may create all pods anew."""
        is_kept = self.queued is not None and self.queued.spec.runtime is Runtime.JOB
        return len(self.completed_pods) if is_kept else 0


class OrderRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A purchase from decision to confirmation. `decision` is None only if the plan has aged out."""

    action_id: ActionId
    plan_id: PlanId
    decision: BuyNode | None = None
    planned_at: Instant | None = None
    ordered: scaling.ScalingNodeOrdered | None = None
    launched: scaling.ScalingNodeLaunched | None = None
    refused: scaling.ScalingLaunchRefused | None = None
    terminated: scaling.ScalingNodeTerminated | None = None

    @property
    def purchase(self) -> BuyNode | scaling.ScalingNodeOrdered | None:
        """What was ordered, as decided; None: the decision and the order are unknown."""
        return self.decision or self.ordered


class DrainRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A removal from decision to confirmation: of a node (DrainNode) or of an instance (ReleaseInstance)."""

    action_id: ActionId
    plan_id: PlanId
    decision: DrainNode | ReleaseInstance | None = None
    planned_at: Instant | None = None
    started: scaling.ScalingDrainStarted | None = None
    evicted: Mapping[PodUid, scaling.ScalingPodEvicted] = {}
    drained: scaling.ScalingNodeDrained | None = None
    cancel: CancelDrain | None = None  # decided, not yet executed
    cancelled: scaling.ScalingDrainCancelled | None = None
    terminated: scaling.ScalingNodeTerminated | None = None


class SpotTerminations(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Spot instances of one type and zone that ended within one hour."""

    count: int = 0
    interrupted_count: int = 0  # of these by the cloud


class NoticeRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A notice with its earliest deadline."""

    notice: spot.SpotNoticeReceived  # the one with the earliest deadline
    first_received_at: Instant
    last_received_at: Instant
    withdrawn: spot.SpotNoticeWithdrawn | None = None

    @property
    def is_active(self) -> bool:
        """True unless the cloud withdrew the notice and has not repeated it since."""
        return self.withdrawn is None or self.last_received_at > self.withdrawn.withdrawn_at


class ReportedDemandRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Capacity that a source requests for work to come."""

    reported: DemandReported
    reported_at: Instant  # event time, set by the source
    sequence: int = 0  # sequence in the stream


class DirectiveRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A directive, and its withdrawal."""

    given: policy.PolicyDirectiveGiven
    lifted: policy.PolicyDirectiveLifted | None = None


class DurationGroup(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The last jobs of a group that completed, the newest last."""

    run_seconds: tuple[float, ...] = ()
    # Run time over `expected_duration_seconds` of the request, of jobs that named it.
    expectation_ratios: tuple[float, ...] = ()
    # |ln(run time / prediction from the history)|, also while predictions are silenced.
    log_errors: tuple[float, ...] = ()
    last_at: Instant


class Charge(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Up to when the ledger has charged an instance."""

    until_at: Instant  # end of the last charged span
    reported_at: Instant  # event time of the last span
    gaps: tuple[tuple[Instant, Instant], ...] = ()  # spans before that that have not arrived yet
    is_corrected: bool = False  # a refund arrived: the instance is charged to its end
    is_final: bool = False  # the instance has ended, and its last span arrived; a refund is such a span


class JobSpent(msgspec.Struct, frozen=True, gc=False):
    """Cost allocated to the members of a job so far, over all attempts."""

    micro_usd: int
    last_at: Instant


class GangRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A gang whose nodes were released because it could not be completed."""

    abandoned_count: int  # consecutive plans that abandoned it
    abandoned_at: Instant  # by the last of them


class RejectionRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the plan check refused, and when it may be decided again."""

    violation: str  # of the last time
    attempts_count: int  # without an hour between two of them
    retry_at: Instant


class UpkeepRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The last decision of an act of upkeep; what shows its effect are facts about the object."""

    attempts_count: int
    retry_at: Instant
    decided_at: Instant | None = None  # of the first attempt; None: recorded by an earlier release


class ClusterState(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The folded facts. Empty at the start. `core/state/lineage.py` keeps beside the fields what is derived of them."""

    # POD
    pods: Mapping[PodUid, pod.PodObserved] = {}
    pods_gone: Mapping[int, Mapping[PodUid, Tombstone]] = {}  # by hour since 1970; `core/state/tables.py` reads it
    pods_synced: Synced | None = None
    opted_in_namespaces: tuple[str, ...] = ()  # by label, to the end of idle workloads; as last listed or watched
    budgets: Mapping[str, pod.PodBudgetObserved] = {}
    budgets_gone: Mapping[int, Mapping[str, Tombstone]] = {}  # by hour since 1970
    budgets_synced: Synced | None = None
    quotas: Mapping[str, pod.PodQuotaObserved] = {}  # ResourceQuotas, by uid
    quotas_gone: Mapping[int, Mapping[str, Tombstone]] = {}  # by hour since 1970
    quotas_synced: Synced | None = None
    provisioning: Mapping[str, pod.PodProvisioningObserved] = {}  # ProvisioningRequests, by uid
    provisioning_gone: Mapping[int, Mapping[str, Tombstone]] = {}  # by hour since 1970
    provisioning_synced: Synced | None = None
    busy_until: Mapping[str, Instant] = {}  # by node name: last time that a workload pod was seen
    # NODE
    nodes: Mapping[NodeUid, node.NodeObserved] = {}
    nodes_gone: Mapping[int, Mapping[NodeUid, Tombstone]] = {}  # by hour since 1970
    nodes_synced: Synced | None = None
    instances: Mapping[ProviderId, node.NodeInstanceObserved] = {}
    instances_seen_at: Mapping[ProviderId, Instant] = {}  # last fact or list with the instance
    instances_listed_at: Instant | None = None
    usable: Mapping[NodeUid, Usable] = {}
    observed_allocatable: Mapping[str, ObservedAllocatable] = {}  # by pool and offer: of its last removed node
    unhealthy_since: Mapping[NodeUid, Instant] = {}  # not ready, or with fewer GPUs than before
    spot_terminations: Mapping[str, Mapping[int, SpotTerminations]] = {}  # by type and zone, then by hour since 1970
    # GPU
    telemetry: Mapping[NodeUid, GpuNodeSummarized] = {}  # the latest window of each node
    telemetry_history: Mapping[NodeUid, NodeTelemetryHistory] = {}  # of uninterrupted windows
    # SPOT
    notices: Mapping[str, NoticeRecord] = {}  # by notice id
    offers: spot.SpotOffersSampled | None = None
    rebalance_recommended_at: Mapping[ProviderId, Instant] = {}  # last rebalance recommendation
    # JOB
    jobs: Mapping[JobId, JobRecord] = {}
    durations: Mapping[str, DurationGroup] = {}  # by group of similar jobs: `core/state/duration_history.py`
    gpu_time: Mapping[str, Mapping[int, int]] = {}  # by owner, then by part of a day: `core/state/usage_history.py`
    # DEMAND
    reported_demand: Mapping[str, ReportedDemandRecord] = {}  # by source: the last report with a count
    # POLICY
    directives: Mapping[str, DirectiveRecord] = {}  # by key: the last one
    policy_changed: policy.PolicyChanged | None = None  # the last one
    brake_releases: Mapping[str, policy.PolicyDirectiveLifted] = {}  # by the trip of the brake that they end
    policy_documents: policy.PolicyDocumentsAccepted | None = None  # the last ones, see `core/policy/documents.py`
    # SCALING
    orders: Mapping[ActionId, OrderRecord] = {}
    drains: Mapping[ActionId, DrainRecord] = {}
    gangs: Mapping[str, GangRecord] = {}  # by key of the gang: job/<id> or group/<namespace>/<name>
    rejections: Mapping[str, RejectionRecord] = {}  # by subject, see `model/decisions.py: rejection_subjects`
    upkeep: Mapping[str, UpkeepRecord] = {}  # by key of the act, see `core/state/upkeep_attempts.py`
    brake: BrakeTripped | None = None  # of the last plan; `core/state/forced_removals.py` reads it
    last_plan_sequence: int = 0
    last_plan_at: Instant | None = None
    demand_history: Mapping[str, DemandHistory] = {}  # by GPU model, or any
    forecast_scores: Mapping[str, tuple[Score, ...]] = {}  # by GPU model, or any; oldest hour first
    restored_at: Instant | None = None  # when decisions of a lost stream were restored
    # COST
    spent: Mapping[str, Mapping[str, int]] = {}  # by UTC day or month, then by owner: micro-dollars
    charges: Mapping[ProviderId, Charge] = {}
    spent_by_job: Mapping[JobId, JobSpent] = {}
    ledger_reported_at: Instant | None = None  # None: earlier charges are unknown
    # Newest instant of each domain: ages are measured within a stream, never by a clock.
    newest: Mapping[str, Instant] = {}


EMPTY_STATE = ClusterState()
