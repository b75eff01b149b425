"""Quotas: which queued jobs their user or project may start now. Used by the plan and by the schedule alike.

Quota is granted in the order in which jobs are served, as in Kueue: a job that fits takes its quota before it has
nodes, a job that does not fit is passed by others, except in strict queues. A placed job keeps its quota until it ends,
or is preempted for another job; after the loss of a node it keeps it too, because its Job is not suspended.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.demand.resource_quotas import ResourceQuotaUsage
from gpu_autoscaler.core.demand.sources import is_unbound
from gpu_autoscaler.core.next_change import has_lasted, note, plain
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.quota_settings import (
    Lender,
    QuotaLimits,
    gpus_of,
    lenders_of,
    month_gpu_seconds_max,
    owner_name,
    owners_with_limits,
    project_owner,
    user_owner,
)
from gpu_autoscaler.core.state.ledger import period_end, period_start
from gpu_autoscaler.core.state.queries import (
    is_ended_whole,
    is_finished,
    is_moving,
    is_preempted,
    is_preempted_for_another,
    is_waiting,
    pod_index,
)
from gpu_autoscaler.core.state.state import ClusterState, JobRecord, UpkeepRecord
from gpu_autoscaler.core.state.usage_history import OTHERS, time_between
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.model.decisions import RequeueJob, upkeep_key
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec, Violation
from gpu_autoscaler.model.reasons.base import first_listed
from gpu_autoscaler.model.reasons.defer import ResourceQuotaExceeded
from gpu_autoscaler.model.reasons.defer_limits import CohortQuotaReached, PreemptedForJob, QuotaReached
from gpu_autoscaler.model.reasons.preempt import beneficiary

QuotaReason = QuotaReached | CohortQuotaReached | PreemptedForJob
Held = QuotaReason | ResourceQuotaExceeded

# Source: our own. Below the time for which an act is remembered, so that the back-off of the next requeue doubles.
TURN_SECONDS = 300.0
# Items of a job that has no pods yet.
_GRANTED = frozenset({DemandSource.QUEUED_JOB, DemandSource.ELASTIC_MEMBER})


def with_quota(
    demand: tuple[DemandItem, ...], state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> tuple[tuple[DemandItem, ...], frozenset[JobId]]:
    """Return the demand, and the queued jobs that got the policy's quotas; those that exceed a quota of the policy or
    a ResourceQuota use no capacity, and are deferred with the quota."""
    resource_quotas = ResourceQuotaUsage(state, policy)
    if not policy.quotas.is_set and resource_quotas.is_empty:
        return demand, frozenset()
    grants = _Grants(state, policy, as_of, resource_quotas)
    held = grants.held(demand)
    return tuple(
        item if (reason := held.get(item.key)) is None else msgspec.structs.replace(item, blocked=reason)
        for item in demand
    ), frozenset(grants.granted)


class _Grants:
    """Grants quota to queued jobs: in their order, but nominal quota before any is borrowed. Owners whose nominal quota
    is full only until their preempted jobs have ended come second; requeued jobs come last.

    A job gets all its quotas or none. Behind a job of a strict queue that gets none, no job of the queue gets any: it
    could not start, and might keep the first one from its quota for ever.
    """

    def __init__(
        self, state: ClusterState, policy: ScalingPolicy, as_of: datetime, resource_quotas: ResourceQuotaUsage
    ) -> None:
        self._state, self._policy, self._as_of = state, policy, as_of
        self._usage = QuotaUsage(state, policy, as_of)
        self._resource_quotas = resource_quotas
        self.granted: set[JobId] = set()
        self._held: dict[JobId, Held] = {}
        self._coming: dict[JobId, ResourceQuotaExceeded | None] = {}  # queued jobs whose pods are created anyway
        self._closed: set[str] = set()  # strict queues of which a job is held

    def held(self, demand: Sequence[DemandItem]) -> Mapping[str, Held]:
        """Return the items without quota, by key."""
        for item in demand:
            if item.source is DemandSource.PLACED_JOB and (job := self._job(item)) is not None:
                self._resource_quotas.take(job.spec, item.member_count)  # its pods are about to be created
        if not self._resource_quotas.is_empty:
            self._take_unseen()
            self._take_coming(demand)
        waiting = [item for item in demand if item.source in _GRANTED and item.blocked is None]
        first, last = self._by_turn(waiting)
        held = self._outcomes(first) | self._outcomes(last)
        return {key: reason for key, reason in held.items() if reason is not None}

    def _take_unseen(self) -> None:
        """Count running members that no fact of a pod shows yet: facts of jobs may arrive before facts of pods."""
        seen = pod_index(self._state).members
        for job_id, job in self._state.jobs.items():
            if job.queued is None or job.placed is None or job.finished is not None or is_waiting(job):
                continue
            unseen_count = len(job.placed.node_uids) - seen.get(job_id, 0)
            if unseen_count > 0 and not is_unbound(job):
                self._resource_quotas.take(job.queued.spec, unseen_count)

    def _take_coming(self, demand: Iterable[DemandItem]) -> None:
        """Count the pods of queued jobs that lost a node: their Jobs are not suspended, so the controllers create these
        pods before those of any job that starts now."""
        for item in demand:
            record = None if item.job_id is None else self._state.jobs.get(item.job_id)
            if item.source is not DemandSource.QUEUED_JOB or record is None or record.queued is None:
                continue
            if holds_quota(self._state, record) and not is_ended_whole(record):
                spec = record.queued.spec
                self._coming[spec.job_id] = self._resource_quotas.refusal(spec, item.member_count)
                self._resource_quotas.take(spec, item.member_count)

    def _by_turn(self, items: Iterable[DemandItem]) -> tuple[list[DemandItem], list[DemandItem]]:
        """Return the items in their turn, and those that come last: of requeued jobs, and of jobs behind them in a
        strict queue, which could not start either."""
        first, last, queues = list[DemandItem](), list[DemandItem](), set[str]()
        for item in items:
            job = None if item.job_id is None else self._state.jobs.get(item.job_id)
            if item.strict_queue in queues or (job is not None and is_requeued(self._state, job, self._as_of)):
                last.append(item)
                if item.strict_queue is not None:
                    queues.add(item.strict_queue)
            else:
                first.append(item)
        return first, last

    def _outcomes(self, waiting: list[DemandItem]) -> dict[str, Held | None]:
        """Grant quota to these items; return why an item gets none, or None, by key."""
        held: dict[str, Held | None] = {}
        for is_granted in (self._usage.is_nominal, self._usage.is_nominal_soon):
            postponed: list[DemandItem] = []
            queues: set[str] = set()  # strict ones of which a job is postponed
            for item in waiting:
                job = self._job(item)
                if job is None:
                    continue
                is_behind = item.strict_queue is not None and item.strict_queue in queues
                if item.source is DemandSource.QUEUED_JOB and not is_behind and is_granted(job.spec):
                    held[item.key] = self._grant(item, job)
                    continue
                postponed.append(item)
                if item.strict_queue is not None:
                    queues.add(item.strict_queue)
            waiting = postponed
        return held | {item.key: self._grant(item, job) for item in waiting if (job := self._job(item)) is not None}

    def _job(self, item: DemandItem) -> JobQueued | None:
        job = None if item.job_id is None else self._state.jobs.get(item.job_id)
        return None if job is None else job.queued

    def _grant(self, item: DemandItem, job: JobQueued) -> Held | None:
        """Take the quotas of the item; return why there are none, or None."""
        spec, record = job.spec, self._state.jobs[job.job_id]
        if item.source is DemandSource.ELASTIC_MEMBER:
            reason = self._held.get(spec.job_id) or self._resource_quotas.refusal(spec, item.member_count)
            if reason is None:
                self._resource_quotas.take(spec, item.member_count)
            return reason
        is_ending = is_moving(record) and remaining_count(self._state, spec.job_id)
        if item.strict_queue in self._closed or is_ending:  # the pods of a job that moves hold what it takes again
            return None
        needs_quota = not holds_quota(self._state, record)
        is_coming = spec.job_id in self._coming
        outcome: Held | None = (
            self._coming[spec.job_id] if is_coming else self._resource_quotas.refusal(spec, item.member_count)
        )
        # Then: what a ResourceQuota refuses reclaims no quota, and keeps none from others.
        if outcome is None and needs_quota:
            outcome = self._quota_reason(record, spec)
        elif outcome is None:
            outcome = ending_victim(self._state, record, self._policy)
        if outcome is not None:
            self._held[spec.job_id] = outcome
            if item.strict_queue is not None:
                self._closed.add(item.strict_queue)
        elif not is_coming:
            self._resource_quotas.take(spec, item.member_count)
        # Nobody borrows nominal quota that its owner waits for.
        is_owner_waiting = isinstance(outcome, CohortQuotaReached) and self._usage.is_nominal_soon(spec)
        if needs_quota and (outcome is None or is_owner_waiting):
            self._usage.add(spec)
        if needs_quota and outcome is None:
            self.granted.add(spec.job_id)
        return outcome

    def _quota_reason(self, job: JobRecord, spec: JobSpec) -> QuotaReason | None:
        """Return why the policy's quotas do not allow the job; None: they do."""
        awaited = awaited_job(self._state, job, self._policy, self._as_of)
        return awaited or self._usage.excess_of_limits(spec) or self._usage.excess_of_cohort(spec)


