"""The part of the second opinion that looks at work which was better left alone for now.

Called by `core/checks/removals.py` alone. Reads pods and jobs itself, where `core/removing/patience.py` finds the
words.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState, JobRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import DrainNode

_RETRIES_SPARED_COUNT = 2  # which a move by choice must leave


def hurried_moves(
    drain: DrainNode, pods: Iterable[PodObserved], state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> Iterator[str]:
    """Yield a sentence for each pod that a drain by choice moves although it just began, or its job had better stay."""
    rules = policy.removal.protection
    began_after = as_of - timedelta(seconds=rules.run_seconds_min)
    for pod in pods:
        if pod.deleting_since is not None:
            continue
        name = f"node {drain.node_name} is drained by choice, but pod {pod.namespace}/{pod.name}"
        if pod.started_at is not None and pod.started_at > began_after:
            yield f"{name} has just begun"
        job = None if pod.job_id is None else state.jobs.get(pod.job_id)
        if job is not None:
            yield from (f"{name} {what}" for what in _of_job(job, policy))
        ends_at = _told_end(pod)
        if ends_at is None and job is not None and job.started is not None and job.queued is not None:
            ends_at = job.started.started_at + timedelta(seconds=job.queued.spec.duration_seconds_max)
        if ends_at is not None and timedelta() <= ends_at - as_of <= timedelta(seconds=rules.ending_soon_seconds):
            yield f"{name} is about to end"


def _told_end(pod: PodObserved) -> datetime | None:
    told = [value for key, value in pod.annotations if key == labels.EXPECTED_END]
    try:
        at = datetime.fromisoformat(told[0]) if told else None
    except ValueError:
        return None
    return None if at is None or at.tzinfo is None else at


def _of_job(job: JobRecord, policy: ScalingPolicy) -> Iterator[str]:
    rules, queued, placed = policy.removal.protection, job.queued, job.placed
    if queued is None or placed is None:
        return
    if rules.job_priority_min is not None and queued.spec.priority >= rules.job_priority_min:
        yield f"is of a job of priority {queued.spec.priority}"
    if min(placed.node_uids, default=None) != max(placed.node_uids, default=None):
        yield "is of a job that runs on several nodes"
    if policy.job_retries_count_max - placed.attempt < _RETRIES_SPARED_COUNT:
        yield "is of a job that has no attempt to spare"
