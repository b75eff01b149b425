"""Why a plan decides an act of upkeep, and why it defers one."""

from typing import Literal

from gpu_autoscaler.model import labels
from gpu_autoscaler.model.format import counted, duration, instant, percent
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

    cause: Literal["instance_ended", "policy", "karpenter"]

    def sentence(self) -> str:
        return {
            "instance_ended": "The node object is deleted and its instance has ended.",
            "policy": "The policy uses no finalizers.",
            "karpenter": "Karpenter manages the node and drains it itself.",
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

    def note(self) -> str:
        """Return the cause in the words of the cancellation."""
        return f"its GPU utilization was at most {percent(self.busy_ratio_max)} for {duration(self.idle_seconds)}"

    def sentence(self) -> str:
        return f"The job holds GPUs and leaves them idle: {self.note()} (limit: {duration(self.idle_seconds_max)})."

    def remedy(self) -> str:
        return f"To keep a job, annotate its pods {labels.DO_NOT_DISRUPT}=true, or raise idle_jobs.idle_seconds."


class ReservationEnding(Reason, frozen=True, kw_only=True, tag="reservation_ending"):
    """The paid reservation of the instance ends soon, so that its work has to move."""

    paid_until: Instant
    drain_seconds: float

    def sentence(self) -> str:
        ahead = duration(self.drain_seconds)
        return (
            f"The paid reservation of the instance ends at {instant(self.paid_until)}; its work moves {ahead} before."
        )

    def remedy(self) -> str:
        return "To move work later, lower reservation_drain_seconds."


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


UpkeepReason = InstanceGone | FinalizerMissing | FinalizerUnneeded | DeletedByKarpenter | JobIdle | ReservationEnding
