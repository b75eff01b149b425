"""Why a plan decides an act of upkeep, and why it defers one."""

from typing import Literal

from gpu_autoscaler.model import labels
from gpu_autoscaler.model.format import counted, duration, instant, percent, price
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.base import Reason, ReasonWithoutRemedy

# ---- why it is decided


class InstanceGone(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="instance_gone"):
    """The instance of the node has ended, and nothing else has removed the node object."""

    gone_since: Instant  # since when the instance has ended and the node is not ready

    def sentence(self) -> str:
        return f"The instance of the node has ended, and the node has not been ready since {instant(self.gone_since)}."


class FinalizerMissing(Reason, frozen=True, kw_only=True, tag="finalizer_missing"):
    """The node is ours and lacks the finalizer that lets it be drained when its object is deleted by hand."""

    def sentence(self) -> str:
        return "The node lacks our finalizer: if its object were deleted by hand, its pods would be killed at once."

    def remedy(self) -> str:
        return "To use no finalizers, set removal.is_finalizer_on to false."


class FinalizerUnneeded(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="finalizer_unneeded"):
    """The node has our finalizer, and must not keep it."""

    cause: Literal["instance_ended", "policy", "karpenter"]  # why it must not

    def sentence(self) -> str:
        return {
            "instance_ended": "The node object is deleted and its instance has ended.",
            "policy": "The policy uses no finalizers.",
            "karpenter": "Karpenter manages the node and drains it itself.",
        }[self.cause]


class CheaperToEmpty(Reason, frozen=True, kw_only=True, tag="cheaper_to_empty"):
    """Other nodes with free GPUs cost less for each workload on them, with one more."""

    node_micro_usd_per_hour: int  # price of the node, shared by its workloads and one more
    open_micro_usd_per_hour: int  # likewise, of the most expensive node that stays open to new pods

    def sentence(self) -> str:
        here, there = price(self.node_micro_usd_per_hour), price(self.open_micro_usd_per_hour)
        return f"With one more workload, each costs {here} here, and at most {there} on the nodes that stay open."

    def remedy(self) -> str:
        return "To let pods avoid no nodes, set removal.is_avoid_taint_on to false."


class TaintUnneeded(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="taint_unneeded"):
    """The node has our taint, and need not keep it."""

    cause: Literal["cheapest", "no_pods", "policy"]  # why they need not

    def sentence(self) -> str:
        return {
            "cheapest": "It is among the nodes with free GPUs where one more workload costs least.",
            "no_pods": "No pod with GPUs is left that does not tolerate the taint.",
            "policy": "The policy lets pods avoid no nodes.",
        }[self.cause]


class DeletedByKarpenter(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="deleted_by_karpenter"):
    """Karpenter deletes the node and evicts its pods at once; some have not been asked to save a checkpoint."""

    deleted_at: Instant

    def sentence(self) -> str:
        return f"Karpenter has been deleting the node since {instant(self.deleted_at)}; its pods are evicted at once."


class JobIdle(Reason, frozen=True, kw_only=True, tag="job_idle"):
    """Every GPU of the job was idle for longer than the policy allows."""

    idle_seconds: float
    idle_seconds_max: float
    busy_ratio_max: float
    announced_at: Instant | None = None  # None: it is announced now, or an earlier release canceled it

    def note(self) -> str:
        """Return the cause in the words of the cancellation."""
        return f"its GPU utilization was at most {percent(self.busy_ratio_max)} for {duration(self.idle_seconds)}"

    def sentence(self) -> str:
        announced = "" if self.announced_at is None else f" It was announced at {instant(self.announced_at)}."
        limit = duration(self.idle_seconds_max)
        return f"The job holds GPUs and leaves them idle: {self.note()} (limit: {limit}).{announced}"

    def remedy(self) -> str:
        return f"To keep a job, annotate its pods {labels.IDLE_ALLOWED}=true, or raise idle_jobs.idle_seconds."


class WorkloadIdle(Reason, frozen=True, kw_only=True, tag="workload_idle"):
    """Every GPU of the workload, in an opted-in namespace, was idle for longer than the policy allows."""

    idle_seconds: float
    idle_seconds_max: float
    busy_ratio_max: float
    announced_at: Instant | None = None  # None: it is announced now

    def sentence(self) -> str:
        used = f"its GPU utilization was at most {percent(self.busy_ratio_max)} for {duration(self.idle_seconds)}"
        announced = "" if self.announced_at is None else f" It was announced at {instant(self.announced_at)}."
        limit = duration(self.idle_seconds_max)
        return f"The workload holds GPUs and leaves them idle: {used} (limit: {limit}).{announced}"

    def remedy(self) -> str:
        return (
            f"To keep a workload, annotate its pods {labels.IDLE_ALLOWED}=true. Its namespace opted in by "
            f"idle_jobs.namespaces or by the label {labels.END_IDLE_WORKLOADS}."
        )


