"""How a placed job's attempts end. Pure; README.md says it in words, `core/schedule.py` how the next one begins."""

from collections.abc import Iterable
from datetime import datetime

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState, JobRecord
from gpu_autoscaler.core.views import is_preempted
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPreempted
from gpu_autoscaler.events.pod import PodGone


def after_loss(state: ClusterState, gone: PodGone, lost_at: datetime, policy: ScalingPolicy) -> list[Fact]:
    """Return what the end of a pod means for its job: the end of an attempt, or nothing.

    Nothing where the pod had done its work, the job is not under way, or the attempt has ended already: members that
    are lost together are one loss.
    """
    job = None if gone.job_id is None else state.jobs.get(gone.job_id)
    if gone.job_id is None or job is None or gone.phase == "succeeded" or not _is_under_way(job):
        return []
    assert job.placed is not None, "a job that is under way has a place"  # noqa: S101 - our bug
    attempt = job.placed.attempt
    where = f" on node {gone.node_name}" if gone.node_name else ""
    cause = f"pod {gone.namespace}/{gone.name}{where} was lost{_why(state, gone)}"
    preempted = JobPreempted(job_id=gone.job_id, attempt=attempt, cause=cause, preempted_at=lost_at)
    if attempt <= policy.job_retries_count_max:
        return [preempted]
    message = f"lost its place {attempt} times, the policy allows {policy.job_retries_count_max} retries; last: {cause}"
    return [preempted, JobFinished(job_id=gone.job_id, outcome="failed", finished_at=lost_at, message=message)]


def _is_under_way(job: JobRecord) -> bool:
    return job.placed is not None and not is_preempted(job) and _goes_on(job)


def _goes_on(job: JobRecord) -> bool:
    return job.queued is not None and job.finished is None and job.cancel_requested is None


def _why(state: ClusterState, gone: PodGone) -> str:
    """The drain that told the pod to go, in words."""
    for drain in _drains_of(state, gone):
        reason = getattr(drain, "reason", None)
        if reason is not None:
            return f": its node was drained ({reason.tag()})"
    return ""


def _drains_of(state: ClusterState, gone: PodGone) -> Iterable[object]:
    return (drain.decision for drain in state.drains.values() if gone.pod_uid in drain.evicted)
