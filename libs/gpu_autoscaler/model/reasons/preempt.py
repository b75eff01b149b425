"""Why a running job is preempted for another one."""

from gpu_autoscaler.model.format import counted
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


PreemptReason = QuotaReclaimed | PriorityPreempted
