"""The order of queued jobs: within each queue by its scheduling policy, and of all queues together.

The first jobs of the queues compete by priority, start deadline and waiting time, as all jobs do without queues. Jobs
that waited for `reserve_after_seconds` of their queue go before all others, by waiting time. The order moves with time
in whole minutes only, so that plans and schedules of one minute agree.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from heapq import merge
from typing import NamedTuple, assert_never

import msgspec

from gpu_autoscaler.core.demand.fair_share import RecentUsage, RecentUse, fair_order, gpu_hours
from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.next_change import has_lasted, note_whole, plain
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy, queue_of
from gpu_autoscaler.core.policy.quota_settings import project_owner
from gpu_autoscaler.core.state import queries
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.core.state.usage_history import last_attempt
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import PRIORITY_NAMES, JobSpec

_MINUTE_SECONDS = 60
_HOUR_SECONDS = 3600.0
_PRIORITY_MAX = float(max(PRIORITY_NAMES.values()))


class QueuedJob(NamedTuple):
    """A waiting job, with what its place depends on."""

    job_id: JobId
    spec: JobSpec
    queued_at: datetime
    since: datetime  # waits since its acceptance, or since its last preemption
    priority: float  # with that of its waiting time


def ordered_queue(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[JobRecord, ...]:
    """Return the queued jobs in the order in which they are served."""
    if not policy.queues:
        return queries.queue(state)
    return tuple(state.jobs[job_id] for job_id in _ordered_ids(state, policy, as_of))


def in_queue_order(
    demand: tuple[DemandItem, ...], state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> tuple[DemandItem, ...]:
    """Return the demand with the queued jobs in the order of their queues. Together they keep their places among other
    demand; elastic members come after all gangs of the queues."""
    if not policy.queues:
        return demand
    ranks = {job_id: rank for rank, job_id in enumerate(_ordered_ids(state, policy, as_of))}

    def is_ranked(item: DemandItem) -> bool:
        is_of_queue = item.source in (DemandSource.QUEUED_JOB, DemandSource.ELASTIC_MEMBER)
        return is_of_queue and item.job_id in ranks

    def rank(item: DemandItem) -> tuple[bool, int]:
        return item.source is DemandSource.ELASTIC_MEMBER, ranks[item.job_id or JobId("")]

    ranked = iter(sorted(filter(is_ranked, demand), key=rank))
    return tuple(_marked(next(ranked), policy) if is_ranked(item) else item for item in demand)


def _marked(item: DemandItem, policy: ScalingPolicy) -> DemandItem:
    """Name the queue of an item that no later one passes."""
    queue = queue_of(policy.queues, item.project or "")
    return msgspec.structs.replace(item, strict_queue=queue.name) if queue.is_strict else item


def waits_since(job: JobRecord) -> datetime | None:
    """Return since when a queued job waits: its acceptance, or its last preemption; None: it is not accepted."""
    if job.queued is None:
        return None
    return job.preempted.preempted_at if job.preempted is not None else job.queued.queued_at


def is_overdue(job: QueuedJob, queue: QueuePolicy, as_of: datetime) -> bool:
    """True once the job has waited for the time after which it reserves capacity."""
    seconds = queue.reserve_after_seconds
    return seconds is not None and has_lasted(job.since, seconds, as_of)


def overdue_jobs(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[JobId, ...]:
    """Return the queued jobs that may reserve capacity, the one that waits longest first."""
    if all(queue.reserve_after_seconds is None for queue in policy.queues):
        return ()
    return tuple(job.job_id for job in _overdue(_by_queue(state, policy, as_of), as_of))


def recent_uses(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Mapping[str, RecentUse]:
    """Return the recent GPU time of each project that has queued or running jobs in a queue with fair share."""
    projects: dict[QueuePolicy, set[str]] = {}
    if all(queue.scheduling_policy != "fair-share" for queue in policy.queues):
        return {}
    for job in state.jobs.values():
        attempt = last_attempt(job)
        is_active = queries.is_waiting(job) or (attempt is not None and attempt.ended_at is None)
        if is_active and job.queued is not None:
            project = job.queued.spec.project_id
            projects.setdefault(queue_of(policy.queues, project), set()).add(project)
    uses: dict[str, RecentUse] = {}
    for queue, names in projects.items():
        if queue.scheduling_policy == "fair-share":
            usage = RecentUsage(state, _minute(as_of), queue.half_life)
            hours = {name: gpu_hours(usage.of(project_owner(name))) for name in sorted(names)}
            average = sum(hours.values()) / len(hours)
            uses.update({name: RecentUse(queue.name, used, average) for name, used in hours.items()})
    return uses


def _ordered_ids(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> list[JobId]:
    by_queue = _by_queue(state, policy, as_of)
    overdue = _overdue(by_queue, as_of)
    first = {job.job_id for job in overdue}
    in_order = (_in_policy_order(queue, jobs, state, as_of) for queue, jobs in by_queue.items())
    waiting = ([job for job in jobs if job.job_id not in first] for jobs in in_order)
    # Not sorted by this key: it compares the first jobs of the queues.
    return [job.job_id for job in (*overdue, *merge(*waiting, key=_by_priority))]


def _by_queue(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Mapping[QueuePolicy, list[QueuedJob]]:
    by_queue: dict[QueuePolicy, list[QueuedJob]] = {}
    for job in queries.queue(state):
        since = waits_since(job)
        if job.queued is None or since is None:
            continue
        spec = job.queued.spec
        queue = queue_of(policy.queues, spec.project_id)
        waited_hours = max(0.0, (_minute(as_of) - since).total_seconds() / _HOUR_SECONDS) if queue.ages else 0.0
        priority = min(_PRIORITY_MAX, spec.priority + queue.aging_hourly_priority * waited_hours)
        entry = QueuedJob(spec.job_id, spec, job.queued.queued_at, since, max(priority, float(spec.priority)))
        by_queue.setdefault(queue, []).append(entry)
    for queue, jobs in by_queue.items():
        if len(jobs) > 1 and (queue.ages or queue.scheduling_policy == "fair-share"):
            note_whole(as_of, _MINUTE_SECONDS)
    return by_queue


def _overdue(by_queue: Mapping[QueuePolicy, list[QueuedJob]], as_of: datetime) -> list[QueuedJob]:
    overdue = [job for queue, jobs in by_queue.items() for job in jobs if is_overdue(job, queue, as_of)]
    return sorted(overdue, key=lambda job: (job.since, job.job_id))


def _in_policy_order(
    queue: QueuePolicy, jobs: Sequence[QueuedJob], state: ClusterState, as_of: datetime
) -> list[QueuedJob]:
    match queue.scheduling_policy:
        case "fcfs-strict" | "fcfs-best-effort":
            return sorted(jobs, key=lambda job: (job.queued_at, job.job_id))
        case "priority":
            return sorted(jobs, key=_by_aged_priority if queue.ages else _by_priority)
        case "fair-share":
            ordered = sorted(jobs, key=_by_aged_priority if queue.ages else _by_priority)
            usage = RecentUsage(state, _minute(as_of), queue.half_life)
            return [ordered[position] for position in fair_order([job.spec for job in ordered], usage)]
        case other:
            assert_never(other)


def _by_priority(job: QueuedJob) -> tuple[float, datetime, datetime, JobId]:
    return -job.priority, job.spec.start_by_at or queries.NO_START_DEADLINE, job.queued_at, job.job_id


def _by_aged_priority(job: QueuedJob) -> tuple[float, datetime, JobId]:
    """Without start deadlines: of two jobs that have both reached the highest priority the older one goes first."""
    return -job.priority, job.since, job.job_id


def _minute(as_of: datetime) -> datetime:
    at = plain(as_of)
    return at - timedelta(seconds=at.second, microseconds=at.microsecond)
