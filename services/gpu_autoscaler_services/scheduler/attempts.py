"""How a placed job's attempts end.

Pure; README.md says it in words, `core/queueing/schedule.py` how the next one begins.
"""

from collections.abc import Iterable
from datetime import datetime

from gpu_autoscaler.core.demand import is_member
from gpu_autoscaler.core.folding.graves import all_tombstones
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState, JobRecord
from gpu_autoscaler.core.views import is_preempted, job_pods
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPreempted
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.ids import JobId


def losses(state: ClusterState, policy: ScalingPolicy) -> dict[JobId, list[Fact]]:
    """Return what the end of pods means for the jobs that are under way: the end of an attempt, sometimes the last.

    Read from what is known, and not from the fact alone: a loss that was not answered yet is answered by any later
    look. What went before the placement is part of an earlier loss, members that are lost together are one. Nothing
    where those that are left are enough for the job: it goes on, and its others come back as there is room. Nothing
    where a pod had done its work, or where only a list showed that it is gone: how it ended is unknown then.
    """
    found: dict[JobId, list[Fact]] = {}
    stones = [stone for stone in all_tombstones(state.pods_gone) if stone.lost is not None]
    for stone in sorted(stones, key=lambda stone: (stone.gone_at, stone.version)):
        gone = stone.lost
        job = None if gone is None or gone.job_id is None else state.jobs.get(gone.job_id)
        if gone is None or gone.job_id is None or job is None or not _is_under_way(job):
            continue
        if gone.job_id in found and not _is_elastic(job):  # of those that it could do without, the last one counts
            continue
        assert job.placed is not None, "a job that is under way has a place"  # noqa: S101 - our bug
        if stone.gone_at > job.placed.placed_at and not _goes_on_without(state, job):
            found[gone.job_id] = _after_loss(state, gone, gone.job_id, job.placed.attempt, stone.gone_at, policy)
    return found


def _after_loss(
    state: ClusterState, gone: PodGone, job_id: JobId, attempt: int, lost_at: datetime, policy: ScalingPolicy
) -> list[Fact]:
    where = f" on node {gone.node_name}" if gone.node_name else ""
    cause = f"pod {gone.namespace}/{gone.name}{where} was lost{_why(state, gone)}"
    preempted = JobPreempted(job_id=job_id, attempt=attempt, cause=cause, preempted_at=lost_at)
    if attempt <= policy.job_retries_count_max:
        return [preempted]
    message = f"lost its place {attempt} times, the policy allows {policy.job_retries_count_max} retries; last: {cause}"
    return [preempted, JobFinished(job_id=job_id, outcome="failed", finished_at=lost_at, message=message)]


def _goes_on_without(state: ClusterState, job: JobRecord) -> bool:
    """True where as many members as are enough for the job are at work, or have done their part."""
    if job.queued is None or not _is_elastic(job):
        return False
    pods = job_pods(state, job.queued.job_id)
    left_count = sum(1 for pod in pods if is_member(pod) and pod.node_name is not None)
    return left_count >= job.queued.spec.gang_count


def _is_elastic(job: JobRecord) -> bool:
    return job.queued is not None and job.queued.spec.member_count_min is not None


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
