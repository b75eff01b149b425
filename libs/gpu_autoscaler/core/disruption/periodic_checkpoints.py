"""Periodic requests to save a checkpoint: which running jobs are asked now, and how often.

A job is asked once its last save, or the start of its attempt, is an interval ago. One save of any pod counts for the
job: of a gang, often one process saves. A job that saves by itself within the interval is never asked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from math import sqrt
from typing import Literal, NamedTuple

from gpu_autoscaler.core.disruption.protection import can_save, checkpointed_at, has_answered, save_request
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.policy.disruption_settings import CheckpointsPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.interruption_history import capacity_pool_of, interruption_seconds
from gpu_autoscaler.core.state.lineage import Derivation, part_of
from gpu_autoscaler.core.state.queries import is_ended_whole
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import RequestJobCheckpoint, upkeep_key
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.upkeep import (
    CheckpointDue,
    CheckpointsUnsupported,
    SaveInProgress,
    SavesConcurrentLimit,
)


class DueCheckpoint(NamedTuple):
    """A running job whose last save is an interval ago."""

    job_id: JobId
    node_names: tuple[str, ...]  # of its pods that save on request, sorted
    since: datetime  # its last save, or the start of its attempt
    reason: CheckpointDue
    held: CheckpointsUnsupported | SaveInProgress | SavesConcurrentLimit | None  # why it is not asked


def due_checkpoints(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[DueCheckpoint, ...]:
    """Return the jobs that are due, the longest without a save first. Beyond the maximum of saves at once they wait."""
    rules, pods_by_job = policy.checkpoints, _saving_by_job(state)
    if not rules.is_on:
        return ()
    saving = {job_id for job_id, pods in pods_by_job.items() if _deadline_of(pods, as_of) is not None}
    asking = (job_id for job_id in {**_WITH_INTERVAL.of(state), **pods_by_job} if job_id in state.jobs)
    due = (_due(job_id, state.jobs[job_id], pods_by_job.get(job_id, ()), state, rules, as_of) for job_id in asking)
    ordered = sorted(filter(None, due), key=lambda entry: (entry.since, entry.job_id))
    saving.update(entry.job_id for entry in ordered if _is_under_way(entry, state, as_of))
    limit = SavesConcurrentLimit(saves_count_max=rules.saves_count_max)
    limited: list[DueCheckpoint] = []
    for entry in ordered:
        is_beyond = entry.held is None and entry.job_id not in saving and len(saving) >= rules.saves_count_max
        limited.append(entry._replace(held=limit) if is_beyond else entry)
        if entry.held is None and not is_beyond:
            saving.add(entry.job_id)
    return tuple(limited)


def _due(
    job_id: JobId,
    job: JobRecord,
    pods: Sequence[PodObserved],
    state: ClusterState,
    rules: CheckpointsPolicy,
    as_of: datetime,
) -> DueCheckpoint | None:
    """Return the job if it is due; None also for a job that saves by no request and did not ask for an interval."""
    if job.queued is None or job.placed is None or job.finished or job.cancel_requested or is_ended_whole(job):
        return None  # where a pod was lost, the others work on while the job waits for a place for it
    setting = job.queued.spec.checkpoint_interval_seconds
    if setting == 0.0 or (setting is None and not pods):
        return None
    if not pods:
        return _unsupported(job_id, job, rules.interval_seconds if setting == "auto" else setting, as_of)
    saves = [at for pod in pods if (at := checkpointed_at(dict(pod.annotations))) is not None]
    since = max(saves or (pod.started_at or pod.created_at for pod in pods))
    reason = _reason(setting, max(saves, default=None), pods, state, rules, as_of)
    if not has_lasted(since, reason.interval_seconds, as_of):
        return None
    deadline_at = _deadline_of(pods, as_of)
    node_names = tuple(sorted({pod.node_name for pod in pods if pod.node_name is not None}))
    due = DueCheckpoint(job_id, node_names, since, reason, held=None)
    if deadline_at is None or _is_under_way(due, state, as_of):
        return due
    return due._replace(held=SaveInProgress(deadline_at=deadline_at))


def _unsupported(job_id: JobId, job: JobRecord, seconds: float | None, as_of: datetime) -> DueCheckpoint | None:
    """Return a job that asked for an interval, but none of whose pods saves on request."""
    if seconds is None or job.started is None or not has_lasted(job.started.started_at, seconds, as_of):
        return None
    reason = CheckpointDue(last_saved_at=None, interval_seconds=seconds)
    return DueCheckpoint(job_id, (), job.started.started_at, reason, held=CheckpointsUnsupported())


def _is_under_way(due: DueCheckpoint, state: ClusterState, as_of: datetime) -> bool:
    """True if a plan has decided to ask for this save, and its back-off is not over."""
    key = upkeep_key(RequestJobCheckpoint.tag(), f"job/{due.job_id}", due.since.isoformat())
    known = state.upkeep.get(key)
    return known is not None and as_of < known.retry_at


def _deadline_of(pods: Iterable[PodObserved], as_of: datetime) -> datetime | None:
    """Return until when a pod may save for a request that it has not answered; None: no request is open."""
    deadlines = [
        request.deadline_at
        for pod in pods
        if (request := save_request(annotations := dict(pod.annotations))) is not None
        and not has_answered(annotations, request.requested_at)
        and as_of < request.deadline_at
    ]
    return max(deadlines, default=None)


# ---- the interval


def _reason(
    setting: float | Literal["auto"] | None,
    last_saved_at: datetime | None,
    pods: Sequence[PodObserved],
    state: ClusterState,
    rules: CheckpointsPolicy,
    as_of: datetime,
) -> CheckpointDue:
    """Return the interval with what it is computed from. What is unknown leaves the default of the policy."""
    if setting != "auto":
        seconds = rules.interval_seconds if setting is None else setting
        return CheckpointDue(last_saved_at=last_saved_at, interval_seconds=seconds)
    save_seconds = _save_seconds(pods)
    between_seconds = interruption_seconds(state, _capacity_pools(pods, state), as_of)
    if save_seconds is None or between_seconds is None:
        return CheckpointDue(last_saved_at=last_saved_at, interval_seconds=rules.interval_seconds)
    best_seconds = sqrt(2.0 * save_seconds * between_seconds)
    return CheckpointDue(
        last_saved_at=last_saved_at,
        interval_seconds=min(max(best_seconds, rules.interval_seconds_min), rules.interval_seconds_max),
        save_seconds=save_seconds,
        interruption_seconds=between_seconds,
    )


def _save_seconds(pods: Iterable[PodObserved]) -> float | None:
    """Return how long the slowest pod took from the last request to its save; None: no pod saved by its deadline."""
    measured: list[float] = []
    for pod in pods:
        annotations = dict(pod.annotations)
        request, saved_at = save_request(annotations), checkpointed_at(annotations)
        if request is not None and saved_at is not None and request.requested_at < saved_at <= request.deadline_at:
            measured.append((saved_at - request.requested_at).total_seconds())
    return max(measured, default=None)


def _capacity_pools(pods: Iterable[PodObserved], state: ClusterState) -> Iterator[str]:
    """Yield the spot capacity pool of each node of the pods, as far as it is known."""
    node_names = {pod.node_name for pod in pods}
    for node in state.nodes.values():
        if node.name not in node_names or node.provider_id is None:
            continue
        instance = state.instances.get(node.provider_id)
        if instance is not None and instance.capacity_type is CapacityType.SPOT:
            yield capacity_pool_of(instance.instance_type, instance.zone)


# ---- jobs that asked for an interval, and pods that save on request


def _has_interval(job: JobRecord) -> bool:
    return job.queued is not None and job.finished is None and bool(job.queued.spec.checkpoint_interval_seconds)


_WITH_INTERVAL: Derivation[Mapping[JobId, JobRecord]] = part_of("jobs", _has_interval)


def _is_saving(pod: PodObserved) -> bool:
    return (
        pod.job_id is not None
        and pod.phase == "running"
        and pod.node_name is not None
        and pod.deleting_since is None
        and can_save(dict(pod.annotations))
    )


_SAVING: Derivation[Mapping[PodUid, PodObserved]] = part_of("pods", _is_saving)


def _saving_by_job(state: ClusterState) -> dict[JobId, list[PodObserved]]:
    """Return the running pods that save on request, by job."""
    pods_by_job: dict[JobId, list[PodObserved]] = {}
    for pod in _SAVING.of(state).values():
        if pod.job_id is not None:
            pods_by_job.setdefault(pod.job_id, []).append(pod)
    return pods_by_job