def holds_quota(state: ClusterState, job: JobRecord) -> bool:
    """True from the placement of the job until it ends, or is preempted for another one and its pods are gone. A job
    with pods was placed, even where that fact is lost with its stream."""
    if job.queued is None or job.finished is not None:
        return False
    if job.placed is None and job.preempted is None:
        return pod_index(state).members.get(job.queued.job_id, 0) > 0
    return not is_preempted_for_another(job) or remaining_count(state, job.queued.job_id) > 0


def remaining_count(state: ClusterState, job_id: JobId) -> int:
    """Return the pods of the job that still use capacity, or may be bound to a node."""
    return sum(1 for pod in state.pods.values() if pod.job_id == job_id and not is_finished(pod))


def is_requeued(state: ClusterState, job: JobRecord, as_of: datetime) -> bool:
    """True while a recorded requeue lets others take quota before this queued job."""
    known = _requeue_of(state, job)
    return known is not None and as_of < known.retry_at


def may_reclaim(state: ClusterState, job: JobRecord, as_of: datetime) -> bool:
    """True unless the job was requeued and has had its turn for less than TURN_SECONDS since: what uses its quota would
    end for a job that probably cannot start yet."""
    known = _requeue_of(state, job)
    return known is None or has_lasted(known.retry_at, TURN_SECONDS, as_of)


