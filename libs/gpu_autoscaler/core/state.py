"""What is known of the cluster, each stream's word in fields of that stream's own.

Nothing here is computed across streams: a node's phase, a job's state, a pod's need are computed when read
(`core/nodes/life.py`, `core/views.py`). That is what makes `fold` indifferent to the order in which streams arrive.
Structs are frozen; the mappings are replaced by `fold`, never changed in place, and readers must not change them.
"""

from collections.abc import Mapping

import msgspec

from gpu_autoscaler.core.rises import DemandHistory
from gpu_autoscaler.core.shortfalls import ObservedAllocatable
from gpu_autoscaler.core.trails import NodeTelemetryHistory
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.events.job import (
    JobCancelRequested,
    JobEstimated,
    JobEstimateScored,
    JobFinished,
    JobPlaced,
    JobPreempted,
    JobQueued,
    JobRejected,
    JobRequested,
    JobStarted,
)
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.pod import PodBudgetObserved, PodGone, PodObserved
from gpu_autoscaler.events.policy import (
    PolicyChanged,
    PolicyDirectiveGiven,
    PolicyDirectiveLifted,
    PolicyDocumentsAccepted,
)
from gpu_autoscaler.events.scaling import (
    ScalingDrainCancelled,
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeTerminated,
    ScalingPodEvicted,
)
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn, SpotOffersSampled
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.forecasts import Score
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources

Version = tuple[int, int]  # (epoch, version): compares as the source counts


class Tombstone(msgspec.Struct, frozen=True, gc=False):
    """An entity that is gone: nothing older than this version brings it back."""

    version: Version
    gone_at: Instant
    provider_id: ProviderId | None = None  # of a node: the instance that it leaves behind
    lost: PodGone | None = None  # of a job's pod that was seen to go before it had succeeded


class Usable(msgspec.Struct, frozen=True, gc=False):
    """The most GPUs that a node ever offered while ready, and since when. Remembered, so that a node that falls
    silent is told from one that never came up."""

    gpus: Resources  # whole GPUs and parts of GPUs, nothing else
    since: Instant


class Synced(msgspec.Struct, frozen=True, gc=False):
    """How complete and how fresh a source's picture is. None in its place: never listed, so nothing is known absent."""

    version: Version  # of the last whole list
    seen_at: Instant  # last sign of life: list or bookmark


class JobRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Everything that was said about one job."""

    requested: JobRequested | None = None
    requested_at: Instant | None = None
    queued: JobQueued | None = None
    rejected: JobRejected | None = None
    rejected_at: Instant | None = None
    cancel_requested: JobCancelRequested | None = None
    placed: JobPlaced | None = None  # of the highest attempt
    preempted: JobPreempted | None = None  # of the highest attempt
    started: JobStarted | None = None  # of the highest version
    estimated: JobEstimated | None = None  # the first one
    scored: JobEstimateScored | None = None  # the same
    finished: JobFinished | None = None  # the first one: a job ends once
    unknown_since: Instant | None = None  # when it was first found that nobody had asked for, nor accepted, such a job


class OrderRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A purchase from decision to confirmation. `decision` is None only where the plan itself has aged out."""

    action_id: ActionId
    plan_id: PlanId
    decision: BuyNode | None = None
    planned_at: Instant | None = None
    ordered: ScalingNodeOrdered | None = None
    launched: ScalingNodeLaunched | None = None
    refused: ScalingLaunchRefused | None = None
    terminated: ScalingNodeTerminated | None = None


class DrainRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A removal from decision to confirmation: of a node (DrainNode) or of an instance (ReleaseInstance)."""

    action_id: ActionId
    plan_id: PlanId
    decision: DrainNode | ReleaseInstance | None = None
    planned_at: Instant | None = None
    started: ScalingDrainStarted | None = None
    evicted: Mapping[PodUid, ScalingPodEvicted] = {}
    drained: ScalingNodeDrained | None = None
    cancel: CancelDrain | None = None  # decided, not yet done
    cancelled: ScalingDrainCancelled | None = None
    terminated: ScalingNodeTerminated | None = None


class SpotTerminations(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Spot instances of one type and zone that ended within one hour."""

    count: int = 0
    taken_count: int = 0  # by the cloud, not by us


class NoticeRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A notice with its earliest deadline."""

    notice: SpotNoticeReceived  # the one with the earliest deadline
    first_received_at: Instant
    last_received_at: Instant
    withdrawn: SpotNoticeWithdrawn | None = None

    @property
    def is_active(self) -> bool:
        """True unless the cloud took the notice back and has not said it again since."""
        return self.withdrawn is None or self.last_received_at > self.withdrawn.withdrawn_at


class ReportedDemandRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Room that somebody wants to be free."""

    reported: DemandReported
    reported_at: Instant  # as who said it says
    sequence: int = 0  # its place in the stream


class DirectiveRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What somebody overrules, and whether they took it back."""

    given: PolicyDirectiveGiven
    lifted: PolicyDirectiveLifted | None = None


class Charge(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How far the ledger has charged an instance."""

    until_at: Instant  # nothing is charged after this
    reported_at: Instant  # when the last span was told
    gaps: tuple[tuple[Instant, Instant], ...] = ()  # before that: spans that have not been heard of yet
    is_corrected: bool = False  # too much was charged, and given back: the instance is paid to its end


class JobSpent(msgspec.Struct, frozen=True, gc=False):
    """What a job's members were allocated of nodes' cost so far, over all attempts."""

    micro_usd: int
    last_at: Instant


class GangRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A gang for which nodes were bought and given back, because it could not be completed."""

    abandoned_count: int  # plans that gave it up, one after the other
    abandoned_at: Instant  # by the last of them


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """All that the record says, folded. Empty to begin with."""

    # POD
    pods: Mapping[PodUid, PodObserved] = {}
    pods_gone: Mapping[int, Mapping[PodUid, Tombstone]] = {}  # by hour since 1970; `core/folding/graves.py` reads it
    pods_synced: Synced | None = None
    budgets: Mapping[str, PodBudgetObserved] = {}
    budgets_gone: Mapping[int, Mapping[str, Tombstone]] = {}  # the same
    budgets_synced: Synced | None = None
    busy_until: Mapping[str, Instant] = {}  # node name: last instant at which a pod that counts was seen there
    # NODE
    nodes: Mapping[NodeUid, NodeObserved] = {}
    nodes_gone: Mapping[int, Mapping[NodeUid, Tombstone]] = {}  # the same
    nodes_synced: Synced | None = None
    instances: Mapping[ProviderId, NodeInstanceObserved] = {}
    instances_seen_at: Mapping[ProviderId, Instant] = {}  # the last word or list that had the instance
    instances_listed_at: Instant | None = None
    usable: Mapping[NodeUid, Usable] = {}
    observed_allocatable: Mapping[str, ObservedAllocatable] = {}  # by offer in its pool: what the last node of it had that went again
    unhealthy_since: Mapping[NodeUid, Instant] = {}  # not ready, or with fewer GPUs than it has offered
    spot_terminations: Mapping[str, Mapping[int, SpotTerminations]] = {}  # by type and zone, then by hour since 1970
    # GPU
    telemetry: Mapping[NodeUid, GpuNodeSummarised] = {}  # the latest window of each node
    telemetry_history: Mapping[NodeUid, NodeTelemetryHistory] = {}  # what its windows said without a break
    # SPOT
    notices: Mapping[str, NoticeRecord] = {}  # by notice id
    offers: SpotOffersSampled | None = None
    rebalance_recommended_at: Mapping[ProviderId, Instant] = {}  # when the cloud said last that it is likelier to take the instance
    # JOB
    jobs: Mapping[JobId, JobRecord] = {}
    # DEMAND
    reported_demand: Mapping[str, ReportedDemandRecord] = {}  # by source: the last one with a count
    # POLICY
    directives: Mapping[str, DirectiveRecord] = {}  # by key: the last word
    policy_changed: PolicyChanged | None = None  # the last one
    policy_documents: PolicyDocumentsAccepted | None = None  # the last ones; `core/documents.py` merges them
    # SCALING
    orders: Mapping[ActionId, OrderRecord] = {}
    drains: Mapping[ActionId, DrainRecord] = {}
    gangs: Mapping[str, GangRecord] = {}  # by key of the gang: job/<id> or group/<namespace>/<name>
    last_plan_sequence: int = 0
    last_plan_at: Instant | None = None
    demand_history: Mapping[str, DemandHistory] = {}  # by GPU model, or any
    forecast_scores: Mapping[str, tuple[Score, ...]] = {}  # the same; oldest hour first
    restored_at: Instant | None = None  # when the stream began anew, and what was open before was told
    # COST
    spent: Mapping[str, Mapping[str, int]] = {}  # by day or month of UTC, then by owner: micro-dollars charged
    charges: Mapping[ProviderId, Charge] = {}
    spent_by_job: Mapping[JobId, JobSpent] = {}
    ledger_reported_at: Instant | None = None  # None: nobody said what was charged before, which is not nothing
    # The newest instant of each domain: how old a tombstone is, is told by its own stream, never by a clock.
    newest: Mapping[str, Instant] = {}


EMPTY_STATE = ClusterState()
