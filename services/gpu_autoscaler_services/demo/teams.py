"""Figures of the teams that share quota, and the promises of quotas, checked against observed facts."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.disruption.protection import can_save, checkpointed_at
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.quota_settings import gpus_of, lenders_of
from gpu_autoscaler.events import job
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.preempt import PriorityPreempted, QuotaReclaimed
from gpu_autoscaler_services.demo.record import Record


class TeamFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one team used in a run, in cluster time."""

    project: str
    namespace: str
    nominal_gpu_count: int
    used_gpu_count_max: int
    borrowed_gpu_count_max: int
    jobs_completed: int
    jobs_preempted: int  # whose quota its owner took back
    requests_refused: tuple[str, ...]  # problem types
    gpu_hours: float  # of attempts, from placement to end
    gpu_hours_ratio: float  # of all teams; compare with its part of the nominal quota
    queue_wait_seconds_max: float | None
    allocated_micro_usd: int


class _Attempt(msgspec.Struct, frozen=True):
    project: str
    gpu_count: int
    begun_at: datetime


class _Usage:
    """GPUs of placed jobs over time. A preempted job counts until it is preempted: its pods may use them longer."""

    def __init__(self, record: Record) -> None:
        self.used_max: Counter[str] = Counter()  # by project
        self.gpu_seconds: Counter[str] = Counter()
        self.totals: list[tuple[JobId, Counter[str]]] = []  # GPUs by project after each placement
        self.specs: dict[JobId, JobSpec] = {fact.job_id: fact.spec for fact, _ in record.of(job.JobQueued)}
        self._running: dict[JobId, _Attempt] = {}
        for seen in sorted(record.seen, key=lambda seen: seen.stored_at):
            match seen.fact:
                case job.JobPlaced(job_id=job_id, placed_at=at) if job_id in self.specs:
                    self._place(job_id, at)
                case job.JobPreempted(job_id=job_id, preempted_at=at) | job.JobFinished(job_id=job_id, finished_at=at):
                    self._end(job_id, at)

    def _place(self, job_id: JobId, at: datetime) -> None:
        spec = self.specs[job_id]
        self._end(job_id, at)
        self._running[job_id] = _Attempt(spec.project_id, gpus_of(spec), at)
        used: Counter[str] = Counter()
        for attempt in self._running.values():
            used[attempt.project] += attempt.gpu_count
        self.used_max |= used
        self.totals.append((job_id, used))

    def _end(self, job_id: JobId, at: datetime) -> None:
        if (attempt := self._running.pop(job_id, None)) is not None:
            seconds = max(0.0, (at - attempt.begun_at).total_seconds())
            self.gpu_seconds[attempt.project] += seconds * attempt.gpu_count  # type: ignore[assignment]  # of seconds


