"""Requeue: a queued job that has quota and cannot start lets others take quota first, for a time that doubles.

As Kueue requeues a workload whose pods do not become ready (`waitForPodsReady`, `requeuingStrategy`). Without it, a job
that no capacity or limit ever serves would keep the jobs that wait for its quota from starting for ever.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from gpu_autoscaler.core.demand.quotas import is_requeued, last_attempt
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.quota_settings import lenders_of
from gpu_autoscaler.core.queueing.preemption import BARRING, queued_spec
from gpu_autoscaler.core.queueing.schedule import Schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import Deferred
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.defer import (
    NoDomainFits,
    PodConstraintsViolated,
    PriceUnknown,
    ResourceQuotaExceeded,
    VolumeNotReady,
)
from gpu_autoscaler.model.reasons.defer_limits import CohortQuotaReached, PoolPaused, QuotaReached
from gpu_autoscaler.model.reasons.defer_waits import GangIncomplete
from gpu_autoscaler.model.reasons.upkeep import QuotaUnused

# Source: the default of Kueue's `waitForPodsReady.timeout`. A shortage of capacity often passes within minutes.
WAIT_SECONDS = 300.0
_BARRING = (*BARRING, NoDomainFits, PodConstraintsViolated, PriceUnknown, VolumeNotReady, PoolPaused)
_HELD = (QuotaReached, CohortQuotaReached, ResourceQuotaExceeded)


def may_requeue(deferred: Sequence[Deferred]) -> bool:
    """True if a plan defers some jobs for want of quota, and others for want of capacity."""
    return bool(_of_jobs(deferred, _HELD)) and bool(_of_jobs(deferred, _BARRING))


def unused_quotas(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime, *, deferred: Sequence[Deferred], scheduled: Schedule
) -> Iterator[tuple[JobId, int, QuotaUnused]]:
    """Yield the jobs with quota that the plan cannot serve and no capacity is expected or reserved for, while another
    job waits for that quota: each with its last attempt, by id. `deferred`: by the plan; `scheduled`: of this state."""
    barred = {held.subject: held.reason.tag() for held in _of_jobs(deferred, _BARRING)}
    waiting = [spec for held in _of_jobs(deferred, _HELD) if (spec := queued_spec(state, held)) is not None]
    for held in sorted(_of_jobs(scheduled.deferred, GangIncomplete), key=lambda held: held.subject):
        spec = queued_spec(state, held)
        if spec is None or spec.job_id not in scheduled.granted or held.subject not in barred:
            continue
        job = state.jobs[spec.job_id]
        queued_at = spec.requested_at if job.queued is None else job.queued.queued_at
        waits_since = queued_at if job.preempted is None else max(queued_at, job.preempted.preempted_at)
        first = next((other for other in waiting if _shares_quota(spec, other, policy)), None)
        if first is None or is_requeued(state, job, as_of) or not has_lasted(waits_since, WAIT_SECONDS, as_of):
            continue
        reason = QuotaUnused(barred_by=barred[held.subject], waiting_job=first.job_id, waits_since=waits_since)
        yield spec.job_id, last_attempt(job), reason


def _of_jobs(deferred: Iterable[Deferred], kinds: type | tuple[type, ...]) -> list[Deferred]:
    return [held for held in deferred if held.subject.startswith("job/") and isinstance(held.reason, kinds)]


def _shares_quota(spec: JobSpec, other: JobSpec, policy: ScalingPolicy) -> bool:
    """True if a quota of the one may be that of the other: of project, user, cohort, or namespace."""
    lenders = lenders_of(policy.quotas)
    mine, others = lenders.get(spec.project_id), lenders.get(other.project_id)
    is_one_cohort = mine is not None and others is not None and mine.cohort and mine.cohort == others.cohort
    is_one_user = bool(spec.submitted_by) and spec.submitted_by == other.submitted_by
    return (
        spec.project_id == other.project_id or bool(is_one_cohort) or is_one_user or spec.namespace == other.namespace
    )
