"""Why an attempt of a running job is ended as a whole: for another job, or to go on elsewhere."""

from gpu_autoscaler.model.format import counted, duration, listed, money, price
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.base import Reason


class QuotaReclaimed(Reason, frozen=True, kw_only=True, tag="quota_reclaimed"):
    """The project borrowed GPUs that another project of its cohort has in its nominal quota and needs now."""

    for_job: JobId
    for_project: str  # project of that job
    project: str  # of the preempted job
    cohort: str  # of both projects
    borrowed_gpu_count: int  # by its project before the preemption
    nominal_gpu_count: int  # of the project that reclaims

    def sentence(self) -> str:
        return (
            f"Project {self.for_project} reclaims its nominal quota of {counted(self.nominal_gpu_count, 'GPU')} for "
            f"job {self.for_job}; project {self.project} had borrowed {counted(self.borrowed_gpu_count, 'GPU')} in "
            f"cohort {self.cohort}."
        )

    def remedy(self) -> str:
        return (
            f"The job is queued again without using up a retry. To keep such jobs running, raise nominal_gpu_count of "
            f"project {self.project}, or set lending_gpu_count_max of project {self.for_project}."
        )


class PriorityPreempted(Reason, frozen=True, kw_only=True, tag="priority_preempted"):
    """A job of higher priority needs its GPUs, and no node can be bought for it."""

    for_job: JobId
    for_priority: int  # priority of that job
    priority: int  # of the preempted job
    barred_by: str  # tag of the reason why no node is bought

    def sentence(self) -> str:
        return (
            f"Job {self.for_job} of priority {self.for_priority} needs the GPUs of this job of priority "
            f"{self.priority}, and no node can be bought for it ({self.barred_by})."
        )

    def remedy(self) -> str:
        return (
            "The job is queued again without using up a retry. To prevent this, raise the limit that bars the "
            "purchase, or set quotas.is_priority_preemption_on to false."
        )


class MovedToSpot(Reason, frozen=True, kw_only=True, tag="moved_to_spot"):
    """The job runs on-demand, and free spot nodes cost less by more than the move."""

    node_names: tuple[str, ...]  # the on-demand nodes that it leaves, sorted
    saving_micro_usd_per_hour: int  # of the nodes that it leaves over those it takes
    remaining_seconds: float  # for which the saving counts
    move_micro_usd: int  # cost of the move

    def sentence(self) -> str:
        nodes = f"{counted(len(self.node_names), 'on-demand node')} ({listed(self.node_names)})"
        return (
            f"The job moves from {nodes} to free spot nodes, which saves {price(self.saving_micro_usd_per_hour)} for "
            f"{duration(self.remaining_seconds)}; the move costs {money(self.move_micro_usd)}."
        )

    def remedy(self) -> str:
        return (
            "The job is queued again without using up a retry. To keep such jobs where they run, raise "
            "spot.return_to_spot_seconds_min, or annotate their pods with karpenter.sh/do-not-disrupt."
        )


PreemptReason = QuotaReclaimed | PriorityPreempted | MovedToSpot


def beneficiary(reason: PreemptReason | None) -> JobId | None:
    """Return the job for which the attempt ends; None: it ends for none."""
    return None if reason is None or isinstance(reason, MovedToSpot) else reason.for_job
