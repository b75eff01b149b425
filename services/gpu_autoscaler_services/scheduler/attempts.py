"""How the attempts of a placed job end. Pure; `core/queueing/schedule.py` begins the next one, README.md explains."""

from collections.abc import Collection
from datetime import datetime

from gpu_autoscaler.core.draft import Preemption
from gpu_autoscaler.core.next_change import has_lasted, plain
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.preemption import (
    barred_jobs,
    is_saving,
    may_need_priority,
    may_preempt_for_others,
    preemptions,
)
from gpu_autoscaler.core.queueing.schedule import Schedule
from gpu_autoscaler.core.state.queries import is_member, is_preempted, job_pods
from gpu_autoscaler.core.state.retries import moves, was_own_choice
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.core.state.tables import all_tombstones
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.preempt import beneficiary

# The end of a job cannot be taken back: before a loss without a known cause ends it, the scheduler waits this long for
# the plan that explains the loss. Streams are not ordered, and a restarted broker delivers within seconds.
CAUSE_SECONDS = 30.0


def losses(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> dict[JobId, list[Fact]]:
    """Return the ends of attempts, by job, that follow from lost pods; after the last retry also the end of the job.

    Read from the state, not from a single fact, so that a later call finds a loss that could not be answered before.
    Losses before the placement belong to an earlier attempt; members lost together are one loss. No attempt ends if
    the remaining members suffice (an elastic job), if the pod succeeded, or if only a list shows that the pod is gone:
    then how it ended is unknown.
    """
    ends: dict[JobId, list[Fact]] = {}
    stones = [stone for stone in all_tombstones(state.pods_gone) if stone.lost is not None]
    for stone in sorted(stones, key=lambda stone: (stone.gone_at, stone.version)):
        gone = stone.lost
        job = None if gone is None or gone.job_id is None else state.jobs.get(gone.job_id)
        if gone is None or gone.job_id is None or job is None or not _is_under_way(job):
            continue
        if gone.job_id in ends and not _is_elastic(job):  # of an elastic job the last lost member counts
            continue
        assert job.placed is not None, "an active job is placed"  # noqa: S101 - our bug
        if stone.gone_at > job.placed.placed_at and not _goes_on_without(state, job):
            ends[gone.job_id] = _after_loss(state, gone, gone.job_id, job.placed, stone.gone_at, policy, as_of)
    return {job_id: facts for job_id, facts in ends.items() if facts}


def _after_loss(
    state: ClusterState,
    gone: PodGone,
    job_id: JobId,
    placed: JobPlaced,
    lost_at: datetime,
    policy: ScalingPolicy,
    as_of: datetime,
) -> list[Fact]:
    """Return the end of the attempt, and of the job after its last retry; nothing while the cause may become known."""
    where = f" on node {gone.node_name}" if gone.node_name else ""
    cause = f"pod {gone.namespace}/{gone.name}{where} was lost{_why(state, gone)}"
    own = was_own_choice(state, gone, lost_at, placed)
    used_count, count_max = placed.retries_used + (not own), policy.job_retries_count_max
    preempted = JobPreempted(
        job_id=job_id,
        attempt=placed.attempt,
        cause=cause,
        preempted_at=lost_at,
        is_own_choice=bool(own),
        retries_used_count=used_count,
        pod_uid=gone.pod_uid,
    )
    if own or used_count <= count_max:
        return [preempted]
    if own is None and not has_lasted(lost_at, CAUSE_SECONDS, as_of):
        return []
    message = f"lost {used_count} attempts, job_retries_count_max is {count_max}; last: {cause}"
    if moved_count := moves(placed):
        message += f"; {moved_count} more by our own choice used up no retry"
    return [preempted, JobFinished(job_id=job_id, outcome="failed", finished_at=lost_at, message=message)]


def _goes_on_without(state: ClusterState, job: JobRecord) -> bool:
    """Return True if enough members of an elastic job are running or have succeeded."""
    if job.queued is None or not _is_elastic(job):
        return False
    pods = job_pods(state, job.queued.job_id)
    left_count = sum(1 for pod in pods if is_member(pod) and pod.node_name is not None)
    return left_count + job.completed_count >= job.queued.spec.gang_count


def _is_elastic(job: JobRecord) -> bool:
    return job.queued is not None and job.queued.spec.member_count_min is not None


def _is_under_way(job: JobRecord) -> bool:
    is_over = job.queued is None or job.finished is not None or job.cancel_requested is not None
    return job.placed is not None and not is_preempted(job) and not is_over


def _why(state: ClusterState, gone: PodGone) -> str:
    """Return the reason of the drain that evicted the pod; empty if there is none."""
    for drain in state.drains.values():
        reason = getattr(drain.decision, "reason", None)
        if gone.pod_uid in drain.evicted and reason is not None:
            return f": its node was drained ({reason.tag()})"
    return ""


# ---- ended as a whole


def preempted_attempts(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime, scheduled: Schedule, ending: Collection[JobId]
) -> list[JobPreempted]:
    """Return the end of each attempt that ends as a whole, for another job or to go back to spot, once it has saved or
    had the time to. Plans ask it to (`request_preemption_checkpoint`). The end is published first; the Job is suspended
    because of it (`suspension.py`), so a restart in between loses nothing.

    `ending`: jobs whose attempt ends in this tick anyway.
    """
    if not may_preempt_for_others(policy) and scheduled.returning is None:
        return []
    is_barred_known = may_need_priority(state, policy, scheduled.deferred)
    barred = barred_jobs(plan(state, policy, as_of).deferred) if is_barred_known else {}
    chosen = preemptions(state, policy, as_of, scheduled=scheduled, barred=barred)
    leaving = [victim for victim in chosen if victim.job_id not in ending]
    return [_end(victim, plain(as_of)) for victim in leaving if not is_saving(victim, state, policy, as_of)]


def _end(victim: Preemption, now: datetime) -> JobPreempted:
    for_job = beneficiary(victim.reason)
    return JobPreempted(
        job_id=victim.job_id,
        attempt=victim.attempt,
        cause=victim.reason.tag() if for_job is None else f"preempted for job {for_job}: {victim.reason.tag()}",
        preempted_at=now,
        preemption=victim.reason,
        is_own_choice=True,
        retries_used_count=victim.retries_used_count,
    )