def team_figures(
    record: Record, policy: ScalingPolicy, refused: Iterable[tuple[str, str]] = ()
) -> tuple[TeamFigures, ...]:
    """Return the figures of each project with a nominal quota that had jobs. `refused`: project and problem type."""
    usage, refusals = _Usage(record), tuple(refused)
    started = {fact.job_id: fact.started_at for fact, _ in reversed(tuple(record.of(job.JobStarted)))}
    outcomes = {fact.job_id: fact.outcome for fact, _ in record.of(job.JobFinished)}
    victims = {fact.job_id for fact, _ in record.of(job.JobPreempted) if fact.preemption is not None}
    costs: Counter[str] = Counter()
    for fact, _ in record.of(CostAccrued):
        for share in fact.shares:
            costs[share.project_id or ""] += share.allocated_micro_usd
    waits = {
        fact.job_id: round(max(0.0, (started[fact.job_id] - fact.queued_at).total_seconds()), 1)
        for fact, _ in record.of(job.JobQueued)
        if fact.job_id in started
    }
    lenders = lenders_of(policy.quotas)
    jobs = {name: [job_id for job_id, spec in usage.specs.items() if spec.project_id == name] for name in lenders}
    all_seconds = sum(usage.gpu_seconds[name] for name in lenders) or 1.0
    return tuple(
        TeamFigures(
            project=name,
            namespace=policy.tenancy.place(name).namespace,
            nominal_gpu_count=lender.nominal,
            used_gpu_count_max=usage.used_max[name],
            borrowed_gpu_count_max=max(0, usage.used_max[name] - lender.nominal),
            jobs_completed=sum(outcomes.get(job_id) == "completed" for job_id in jobs[name]),
            jobs_preempted=len(victims.intersection(jobs[name])),
            requests_refused=tuple(kind for project, kind in refusals if project == name),
            gpu_hours=round(usage.gpu_seconds[name] / 3600, 4),
            gpu_hours_ratio=round(usage.gpu_seconds[name] / all_seconds, 3),
            queue_wait_seconds_max=max(
                (round(waits[job_id], 1) for job_id in jobs[name] if job_id in waits), default=None
            ),
            allocated_micro_usd=costs[name],
        )
        for name, lender in lenders.items()
        if jobs[name]
    )


def broken_quotas(record: Record, policy: ScalingPolicy) -> Iterator[str]:
    """Yield each cohort that exceeds its nominal quota, and each job that lost more than its time to its owner."""
    usage, lenders = _Usage(record), lenders_of(policy.quotas)
    for cohort in sorted({lender.cohort for lender in lenders.values()}):
        members = [lender for lender in lenders.values() if lender.cohort == cohort]
        nominal = sum(member.nominal for member in members)
        for job_id, used in usage.totals:
            if (total := sum(used[member.project] for member in members)) > nominal:
                yield f"cohort {cohort} used {total} GPUs after the placement of {job_id}, but has {nominal}"
    yield from _broken_preemptions(record, usage.specs)


def _broken_preemptions(record: Record, specs: Mapping[JobId, JobSpec]) -> Iterator[str]:
    retries: dict[JobId, int] = {}
    outcomes = {fact.job_id: fact.outcome for fact, _ in record.of(job.JobFinished)}
    placed = {fact.job_id for fact, _ in record.of(job.JobPlaced)}
    pods: dict[JobId, list[PodObserved]] = {}
    for seen in record.seen:
        match seen.fact:
            case PodObserved(job_id=str() as job_id):
                pods.setdefault(job_id, []).append(seen.fact)
            case job.JobPlaced(job_id=job_id, retries_used=count):
                retries[job_id] = count
            case job.JobPreempted(job_id=job_id, preemption=QuotaReclaimed() | PriorityPreempted() as reason):
                if _is_unsaved(pods.get(job_id, ()), seen.fact.preempted_at):
                    yield f"job {job_id} was preempted for {reason.for_job} before it had saved"
                if seen.fact.retries_used != retries.get(job_id, 0):
                    yield f"job {job_id} lost a retry when it was preempted for {reason.for_job}"
                if reason.for_job not in placed:
                    yield f"job {job_id} was preempted in vain: {reason.for_job} never started"
                if job_id in specs and outcomes.get(job_id) not in ("completed", "cancelled"):
                    yield f"job {job_id} was preempted for {reason.for_job} and never completed"


# A pod that has just started may be unknown to the scheduler, and has nothing to lose. Source: our own.
_STARTED_BEFORE = timedelta(seconds=30)


def _is_unsaved(pods: Sequence[PodObserved], until: datetime) -> bool:
    """Return whether a pod that saves on request ran, and had no save by then."""
    last = {pod.pod_uid: pod for pod in pods if can_save(dict(pod.annotations))}
    ran = (pod for pod in last.values() if pod.started_at is not None and pod.started_at < until - _STARTED_BEFORE)
    saves = [checkpointed_at(dict(pod.annotations)) for pod in ran]
    return any(at is None or at > until for at in saves)