class CheckpointDue(Reason, frozen=True, kw_only=True, tag="checkpoint_due"):
    """The job has not saved a checkpoint for an interval."""

    last_saved_at: Instant | None  # None: not since its attempt began
    interval_seconds: float  # time between two saves
    save_seconds: float | None = None  # measured; None: the interval is not computed
    interruption_seconds: float | None = None  # measured mean time until its nodes are interrupted; None: not computed

    def sentence(self) -> str:
        saved = "has not saved" if self.last_saved_at is None else f"last saved at {instant(self.last_saved_at)}"
        figures = ""
        if self.save_seconds is not None and self.interruption_seconds is not None:
            of_save, between = duration(self.save_seconds), duration(self.interruption_seconds)
            figures = f" A save takes {of_save}, and its nodes are interrupted every {between} on average."
        return f"The job {saved}; it is asked every {duration(self.interval_seconds)}.{figures}"

    def remedy(self) -> str:
        return "To change it, name an interval in the job (0: none), or set checkpoints.interval_seconds."


class QuotaUnused(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="quota_unused"):
    """The job has quota, and a plan finds no capacity for it, while another job waits for that quota."""

    barred_by: str  # tag of the reason for which the plan defers it
    waiting_job: JobId  # the first job that waits for the same quota
    waits_since: Instant  # of the job that is requeued

    def sentence(self) -> str:
        return (
            f"It has quota and cannot start ({self.barred_by}); it has waited since {instant(self.waits_since)}. "
            f"Job {self.waiting_job} waits for that quota."
        )


class ReservationEnding(Reason, frozen=True, kw_only=True, tag="reservation_ending"):
    """The paid reservation of the instance ends soon, so that its work has to move."""

    paid_until: Instant  # end of the reservation
    drain_seconds: float  # how long before it the drain starts

    def sentence(self) -> str:
        ahead = duration(self.drain_seconds)
        return (
            f"The paid reservation of the instance ends at {instant(self.paid_until)}; its work moves {ahead} before."
        )

    def remedy(self) -> str:
        return "To move work later, lower reservation_drain_seconds."


# ---- answers to ProvisioningRequests


class RequestAccepted(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="request_accepted"):
    """The request is valid, and capacity is sought for it."""

    members_count: int

    def sentence(self) -> str:
        return f"The request is valid; capacity for {counted(self.members_count, 'pod')} is sought."


class RequestInvalid(Reason, frozen=True, kw_only=True, tag="request_invalid"):
    """The request can never be served as it is."""

    detail: str

    def sentence(self) -> str:
        return f"The request cannot be served: {self.detail}."

    def remedy(self) -> str:
        return "Create a request with valid templates and parameters; the spec of a request cannot be changed."


class RequestExpired(Reason, frozen=True, kw_only=True, tag="request_expired"):
    """The request got no capacity for as long as it is valid."""

    valid_seconds: float  # time since its creation

    def sentence(self) -> str:
        return f"The request got no capacity within {duration(self.valid_seconds)} of its creation."

    def remedy(self) -> str:
        return "Create another request, or one with a longer ValidUntilSeconds."


class CapacityFound(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="capacity_found"):
    """All pods of the request fit on nodes that are ready, together."""

    members_count: int
    booked_seconds: float

    def sentence(self) -> str:
        booked = duration(self.booked_seconds)
        return f"Ready nodes have capacity for {counted(self.members_count, 'pod')}; it is booked for {booked}."


class CapacityOrdered(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="capacity_ordered"):
    """All pods of the request have capacity, some of it on nodes that are not ready yet."""

    members_count: int
    expected_at: Instant | None  # None: unknown

    def sentence(self) -> str:
        at = "" if self.expected_at is None else f", expected at {instant(self.expected_at)}"
        return f"Nodes for {counted(self.members_count, 'pod')} are ordered and not ready yet{at}."


