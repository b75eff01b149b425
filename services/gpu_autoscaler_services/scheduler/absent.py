"""Jobs whose Kubernetes Job went while nobody watched. Pure; README.md says in words what becomes of them."""

from collections.abc import Iterator
from datetime import datetime

from gpu_autoscaler.core.buying.sparing import is_to_leave_spot
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState, JobRecord
from gpu_autoscaler.core.views import is_waiting, job_pods
from gpu_autoscaler.events.job import JobListed, JobQueued
from gpu_autoscaler.model.jobs import Runtime


def not_listed(state: ClusterState, listed: JobListed) -> Iterator[tuple[JobQueued, JobRecord]]:
    """Yield the jobs that go on and are not in the list, in order of id.

    The list is later in its stream than the acceptance of every job whose Job could be missing from it, so no clock
    says which jobs are old enough; that a Job is made meanwhile is possible, and for the caller to find out.
    """
    there = frozenset(listed.job_ids)
    for job_id, job in sorted(state.jobs.items()):
        is_over = job.finished is not None or job.cancel_requested is not None
        is_of_kind = job.queued is not None and job.queued.spec.runtime == listed.runtime
        if job.queued is not None and is_of_kind and not is_over and job_id not in there:
            yield job.queued, job


def is_made_anew(job: JobRecord, policy: ScalingPolicy, as_of: datetime) -> bool:
    """True for a job whose Job may have been taken away by us: of a kind that cannot be held, on its way off spot.

    From the loss that sends it off spot until it is seen at work in its new place.
    """
    if job.queued is None or job.queued.spec.runtime is not Runtime.VOLCANO:
        return False
    if is_waiting(job):
        return is_to_leave_spot(job, policy, as_of)
    placed, started = job.placed, job.started
    return placed is not None and placed.attempt > 1 and (started is None or started.started_at < placed.placed_at)


def was_made(state: ClusterState, job: JobRecord) -> bool:
    """True where the record shows a Kubernetes Job at work: its pods, their start, or their loss."""
    if job.started is not None or job.preempted is not None:
        return True
    return job.queued is not None and bool(job_pods(state, job.queued.job_id))
