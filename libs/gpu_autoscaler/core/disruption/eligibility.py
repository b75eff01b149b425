"""Work that is better not moved now: it just began, is nearly done, has high priority, or spans several nodes.

This weighs the cost of a move by choice (protection: `core/disruption/protection.py`). Forced removals do not ask it.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from gpu_autoscaler.core.disruption.protection import can_save, checkpointed_at
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.policy.disruption_settings import ProtectionPolicy
from gpu_autoscaler.core.state.retries import moves
from gpu_autoscaler.core.state.state import JobRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.format import duration, instant
from gpu_autoscaler.model.observed import Instant, aware_instant

# Retries that a job has left for interruptions when it is moved: a capacity shortage takes one, and often the next.
# The move itself uses up none. Source: our own.
_RETRIES_KEPT_COUNT = 2
# The protected time of a job's pods doubles with each loss by our own choice, up to 256 times: with the default of
# 5 min a job is moved at most 8 times in its first 21 h, and then once in 21 h.
_DOUBLINGS_COUNT_MAX = 8


def reason_to_wait(
    pod: PodObserved, job: JobRecord | None, rules: ProtectionPolicy, retries_count_max: int, as_of: datetime
) -> str | None:
    """Return why the pod is better not moved now; None: it may be moved."""
    reason = reason_of_time(pod, job, rules, as_of)
    return reason or (None if job is None else reason_of_job(job, rules, retries_count_max))


def reason_of_time(pod: PodObserved, job: JobRecord | None, rules: ProtectionPolicy, as_of: datetime) -> str | None:
    """Return why the pod is better not moved so soon after its start or before its end; None: it may be moved."""
    least = rules.run_seconds_min * 2 ** min(_moves(job), _DOUBLINGS_COUNT_MAX)
    if pod.started_at is not None and least > 0 and not has_lasted(pod.started_at, least, as_of):
        run_seconds = max(0.0, (as_of - pod.started_at).total_seconds())
        return f"it has run for {duration(run_seconds)} of the protected {duration(least)}"
    ends_at = expected_end(pod, job)
    if ends_at is not None and ends_at - timedelta(seconds=rules.ending_soon_seconds) <= as_of <= ends_at:
        return f"it ends by {instant(ends_at)}, which is cheaper than moving it"
    return None


def expected_end(pod: PodObserved, job: JobRecord | None) -> Instant | None:
    """Return the latest end of the pod's work, by its annotation or its job's time limit; None: unknown."""
    if (at := aware_instant(dict(pod.annotations).get(labels.EXPECTED_END, ""))) is not None:
        return at
    if job is None or job.queued is None or job.started is None:
        return None
    return job.started.started_at + timedelta(seconds=job.queued.spec.duration_seconds_max)


def reason_of_job(job: JobRecord, rules: ProtectionPolicy, retries_count_max: int) -> str | None:
    """Return why no pod of the job is moved by a drain; None: its pods may be moved."""
    if job.queued is None or job.placed is None:
        return None
    priority, priority_min = job.queued.spec.priority, rules.job_priority_min
    if priority_min is not None and priority >= priority_min:
        return f"its job has priority {priority}; jobs of priority {priority_min} or more are not moved"
    if len(set(job.placed.node_uids)) > 1:
        return "its job runs on several nodes, all of which would start over"
    if retries_count_max - job.placed.retries_used < _RETRIES_KEPT_COUNT:
        return "its job has no retry to spare"
    return None


def _moves(job: JobRecord | None) -> int:
    return 0 if job is None or job.placed is None else moves(job.placed)


def gpu_seconds_at_risk(pods: Iterable[PodObserved], checkpoint_interval_seconds: float, as_of: datetime) -> float:
    """Return the GPU seconds of work since the last save or start that a move would lose; for pods that do not report
    saves at most the checkpoint interval."""
    return sum(
        _unsaved_seconds(pod, checkpoint_interval_seconds, as_of) * max(1, pod.requests.gpu_count) for pod in pods
    )


def _unsaved_seconds(pod: PodObserved, checkpoint_interval_seconds: float, as_of: datetime) -> float:
    annotations = dict(pod.annotations)
    began_at = pod.started_at or pod.created_at
    saved_at = checkpointed_at(annotations) if can_save(annotations) else None
    unsaved_seconds = max(0.0, (as_of - max(saved_at or began_at, began_at)).total_seconds())
    return unsaved_seconds if can_save(annotations) else min(checkpoint_interval_seconds, unsaved_seconds)
