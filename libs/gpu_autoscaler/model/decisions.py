"""What a plan decides and what it defers.

A decision carries everything its executor needs: executors choose nothing.
"""

from abc import abstractmethod
from typing import Literal, get_args

import msgspec

from gpu_autoscaler.model.demands import ProvisioningConditionType
from gpu_autoscaler.model.format import instant, listed, price, subject_name
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.buy import BuyReason, ReplacesAtRiskNode, UnmetDemand
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped
from gpu_autoscaler.model.reasons.drain import DrainReason, KeepReason, ReleaseReason
from gpu_autoscaler.model.reasons.preempt import PreemptReason
from gpu_autoscaler.model.reasons.upkeep import (
    AnswerReason,
    CheaperToEmpty,
    CheckpointDue,
    DeletedByKarpenter,
    FinalizerMissing,
    FinalizerUnneeded,
    InstanceGone,
    JobIdle,
    QuotaUnused,
    ReservationEnding,
    TaintUnneeded,
    WorkloadIdle,
)
from gpu_autoscaler.model.resources import Resources, Slices
from gpu_autoscaler.model.scheduling import Taint


class Decision(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="decision"):
    """Base of all decisions. `action_id` is the token that makes a repeated execution harmless."""

    action_id: ActionId

    @abstractmethod
    def sentence(self) -> str:
        """Return what is decided and why."""


class BuyNode(Decision, frozen=True, kw_only=True, tag="buy_node"):
    """Order one node of this offer; it counts as capacity and against limits from now on."""

    pool: str
    offer: Offer
    labels: tuple[tuple[str, str], ...]  # sorted by key; what the node must carry when it registers, its project too
    taints: tuple[Taint, ...]
    deadline_at: Instant  # not usable by then: released
    reason: BuyReason
    gang: str | None = None  # purchases of one gang are completed or abandoned together; None: of no gang
    slices: Slices = ()  # what the node's GPUs are to be cut into, all of them; none: they stay whole
    work_seconds_max: float | None = None  # how long the work it is for may take at most; None: unknown
    startup_taints: tuple[Taint, ...] = ()  # it registers with these as well; they are removed before it is usable
    # All have one shape, and are launched together where the cloud can: all of them or none.
    transaction: ActionId | None = None  # first of the purchases that are launched together; None: launched alone

    @property
    def promised(self) -> Resources:
        """What the node is to hold for pods."""
        return self.offer.cut_into(self.slices)

    @property
    def spread_micro_usd_per_hour(self) -> int:
        """What it costs more than the offer that was not selected for the share of its capacity pool; 0: not bought
        for that."""
        instead_of = self.reason.instead_of if isinstance(self.reason, (UnmetDemand, ReplacesAtRiskNode)) else None
        price_micro_usd_per_hour = self.offer.price_micro_usd_per_hour
        if instead_of is None or price_micro_usd_per_hour is None:
            return 0
        return instead_of.spread_micro_usd_per_hour(price_micro_usd_per_hour)

    def sentence(self) -> str:
        offer = self.offer
        node = f"{offer.instance_type} in {offer.zone} as {offer.capacity_type}"
        gang = f", together with the other nodes of {subject_name(self.gang)}" if self.gang else ""
        at = price(offer.price_micro_usd_per_hour)
        return f"Buy {node} for pool {self.pool} at {at}{gang}. {self.reason.sentence()}"


