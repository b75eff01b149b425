"""Requeue: a queued job that has quota and cannot start lets others take quota first, for a time that doubles.

As Kueue requeues a workload whose pods do not become ready (`waitForPodsReady`, `requeuingStrategy`). Without it, a job
that no capacity or limit ever serves would keep the jobs that wait for its quota from starting for ever.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from gpu_autoscaler.core.demand.quotas import is_requeued, last_attempt
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.quota_settings import lenders_of, project_owner, user_owner
from gpu_autoscaler.core.queueing.preemption import BARRING, queued_spec
from gpu_autoscaler.core.queueing.schedule import Schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import Deferred
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.defer import (
    DeferReason,
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
    waiting = {_quota_of(held.reason): held for held in reversed(_of_jobs(deferred, _HELD))}  # the first of each quota
    for held in sorted(_of_jobs(scheduled.deferred, GangIncomplete), key=lambda held: held.subject):
        spec = queued_spec(state, held)
        if spec is None or spec.job_id not in scheduled.granted or held.subject not in barred:
            continue
        job = state.jobs[spec.job_id]
        queued_at = spec.requested_at if job.queued is None else job.queued.queued_at
        waits_since = queued_at if job.preempted is None else max(queued_at, job.preempted.preempted_at)
        first = next((waiting[quota] for quota in _quotas_of(spec, policy) if quota in waiting), None)
        if first is None or is_requeued(state, job, as_of) or not has_lasted(waits_since, WAIT_SECONDS, as_of):
            continue
        waiting_job = JobId(first.subject.removeprefix("job/"))
        reason = QuotaUnused(barred_by=barred[held.subject], waiting_job=waiting_job, waits_since=waits_since)
        yield spec.job_id, last_attempt(job), reason


def _of_jobs(deferred: Iterable[Deferred], kinds: type | tuple[type, ...]) -> list[Deferred]:
    return [held for held in deferred if held.subject.startswith("job/") and isinstance(held.reason, kinds)]


def _quota_of(reason: DeferReason) -> str:
    """Return the name of the quota that keeps a job waiting."""
    match reason:
        case QuotaReached():
            return reason.owner
        case CohortQuotaReached():
            return f"cohort/{reason.cohort}" if reason.cohort else project_owner(reason.project)
        case ResourceQuotaExceeded():
            return f"namespace/{reason.quota.partition('/')[0]}"
        case _:
            return ""


def _quotas_of(spec: JobSpec, policy: ScalingPolicy) -> tuple[str, ...]:
    """Return the names of the quotas that the job takes."""
    lender = lenders_of(policy.quotas).get(spec.project_id)
    cohort = () if lender is None else (f"cohort/{lender.cohort}",)
    return *cohort, project_owner(spec.project_id), user_owner(spec.submitted_by), f"namespace/{spec.namespace}"
