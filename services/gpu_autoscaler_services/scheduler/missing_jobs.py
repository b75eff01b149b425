"""Jobs whose Kubernetes Job is missing from a list. Pure; README.md describes what happens to them."""

from collections.abc import Iterator
from datetime import datetime

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.spot_waits import must_leave_spot
from gpu_autoscaler.core.state.queries import is_ended_whole, is_waiting, job_pods
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.job import JobListed, JobQueued
from gpu_autoscaler.model.jobs import Runtime


def missing_jobs(state: ClusterState, listed: JobListed) -> Iterator[tuple[JobQueued, JobRecord]]:
    """Yield the unfinished jobs of the list's kind that are not in the list, in order of id.

    The list follows in its stream the acceptance of every job that could be missing from it, so no age limit is needed.
    A Job may have been created since; the caller checks that.
    """
    listed_ids = frozenset(listed.job_ids)
    for job_id, job in sorted(state.jobs.items()):
        is_over = job.finished is not None or job.cancel_requested is not None
        is_of_kind = job.queued is not None and job.queued.spec.runtime == listed.runtime
        if job.queued is not None and is_of_kind and not is_over and job_id not in listed_ids:
            yield job.queued, job


def is_recreated(job: JobRecord, policy: ScalingPolicy, as_of: datetime) -> bool:
    """Return True for a job whose Job we may have deleted: of a kind that cannot be suspended, leaving spot capacity or
    ended as a whole.

    That is, from the end of its attempt until its new placement is seen to run.
    """
    if job.queued is None or job.queued.spec.runtime is not Runtime.VOLCANO:
        return False
    if is_waiting(job):
        return must_leave_spot(job, policy, as_of) or is_ended_whole(job)
    placed, started = job.placed, job.started
    return placed is not None and placed.attempt > 1 and (started is None or started.started_at < placed.placed_at)


def was_created(state: ClusterState, job: JobRecord) -> bool:
    """Return True if the state shows that the Kubernetes Job ran: its pods, its start, or a lost attempt."""
    if job.started is not None or job.preempted is not None:
        return True
    return job.queued is not None and bool(job_pods(state, job.queued.job_id))