class ForcedRemoval(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Marks a removal that ends work against its will, and that neither the cloud nor a user caused."""

    price_micro_usd_per_hour: int | None  # of the node; the highest known one if unknown; None: none is known


class DrainNode(Decision, frozen=True, kw_only=True, tag="drain_node"):
    """Cordon the node, evict its pods, then terminate its instance."""

    node_uid: NodeUid
    node_name: str
    provider_id: ProviderId | None  # None: not ours to terminate
    is_voluntary: bool  # voluntary drains stop at budgets and protections; others force at the deadline
    deadline_at: Instant  # pods that are left are deleted then; a voluntary drain is abandoned
    reason: DrainReason
    forced: ForcedRemoval | None = None  # None: the brake does not count it

    def sentence(self) -> str:
        kind = "Voluntary" if self.is_voluntary else "Forced"
        deadline = instant(self.deadline_at)
        return f"{kind} drain of node {self.node_name} by {deadline}. {self.reason.sentence()}"


class CancelDrain(Decision, frozen=True, kw_only=True, tag="cancel_drain"):
    """Uncordon the node and leave its pods alone."""

    drain_action_id: ActionId
    node_uid: NodeUid
    node_name: str
    reason: KeepReason

    def sentence(self) -> str:
        return f"Cancel the drain of node {self.node_name}. {self.reason.sentence()}"


class ReleaseInstance(Decision, frozen=True, kw_only=True, tag="release_instance"):
    """Terminate an instance that never became a usable node, or that no decision accounts for."""

    provider_id: ProviderId | None  # None: find it by its order
    order_action_id: ActionId  # of its order, which its tag names
    reason: ReleaseReason
    forced: ForcedRemoval | None = None  # None: the brake does not count it

    def sentence(self) -> str:
        order = f"order {self.order_action_id}"
        instance = order if self.provider_id is None else f"instance {self.provider_id} ({order})"
        return f"Release {instance}. {self.reason.sentence()}"


AnyDecision = BuyNode | DrainNode | CancelDrain | ReleaseInstance


# ---- upkeep: acts that buy and remove no capacity


class UpkeepDecision(Decision, frozen=True, kw_only=True):
    """Base of the acts of upkeep. An act without effect is decided again, each time after a longer wait."""

    retry_at: Instant  # without an effect by then it is decided again, so it is not begun after that
    attempts_count: int = 1  # with this one

    @property
    @abstractmethod
    def subject(self) -> str:
        """Key of the object: node/<uid>, job/<id>, instance/<provider id>, provisioning/<uid>/<reason>."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """Keys of all objects that it is about."""
        return (self.subject,)

    @property
    def occasion(self) -> str:
        """What tells an act from an earlier one on the same object that had its effect; empty: nothing does."""
        return ""

    @property
    def key(self) -> str:
        """Name of the act, by which attempts are counted and it is set aside."""
        return upkeep_key(self.tag(), self.subject, self.occasion)

    @classmethod
    def tag(cls) -> str:
        """The name of the kind on the wire."""
        return str(cls.__struct_config__.tag)


def upkeep_key(tag: str, subject: str, occasion: str = "") -> str:
    """Return the name of an act of this kind on this object."""
    return f"upkeep/{tag}/{subject}/{occasion}" if occasion else f"upkeep/{tag}/{subject}"


class _NodeUpkeep(UpkeepDecision, frozen=True, kw_only=True):
    """Base of acts on a node object that is known by its uid and name."""

    node_uid: NodeUid
    node_name: str

    @property
    def subject(self) -> str:
        return f"node/{self.node_uid}"


class _JobUpkeep(UpkeepDecision, frozen=True, kw_only=True):
    """Base of acts on a job."""

    job_id: JobId

    @property
    def subject(self) -> str:
        return f"job/{self.job_id}"


class _AttemptUpkeep(_JobUpkeep, frozen=True, kw_only=True):
    """Base of acts that are due once for each attempt of a job."""

    attempt: int  # last attempt of the job; 0: it has not been placed

    @property
    def occasion(self) -> str:
        return str(self.attempt)


class RemoveOrphanedNode(_NodeUpkeep, frozen=True, kw_only=True, tag="remove_orphaned_node"):
    """Delete the node object, once the cloud has confirmed twice that its instance is terminated."""

    provider_id: ProviderId
    reason: InstanceGone

    def sentence(self) -> str:
        return f"Remove node object {self.node_name} if the cloud confirms the end. {self.reason.sentence()}"


class AddFinalizer(_NodeUpkeep, frozen=True, kw_only=True, tag="add_finalizer"):
    """Add our finalizer to the node; those of others are kept."""

    reason: FinalizerMissing

    def sentence(self) -> str:
        return f"Add our finalizer to node {self.node_name}. {self.reason.sentence()}"


class RemoveFinalizer(_NodeUpkeep, frozen=True, kw_only=True, tag="remove_finalizer"):
    """Remove our finalizer from the node; those of others are kept."""

    reason: FinalizerUnneeded

    def sentence(self) -> str:
        return f"Remove our finalizer from node {self.node_name}. {self.reason.sentence()}"


class AvoidNode(_NodeUpkeep, frozen=True, kw_only=True, tag="avoid_node"):
    """Add our taint `PreferNoSchedule` to the node, so that it becomes empty; its pods stay."""

    reason: CheaperToEmpty

    def sentence(self) -> str:
        return f"Let new pods avoid node {self.node_name} where they can. {self.reason.sentence()}"


class OpenNode(_NodeUpkeep, frozen=True, kw_only=True, tag="open_node"):
    """Remove our taint `PreferNoSchedule` from the node; the taints of others are kept."""

    reason: TaintUnneeded

    def sentence(self) -> str:
        return f"Let new pods use node {self.node_name} like others. {self.reason.sentence()}"


class RequestCheckpoints(_NodeUpkeep, frozen=True, kw_only=True, tag="request_checkpoints"):
    """Ask every pod on the node that has not been asked since `since` to save a checkpoint; evict none."""

    since: Instant  # pods that were asked since then are not asked again
    reason: DeletedByKarpenter

    def sentence(self) -> str:
        return f"Ask the pods on node {self.node_name} to save a checkpoint. {self.reason.sentence()}"


class RequestJobCheckpoint(_JobUpkeep, frozen=True, kw_only=True, tag="request_job_checkpoint"):
    """Ask the job's pods on these nodes that save on request to save a checkpoint by `retry_at`; evict none."""

    node_names: tuple[str, ...]  # sorted
    since: Instant  # its last save, or the start of its attempt
    requested_at: Instant
    reason: CheckpointDue

    @property
    def deadline_at(self) -> Instant:
        """Until when the pods may save."""
        return self.retry_at

    @property
    def occasion(self) -> str:
        return self.since.isoformat()

    def sentence(self) -> str:
        return f"Ask job {self.job_id} to save a checkpoint by {instant(self.retry_at)}. {self.reason.sentence()}"


class RequestPreemptionCheckpoint(_AttemptUpkeep, frozen=True, kw_only=True, tag="request_preemption_checkpoint"):
    """Ask the job's pods on these nodes that save on request to save a checkpoint by `deadline_at`; then the scheduler
    ends this attempt as a whole. Evict none."""

    node_names: tuple[str, ...]  # sorted
    requested_at: Instant
    deadline_at: Instant  # a later save is not waited for
    reason: PreemptReason

    def sentence(self) -> str:
        deadline = instant(self.deadline_at)
        return f"Ask job {self.job_id} to save by {deadline}, before its attempt ends. {self.reason.sentence()}"


class RequeueJob(_AttemptUpkeep, frozen=True, kw_only=True, tag="requeue_job"):
    """Until `retry_at` all others take quota before the queued job, and it reclaims none: they use what it cannot."""

    reason: QuotaUnused

    def sentence(self) -> str:
        until = instant(self.retry_at)
        return f"Requeue job {self.job_id}: others take quota first until {until}. {self.reason.sentence()}"


class CancelIdleJob(_JobUpkeep, frozen=True, kw_only=True, tag="cancel_idle_job"):
    """Request the cancellation of the job."""

    reason: JobIdle

    def sentence(self) -> str:
        return f"Cancel job {self.job_id}. {self.reason.sentence()}"


class WorkloadPod(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A pod of an idle job or workload."""

    name: str
    pod_uid: PodUid


class AnnounceIdleJob(_JobUpkeep, frozen=True, kw_only=True, tag="announce_idle_job"):
    """Annotate the job's pods with the time of the announcement: if they stay idle, it is canceled after the grace."""

    namespace: str
    pods: tuple[WorkloadPod, ...]  # with GPUs, ordered by uid
    announced_at: Instant
    ends_at: Instant
    reason: JobIdle

    def sentence(self) -> str:
        return f"Announce the end of job {self.job_id} at {instant(self.ends_at)}. {self.reason.sentence()}"


class _IdleWorkload(UpkeepDecision, frozen=True, kw_only=True):
    """Base of acts on a workload that is not of our queue."""

    namespace: str
    pods: tuple[WorkloadPod, ...]  # of one owner, ordered by uid
    reason: WorkloadIdle

    @property
    def subject(self) -> str:
        return f"pod/{self.pods[0].pod_uid}"

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(f"pod/{pod.pod_uid}" for pod in self.pods)

    @property
    def _names(self) -> str:
        return listed([f"{self.namespace}/{pod.name}" for pod in self.pods])


class AnnounceIdleWorkload(_IdleWorkload, frozen=True, kw_only=True, tag="announce_idle_workload"):
    """Annotate the pods with the time of the announcement: if they stay idle, their workload ends after the grace."""

    announced_at: Instant
    ends_at: Instant

    def sentence(self) -> str:
        return f"Announce the end of {self._names} at {instant(self.ends_at)}. {self.reason.sentence()}"


OwnerKind = Literal["Job", "ReplicaSet", "StatefulSet"]
OWNER_KINDS: tuple[OwnerKind, ...] = get_args(OwnerKind)  # through which a workload is ended


class EndIdleWorkload(_IdleWorkload, frozen=True, kw_only=True, tag="end_idle_workload"):
    """End the workload through the object that owns its pods; a pod without an owner is deleted."""

    owner_kind: OwnerKind | None  # None: no owner
    owner_uid: str = ""  # UID of the object that owns the pods; empty: no owner

    def sentence(self) -> str:
        return f"End {self._names} through its owner. {self.reason.sentence()}"


class AnnounceReservationEnd(UpkeepDecision, frozen=True, kw_only=True, tag="announce_reservation_end"):
    """Publish the end of the paid reservation as an interruption notice, so that the next plan drains the node."""

    provider_id: ProviderId
    reclaim_at: Instant
    reason: ReservationEnding

    @property
    def subject(self) -> str:
        return f"instance/{self.provider_id}"

    def sentence(self) -> str:
        return f"Publish a notice for instance {self.provider_id}. {self.reason.sentence()}"


class AnswerProvisioningRequest(UpkeepDecision, frozen=True, kw_only=True, tag="answer_provisioning_request"):
    """Set one condition in the status of a ProvisioningRequest."""

    request_uid: str
    namespace: str
    name: str
    condition: ProvisioningConditionType  # name of the condition
    is_true: bool
    code: str  # the condition's reason, as cluster-autoscaler names it where it has a name for it
    at: Instant  # its transition; the booking counts from here
    reason: AnswerReason

    @property
    def subject(self) -> str:
        """Each answer is an act of its own, so that none waits for the back-off of another."""
        return f"provisioning/{self.request_uid}/{self.reason.tag()}"

    def sentence(self) -> str:
        what = f"{self.condition}={self.is_true}"
        return f"Set {what} on ProvisioningRequest {self.namespace}/{self.name}. {self.reason.sentence()}"


AnyUpkeep = (
    RemoveOrphanedNode
    | AddFinalizer
    | RemoveFinalizer
    | AvoidNode
    | OpenNode
    | RequestCheckpoints
    | RequestJobCheckpoint
    | RequestPreemptionCheckpoint
    | RequeueJob
    | CancelIdleJob
    | AnswerProvisioningRequest
    | AnnounceIdleJob
    | AnnounceIdleWorkload
    | EndIdleWorkload
    | AnnounceReservationEnd
)


class DeferredUpkeep(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Acts of one kind that the plan does not decide now, for one reason."""

    decision: str  # tag of the act
    reason: DeferReason  # of the first object
    objects_count: int
    subjects: tuple[str, ...]  # the first ones, sorted: at most 64

    def each(self) -> "tuple[Deferred, ...]":
        """Return the deferral of each object that is named."""
        return tuple(Deferred(step=self.decision, subject=subject, reason=self.reason) for subject in self.subjects)


class Upkeep(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The acts of one plan that buy and remove no capacity, and those that it defers."""

    decisions: tuple[AnyUpkeep, ...] = ()
    deferred: tuple[DeferredUpkeep, ...] = ()  # acts that wait, each with its reason


NO_UPKEEP = Upkeep()


class PastDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of a plan that the stream no longer has."""

    decision: AnyDecision  # as the plan had it
    plan_id: PlanId
    planned_at: Instant
    is_only_counted: bool = False  # may be an instance or not: counts until it shows or is late; not restarted


class Deferred(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something the plan does not do now, with the step that deferred it and why."""

    step: str  # name of the step of `plan`, e.g. cover_demand
    subject: str  # job/<id>, pod/<uid>, node/<uid>, or cluster
    reason: DeferReason

    def sentence(self) -> str:
        """Return what is deferred, in which step, and why."""
        return f"Deferred for {subject_name(self.subject)} (step {self.step}): {self.reason.sentence()}"


class Rejection(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the plan check refused while the plan was made, and until when it is set aside: it is not decided again."""

    violation: str  # the violated rule, in words
    subjects: tuple[str, ...]  # as `rejection_subjects` names them
    retry_at: Instant


# Before the subject of a drain that a notice or a deletion forces: it is set aside for one plan only.
FORCED = "forced/"


def rejection_subjects(decision: AnyDecision | AnyUpkeep) -> tuple[str, ...]:
    """Return under which names a decision is set aside: its demand and gang, else its pool; its node, or its order."""
    match decision:
        case UpkeepDecision():
            return (decision.key,)
        case BuyNode():
            work = getattr(decision.reason, "demand", ()) or (f"pool/{decision.pool}",)
            return work if decision.gang is None or decision.gang in work else (*work, decision.gang)
        case ReleaseInstance():
            return (f"action/{decision.order_action_id}",)
        case _:
            return (f"node/{decision.node_uid}",)


class DeferredGroup(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Objects of one kind and shape that a step of the plan deferred for one reason (`core/deferred_groups.py`)."""

    step: str
    kind: str  # of the subjects: job, pod, member, node, ...
    reason: DeferReason
    objects_count: int
    gpu_count: int = 0  # of all objects: requested by work, of nodes
    shape: str = ""  # in words: "8 GPUs (A100), 96 CPUs, 512 GiB"; empty: none, or different ones
    subjects: tuple[str, ...] = ()  # the first three, sorted; all of them if the state does not have such objects
    # Digests of the other members, base64. Empty also for the largest group of a shape, which has what no other has.
    members: str = ""
    reasons_count: int = 1  # reasons that differ in their values alone; `reason` is that of the first object


class Plan(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the cluster should become, and why. Equal facts and policy give an equal plan, byte for byte."""

    as_of: Instant
    parent_sequence: int  # stream sequence of the previous plan; 0: none
    decisions: tuple[AnyDecision, ...] = ()
    deferred: tuple[Deferred, ...] = ()  # as planned, and in plans of 0.2; a published plan has groups instead
    deferred_groups: tuple[DeferredGroup, ...] = ()  # what the plan defers, grouped by step and reason
    deferred_unlisted: tuple[tuple[str, int], ...] = ()  # reason tag -> objects in no group, sorted
    rejected: tuple[Rejection, ...] = ()  # set aside by this plan; earlier rejections are in the state
    brake: BrakeTripped | None = None  # as long as it holds, in each plan; None: it has not tripped, or was resumed
    # Apart from `decisions`: releases up to 0.2 refuse plans with kinds of decisions that they do not know.
    upkeep: Upkeep | None = None  # acts that buy and remove nothing; None: of a release that recorded none

    @property
    def purchases(self) -> list[BuyNode]:
        return [decision for decision in self.decisions if isinstance(decision, BuyNode)]

    @property
    def drains(self) -> list[DrainNode]:
        return [decision for decision in self.decisions if isinstance(decision, DrainNode)]

    @property
    def releases(self) -> list[ReleaseInstance]:
        return [decision for decision in self.decisions if isinstance(decision, ReleaseInstance)]

    @property
    def upkeep_decisions(self) -> tuple[AnyUpkeep, ...]:
        """The acts of upkeep; empty also for a plan without a record of them."""
        return () if self.upkeep is None else self.upkeep.decisions

    @property
    def upkeep_deferred(self) -> tuple[DeferredUpkeep, ...]:
        """The deferred acts of upkeep; empty also for a plan without a record of them."""
        return () if self.upkeep is None else self.upkeep.deferred


class Side(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one of two plans decides about a subject."""

    what: str  # tag of the decision, `deferred`, or `nothing`
    reason: str = ""  # tag of its reason; empty: none was given
    sentence: str = ""  # decision and reason for people


class Difference(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One subject about which two plans of one state decide differently."""

    subject: str  # job/<id>, pod/<uid>, node/<uid>, order/<action id>, or cluster
    name: str  # the same with the object's name, where it is known
    made: Side  # what the first plan decides
    other: Side  # what the second plan decides

    @property
    def is_decision(self) -> bool:
        """False where both do nothing, for different reasons."""
        return not {self.made.what, self.other.what} <= NO_DECISION

    @property
    def kind(self) -> str:
        """What many differences share: `buy_node (unmet_demand) -> deferred (nodes_limit)`."""
        return " -> ".join(
            f"{side.what} ({side.reason})" if side.reason else side.what for side in (self.made, self.other)
        )


NO_DECISION = frozenset({"deferred", "nothing"})


class Cut(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The facts a state was folded from: the last sequence of each stream, and the dead letters among them."""

    last_sequences: tuple[tuple[str, int], ...] = ()  # (stream, sequence), sorted by stream
    set_aside: tuple[tuple[str, int], ...] = ()  # (stream, sequence) of dead letters
    base: str = ""  # checksum of the snapshot of another version that it continues; empty: one version folded all