def _requeue_of(state: ClusterState, job: JobRecord) -> UpkeepRecord | None:
    return None if job.queued is None else state.upkeep.get(requeue_key(job.queued.job_id, last_attempt(job)))


def requeue_key(job_id: JobId, attempt: int) -> str:
    """Return the name of the act that requeues a job after this attempt."""
    return upkeep_key(RequeueJob.tag(), f"job/{job_id}", str(attempt))


def last_attempt(job: JobRecord) -> int:
    """Return the number of the job's last attempt; 0: it has not been placed."""
    return 0 if job.placed is None else job.placed.attempt


def ending_victim(state: ClusterState, job: JobRecord, policy: ScalingPolicy) -> PreemptedForJob | None:
    """Return why a queued job does not start although it holds quota: its attempt was ended as a whole, and its pods,
    which use the quota, end as its Job is suspended."""
    last = job.preempted
    if job.queued is None or last is None or last.preemption is None or not is_ended_whole(job):
        return None
    left_count = remaining_count(state, job.queued.job_id)
    if not left_count:
        return None
    until = last.preempted_at + timedelta(seconds=policy.quotas.yield_seconds_max)
    return PreemptedForJob(for_job=beneficiary(last.preemption), until=until, pods_remaining_count=left_count)


def awaited_job(state: ClusterState, job: JobRecord, policy: ScalingPolicy, as_of: datetime) -> PreemptedForJob | None:
    """Return the job for which this one was preempted while it waits, for a limited time; None: it may start again."""
    if not is_preempted_for_another(job) or job.preempted is None:
        return None
    for_job = beneficiary(job.preempted.preemption)
    other = None if for_job is None else state.jobs.get(for_job)
    if other is None or not is_waiting(other):
        return None
    seconds = policy.quotas.yield_seconds_max
    if has_lasted(job.preempted.preempted_at, seconds, as_of):
        return None
    until = job.preempted.preempted_at + timedelta(seconds=seconds)
    return PreemptedForJob(for_job=for_job, until=until)