class CapacityMissing(Reason, frozen=True, kw_only=True, tag="capacity_missing"):
    """Some pods of the request have no capacity, so none has."""

    members_count: int
    cause: str  # tag of the deferral
    detail: str  # its sentence
    is_final: bool  # the request is not tried again

    def sentence(self) -> str:
        again = "It is not tried again." if self.is_final else "It is tried again."
        return f"There is no capacity for {counted(self.members_count, 'pod')} together. {self.detail} {again}"

    def remedy(self) -> str:
        return "Run gpu-autoscaler why request; it names the current reason with its remedy."


class BookingEnded(Reason, frozen=True, kw_only=True, tag="booking_ended"):
    """Capacity was booked for as long as it is kept for pods to come."""

    booked_seconds: float

    def sentence(self) -> str:
        return f"The capacity was booked for {duration(self.booked_seconds)}; it is no longer kept for pods to come."

    def remedy(self) -> str:
        return "Create another request if the pods do not exist yet."


class BookedNodeLost(Reason, frozen=True, kw_only=True, tag="booked_node_lost"):
    """A node that was bought for the request ended before its pods came, and other nodes have no capacity for them."""

    provider_id: str

    def sentence(self) -> str:
        return f"Instance {self.provider_id} ended while it was booked, and other nodes have no capacity for the pods."

    def remedy(self) -> str:
        return "Create another request."


AnswerReason = (
    RequestAccepted
    | RequestInvalid
    | RequestExpired
    | CapacityFound
    | CapacityOrdered
    | CapacityMissing
    | BookingEnded
    | BookedNodeLost
)

# ---- why it is deferred


class UpkeepRepeated(Reason, frozen=True, kw_only=True, tag="upkeep_repeated"):
    """Earlier plans decided it, and the cluster does not show its effect; the next attempt waits."""

    attempts_count: int  # without ten minutes between two of them
    retry_at: Instant

    def sentence(self) -> str:
        attempts = counted(self.attempts_count, "attempt")
        return f"{attempts} had no effect so far. The next attempt is at {instant(self.retry_at)}."

    def remedy(self) -> str:
        return "The scaler's log has the error of each attempt; check its rights in Kubernetes and the cloud's answers."


class CheckpointsUnsupported(Reason, frozen=True, kw_only=True, tag="checkpoints_unsupported"):
    """The job asked for periodic requests, but none of its running pods saves on request."""

    def sentence(self) -> str:
        return f"No running pod of the job has the annotation {labels.CHECKPOINTED_AT}, by which it saves on request."

    def remedy(self) -> str:
        return f"Add the annotation {labels.CHECKPOINTED_AT} with an empty value to its pods, or set the interval to 0."


class SaveInProgress(Reason, frozen=True, kw_only=True, tag="save_in_progress"):
    """The pods of the job were asked to save for another cause, and have not answered."""

    deadline_at: Instant  # a later save is not waited for

    def sentence(self) -> str:
        return f"Its pods were asked to save by {instant(self.deadline_at)}, and have not answered."

    def remedy(self) -> str:
        return "Look into the log of its pods if they do not answer until then."


class SavesConcurrentLimit(Reason, frozen=True, kw_only=True, tag="saves_concurrent_limit"):
    """As many jobs as allowed save at the same time."""

    saves_count_max: int  # limit of the policy

    def sentence(self) -> str:
        return f"{counted(self.saves_count_max, 'job')} may save at the same time, and do."

    def remedy(self) -> str:
        return "To let more save at once, raise checkpoints.saves_count_max."


class OwnerUnsupported(Reason, frozen=True, kw_only=True, tag="owner_unsupported"):
    """The workload is idle, but its pods belong to a kind of object that is not ended for its users."""

    owner_kind: str  # kind of the object that owns the pods

    def sentence(self) -> str:
        return f"The workload is idle, but its pods belong to a {self.owner_kind}, which would create them again."

    def remedy(self) -> str:
        return "Delete its object, or scale it down."


UpkeepDeferReason = UpkeepRepeated | CheckpointsUnsupported | SaveInProgress | SavesConcurrentLimit | OwnerUnsupported
UpkeepReason = (
    InstanceGone
    | FinalizerMissing
    | FinalizerUnneeded
    | CheaperToEmpty
    | TaintUnneeded
    | DeletedByKarpenter
    | JobIdle
    | RequestAccepted
    | RequestInvalid
    | RequestExpired
    | CapacityFound
    | CapacityOrdered
    | CapacityMissing
    | BookingEnded
    | BookedNodeLost
    | WorkloadIdle
    | CheckpointDue
    | ReservationEnding
)