def queue_violations(spec: JobSpec, state: ClusterState, policy: ScalingPolicy) -> tuple[Violation, ...]:
    """Return the quotas of queued jobs that one more job of these owners would exceed."""
    if not policy.quotas.is_set:
        return ()
    waiting = Counter(
        owner
        for job in state.jobs.values()
        if job.queued is not None and is_waiting(job)
        for owner in (project_owner(job.queued.spec.project_id), user_owner(job.queued.spec.submitted_by))
    )
    return tuple(
        Violation(
            "queue",
            f"is full for {owner_name(owner)}: {waiting[owner]} {'waits' if waiting[owner] == 1 else 'wait'}, "
            f"queue_count_max is {limits.queue_count_max}; retry when a job has started",
            "quota",
        )
        for owner, limits in owners_with_limits(policy.quotas, spec.project_id, spec.submitted_by)
        if limits.queue_count_max is not None and waiting[owner] >= limits.queue_count_max
    )


class QuotaUsage:
    """What users and projects use. Mutable: jobs are added in the order in which they get their quota."""

    def __init__(self, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> None:
        self._quotas, self._as_of = policy.quotas, as_of
        self._month_begin, self._month_end = period_start("month", as_of), period_end("month", as_of)
        self._ended = state.gpu_time
        self._lenders = lenders_of(policy.quotas)
        self._gpus: Counter[str] = Counter()
        # Reserved in this month by jobs that have not ended.
        self._gpu_seconds: defaultdict[str, float] = defaultdict(float)
        self._in_cohort: Counter[str] = Counter()  # GPUs by project, of projects with a nominal quota
        self._ending: Counter[str] = Counter()  # of these, GPUs of jobs that end for others; by project
        for job in state.jobs.values():
            if job.queued is not None and holds_quota(state, job):
                # The attempts before the next placement have ended.
                self.add(job.queued.spec, None if job.placed is None or is_preempted(job) else job.placed.placed_at)
                if is_preempted_for_another(job):
                    self._ending[job.queued.spec.project_id] += gpus_of(job.queued.spec)

    def add(self, spec: JobSpec, since: datetime | None = None) -> None:
        """Add a job that runs since then; None: it starts now."""
        gpu_count = gpus_of(spec)
        for owner, limits in self._limits_of(spec):
            self._gpus[owner] += gpu_count
            if limits.month_gpu_hours_max is not None:
                self._gpu_seconds[owner] += self._needed_gpu_seconds(spec, since)
        if spec.project_id in self._lenders:
            self._in_cohort[spec.project_id] += gpu_count

    def remove(self, spec: JobSpec) -> None:
        """Take a job that is preempted out of its cohort."""
        if spec.project_id in self._lenders:
            self._in_cohort[spec.project_id] -= gpus_of(spec)

    def restore(self, spec: JobSpec) -> None:
        """Undo `remove`."""
        if spec.project_id in self._lenders:
            self._in_cohort[spec.project_id] += gpus_of(spec)

    def excess_of_limits(self, spec: JobSpec) -> QuotaReached | None:
        """Return the limit of its project or user that the job would exceed; None: it keeps all of them."""
        reasons = (self._excess_of(owner, limits, spec) for owner, limits in self._limits_of(spec))
        return next((reason for reason in reasons if reason is not None), None)

    def excess_of_cohort(self, spec: JobSpec) -> CohortQuotaReached | None:
        """Return why the cohort has too little for the job; None: it has enough."""
        mine, gpu_count = self._lenders.get(spec.project_id), gpus_of(spec)
        if mine is None or not gpu_count or gpu_count <= self.available(mine):
            return None
        borrowers, _ = first_listed(other.project for other in self.borrowers(mine))
        return CohortQuotaReached(
            project=mine.project,
            cohort=mine.cohort,
            needed_gpu_count=gpu_count,
            used_gpu_count=self._in_cohort[mine.project],
            nominal_gpu_count=mine.nominal,
            available_gpu_count=max(0, self.available(mine)),
            borrowing_gpu_count_max=mine.borrowable,
            borrowed_by=borrowers,
        )

    def available(self, mine: Lender) -> int:
        """Return how many more GPUs the project may use: its own that it does not lend, and its part of what the
        cohort shares. Negative if it uses more than its limits allow.

        The arithmetic is that of Kueue's "Cohort".
        """
        used = self._in_cohort[mine.project]
        own = mine.nominal - used
        if not mine.cohort:
            return own
        shared = sum(other.lendable - self._from_shared(other) for other in self._members(mine))
        kept = max(0, mine.kept - used)
        total = kept + shared
        return total if mine.borrowable is None else min(total, own + mine.borrowable)

    def borrowers(self, mine: Lender) -> tuple[Lender, ...]:
        """Return the other projects of the cohort that use more than their nominal quota, by name."""
        others = (other for other in self._members(mine) if other.project != mine.project)
        return tuple(other for other in others if self.borrowed(other))

    def borrowed(self, lender: Lender) -> int:
        """Return the GPUs that the project uses beyond its nominal quota."""
        return max(0, self._in_cohort[lender.project] - lender.nominal)

    def is_nominal(self, spec: JobSpec) -> bool:
        """True if the job fits into the nominal quota of its project."""
        mine = self._lenders.get(spec.project_id)
        return mine is not None and self._in_cohort[mine.project] + gpus_of(spec) <= mine.nominal

    def is_nominal_soon(self, spec: JobSpec) -> bool:
        """True if the job fits into the nominal quota of its project once the jobs that end for others have ended."""
        mine = self._lenders.get(spec.project_id)
        if mine is None:
            return False
        return self._in_cohort[mine.project] - self._ending[mine.project] + gpus_of(spec) <= mine.nominal

    def _limits_of(self, spec: JobSpec) -> tuple[tuple[str, QuotaLimits], ...]:
        return owners_with_limits(self._quotas, spec.project_id, spec.submitted_by)

    def _members(self, mine: Lender) -> list[Lender]:
        if not mine.cohort:
            return [mine]
        return [self._lenders[name] for name in sorted(self._lenders) if self._lenders[name].cohort == mine.cohort]

    def _from_shared(self, lender: Lender) -> int:
        """GPUs that the project uses beyond what it keeps for itself."""
        return max(0, self._in_cohort[lender.project] - lender.kept)

    def _excess_of(self, owner: str, limits: QuotaLimits, spec: JobSpec) -> QuotaReached | None:
        gpu_count, most = gpus_of(spec), limits.gpu_count_max
        if not gpu_count:
            return None
        if most is not None and self._gpus[owner] + gpu_count > most:
            return QuotaReached(
                owner=owner, quota="gpu_count_max", used=self._gpus[owner], needed=gpu_count, limit=most
            )
        most_seconds = month_gpu_seconds_max(limits)
        if most_seconds is None:
            return None
        ended = self._ended.get(owner, self._ended.get(OTHERS, {}))
        used = time_between(ended, self._month_begin, self._month_end) / 1e6 + self._gpu_seconds[owner]
        needed = self._needed_gpu_seconds(spec, None)
        if used + needed <= most_seconds:
            return None
        # The rest of the month shrinks until what the job can use of it is left, at the latest to nothing.
        fits_at = self._month_end - timedelta(seconds=max(0.0, most_seconds - used) / gpu_count)
        note(self._as_of, max(fits_at, plain(self._as_of)))
        note(self._as_of, self._month_end)
        return QuotaReached(
            owner=owner,
            quota="month_gpu_hours_max",
            used=used / 3600.0,
            needed=gpu_count * spec.duration_seconds_max / 3600.0,
            limit=most_seconds / 3600.0,
            until=self._month_end,
        )

    def _needed_gpu_seconds(self, spec: JobSpec, since: datetime | None) -> float:
        """GPU-seconds of this month that the job may use until its time limit."""
        start = plain(self._as_of) if since is None else since
        end = min(start + timedelta(seconds=spec.duration_seconds_max), self._month_end)
        return gpus_of(spec) * max(0.0, (end - max(start, self._month_begin)).total_seconds())
