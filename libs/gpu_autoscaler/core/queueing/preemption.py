"""Preemption: which running jobs end an attempt so that another job can start, or to go back to spot
(`core/disruption/spot_returns.py`). Used by the scheduler; a plan asks the jobs that can to save before.

A project reclaims its nominal quota from projects of its cohort that borrow it. A job of higher priority takes the
capacity of jobs of lower priority only where buying is barred by a limit or by availability; otherwise nodes are
bought. Victims are of the lowest priority first, then those with the latest checkpoint. No protected job is a victim,
and none ends in vain: together the victims make room for the whole gang, and each of them is needed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache

import msgspec

from gpu_autoscaler.core.demand.quotas import QuotaUsage, holds_quota, may_reclaim
from gpu_autoscaler.core.disruption.protection import can_save, checkpointed_at, has_answered, pod_mark, save_request
from gpu_autoscaler.core.draft import Preemption, save_key
from gpu_autoscaler.core.next_change import has_lasted, plain
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.quota_settings import Lender, gpus_of, lenders_of
from gpu_autoscaler.core.queueing.schedule import Schedule, schedule
from gpu_autoscaler.core.state.lineage import hand_on
from gpu_autoscaler.core.state.queries import is_finished, is_preempted_for_another, is_waiting
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Deferred
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.defer import NoOfferFits, OffersUnavailable
from gpu_autoscaler.model.reasons.defer_limits import (
    CohortQuotaReached,
    GpusLimit,
    HourlyPriceLimit,
    NodesLimit,
    OverrideReached,
    SpendLimit,
)
from gpu_autoscaler.model.reasons.defer_waits import GangIncomplete
from gpu_autoscaler.model.reasons.preempt import PreemptReason, PriorityPreempted, QuotaReclaimed

# Reasons of a plan that bar a purchase. Others (a batch window, a cool-down, a freeze) pass, or are set by a person.
BARRING = (NodesLimit, GpusLimit, HourlyPriceLimit, SpendLimit, OverrideReached, OffersUnavailable, NoOfferFits)
VICTIMS_COUNT_MAX = 32  # for one job; each candidate for its priority is tried with a schedule of its own


class _Candidate(msgspec.Struct, frozen=True, kw_only=True):
    spec: JobSpec
    attempt: int
    retries_used_count: int
    order: tuple[bool, int, float, float, str]  # the lowest is preempted first
    pods: tuple[PodObserved, ...]


def barred_jobs(deferred: Iterable[Deferred]) -> dict[JobId, str]:
    """Return the jobs for which a plan buys nothing because of a limit or of availability, with the reason's tag."""
    return {
        JobId(held.subject.removeprefix("job/")): held.reason.tag()
        for held in deferred
        if held.subject.startswith("job/") and isinstance(held.reason, BARRING)
    }


def may_need_priority(state: ClusterState, policy: ScalingPolicy, deferred: Sequence[Deferred]) -> bool:
    """True if a job waits for capacity that jobs of lower priority have: then a plan tells whether buying is barred."""
    if not policy.quotas.is_priority_preemption_on:
        return False
    running = [job.queued.spec.priority for job in state.jobs.values() if job.queued is not None and _is_running(job)]
    waiting = (queued_spec(state, held) for held in deferred if isinstance(held.reason, GangIncomplete))
    return bool(running) and any(spec is not None and spec.priority > min(running) for spec in waiting)


def preemptions(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime, *, scheduled: Schedule, barred: Mapping[JobId, str]
) -> tuple[Preemption, ...]:
    """Return the attempts that are to end once they have saved. `scheduled`: of this state; `barred`: of the plan. Jobs
    that a plan has asked to save stay the first choice. While nobody needs capacity, a job goes back to spot."""
    for_others = _reclaims(state, policy, as_of, scheduled) if policy.quotas.is_reclaim_on else ()
    if not for_others and policy.quotas.is_priority_preemption_on:
        for_others = _by_priority(state, policy, as_of, scheduled.deferred, barred)
    return for_others or (() if scheduled.returning is None else (scheduled.returning,))


def may_preempt_for_others(policy: ScalingPolicy) -> bool:
    """Return True if the policy allows that an attempt ends for another job."""
    quotas = policy.quotas
    return quotas.is_priority_preemption_on or (quotas.is_reclaim_on and bool(lenders_of(quotas)))


# ---- the save before the end


def unasked_pods(victim: Preemption, state: ClusterState) -> tuple[PodObserved, ...]:
    """Return the pods of the attempt that save on request and were not asked since a plan chose it."""
    decided_at = _decided_at(victim, state)
    return tuple(pod for pod in _saving(victim) if decided_at is None or not _is_asked(pod, decided_at))


def is_saving(victim: Preemption, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> bool:
    """True while a pod of the attempt may still save: it was not asked, or has neither answered its last request nor
    used its time. The last request may be a periodic one that came later: to end now would lose what is being saved.

    Without a plan that asks, the attempt goes on.
    """
    decided_at = _decided_at(victim, state)
    if decided_at is None or unasked_pods(victim, state):
        return bool(_saving(victim))
    seconds = policy.quotas.checkpoint_seconds_max
    return any(
        (request := save_request(annotations)) is not None
        and not has_answered(annotations, request.requested_at)
        and not has_lasted(request.requested_at, seconds, as_of)
        for annotations in (dict(pod.annotations) for pod in _saving(victim))
    )


def _saving(victim: Preemption) -> tuple[PodObserved, ...]:
    return tuple(
        pod
        for pod in victim.pods
        if pod.phase == "running" and pod.deleting_since is None and pod.node_name and can_save(dict(pod.annotations))
    )


def _is_asked(pod: PodObserved, decided_at: datetime) -> bool:
    request = save_request(dict(pod.annotations))
    return request is not None and request.requested_at >= decided_at


def _decided_at(victim: Preemption, state: ClusterState) -> datetime | None:
    known = state.upkeep.get(save_key(victim.job_id, victim.attempt))
    return None if known is None else known.decided_at


# ---- nominal quota


def _reclaims(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime, scheduled: Schedule
) -> tuple[Preemption, ...]:
    """Return the victims for the jobs that wait for nominal quota of their project which others borrow."""
    specs = (queued_spec(state, held) for held in scheduled.deferred if isinstance(held.reason, CohortQuotaReached))
    waiting = [spec for spec in specs if spec is not None and may_reclaim(state, state.jobs[spec.job_id], as_of)]
    if not waiting:
        return ()
    usage, lenders = _usage(state, policy, as_of, scheduled.granted), lenders_of(policy.quotas)
    before = _usage(state, policy, as_of, scheduled.granted)  # with the victims: they have not ended yet
    running = _usage(state, policy, as_of, ())
    candidates = _candidates(state, as_of)
    chosen: list[Preemption] = []
    for spec in waiting:
        mine = lenders[spec.project_id]
        if not before.is_nominal(spec):
            continue
        borrowed = {name: running.borrowed(lender) for name, lender in lenders.items()}
        for victim in _borrowers_for(spec, usage, running, candidates, lenders):
            candidates.remove(victim)
            running.remove(victim.spec)
            reason = QuotaReclaimed(
                for_job=spec.job_id,
                for_project=spec.project_id,
                project=victim.spec.project_id,
                cohort=mine.cohort,
                borrowed_gpu_count=borrowed[victim.spec.project_id],
                nominal_gpu_count=mine.nominal,
            )
            chosen.append(_preemption(victim, reason))
        usage.add(spec)
        before.add(spec)
    return tuple(chosen)


def _usage(state: ClusterState, policy: ScalingPolicy, as_of: datetime, granted: Collection[JobId]) -> QuotaUsage:
    """Return what will be used soon: with queued jobs that have their quota, without jobs that end for others."""
    usage = QuotaUsage(state, policy, as_of)
    for job_id, job in state.jobs.items():
        if job.queued is not None and job_id in granted:
            usage.add(job.queued.spec)
        elif job.queued is not None and is_preempted_for_another(job) and holds_quota(state, job):
            usage.remove(job.queued.spec)
    return usage


def _borrowers_for(
    spec: JobSpec,
    usage: QuotaUsage,
    running: QuotaUsage,
    candidates: Iterable["_Candidate"],
    lenders: Mapping[str, Lender],
) -> list["_Candidate"]:
    """Return the borrowers that end so that the job has its nominal quota, and take them out of the usage; none if all
    of them together do not suffice. A project borrows if what is running does, without queued jobs that have quota."""
    cohort, victims = lenders[spec.project_id].cohort, list[_Candidate]()
    for candidate in candidates:
        if usage.excess_of_cohort(spec) is None:
            break
        other = lenders.get(candidate.spec.project_id)
        if other is None or other.cohort != cohort or other.project == spec.project_id:
            continue
        taken = sum(gpus_of(victim.spec) for victim in victims if victim.spec.project_id == other.project)
        if gpus_of(candidate.spec) and usage.borrowed(other) and running.borrowed(other) > taken:
            usage.remove(candidate.spec)
            victims.append(candidate)
    if usage.excess_of_cohort(spec) is not None:
        for victim in victims:
            usage.restore(victim.spec)
        return []
    for victim in tuple(victims[:-1]):  # the first ones may be unnecessary beside a larger last one
        usage.restore(victim.spec)
        if usage.excess_of_cohort(spec) is None:
            victims.remove(victim)
        else:
            usage.remove(victim.spec)
    return victims


# ---- priority


def _by_priority(
    state: ClusterState,
    policy: ScalingPolicy,
    as_of: datetime,
    deferred: Sequence[Deferred],
    barred: Mapping[JobId, str],
) -> tuple[Preemption, ...]:
    """Return the victims for the first barred job that they let start. Victims that are ending already count first."""
    held_jobs = [held for held in deferred if isinstance(held.reason, GangIncomplete)]
    waiting = [spec for held in held_jobs if (spec := queued_spec(state, held)) is not None and spec.job_id in barred]
    if not waiting:
        return ()
    ending = {job_id for job_id, job in state.jobs.items() if is_preempted_for_another(job)}
    lower = [candidate for candidate in _candidates(state, as_of) if candidate.pods]

    # Jobs of one priority have the same candidates: all that wait are tried with one schedule.
    @cache
    def started(without: frozenset[JobId]) -> frozenset[JobId]:
        after = _without(state, ending | without, as_of)
        return frozenset(placement.job_id for placement in schedule(after, policy, as_of).placements)

    def starts(job_id: JobId, without: Iterable[JobId]) -> bool:
        return job_id in started(frozenset(without))

    for spec in waiting:
        candidates = [each for each in lower if each.spec.priority < spec.priority][:VICTIMS_COUNT_MAX]
        victims = _needed(spec.job_id, candidates, starts)
        if victims is None:
            continue
        return tuple(
            _preemption(
                victim,
                PriorityPreempted(
                    for_job=spec.job_id,
                    for_priority=spec.priority,
                    priority=victim.spec.priority,
                    barred_by=barred[spec.job_id],
                ),
            )
            for victim in victims
        )
    return ()


def _needed(
    job_id: JobId, candidates: Sequence[_Candidate], starts: Callable[[JobId, Iterable[JobId]], bool]
) -> list[_Candidate] | None:
    """Return the fewest first candidates that let the job start, without those it does not need; None: all together do
    not suffice."""
    if not starts(job_id, [candidate.spec.job_id for candidate in candidates]):
        return None
    low, high = 0, len(candidates)  # `high` candidates suffice
    while low < high:
        middle = (low + high) // 2
        if starts(job_id, [candidate.spec.job_id for candidate in candidates[:middle]]):
            high = middle
        else:
            low = middle + 1
    victims = list(candidates[:high])
    for victim in tuple(victims[:-1]):
        others = [other.spec.job_id for other in victims if other is not victim]
        if starts(job_id, others):
            victims.remove(victim)
    return victims


def _without(state: ClusterState, ended: Collection[JobId], as_of: datetime) -> ClusterState:
    """Return the state as if these jobs had ended."""
    jobs = dict(state.jobs)
    for job_id in ended:
        end = JobFinished(job_id=job_id, outcome="cancelled", finished_at=plain(as_of))
        jobs[job_id] = msgspec.structs.replace(jobs[job_id], finished=end)
    gone = frozenset(uid for uid, pod in state.pods.items() if pod.job_id in ended)
    pods = {uid: pod for uid, pod in state.pods.items() if uid not in gone}
    after = msgspec.structs.replace(state, jobs=jobs, pods=pods)
    hand_on(state, after, {"jobs": frozenset(ended), "pods": gone})
    return after


# ---- candidates


def _candidates(state: ClusterState, as_of: datetime) -> list[_Candidate]:
    """Return the jobs that may be preempted, in this order: asked to save for it, lowest priority, latest checkpoint,
    latest placement."""
    pods: dict[JobId, list[PodObserved]] = {}
    for pod in state.pods.values():
        if pod.job_id is not None and not is_finished(pod):
            pods.setdefault(pod.job_id, []).append(pod)
    budgets = tuple(state.budgets.values())
    found: list[_Candidate] = []
    for job_id, job in state.jobs.items():
        if job.queued is None or job.placed is None or not _is_running(job):
            continue
        own = sorted(pods.get(job_id, ()), key=lambda pod: pod.pod_uid)
        if _is_protected(job.queued.spec) or any(pod_mark(pod, budgets, as_of) for pod in own):
            continue
        saved_at = _saved_at(own)
        order = (
            save_key(job_id, job.placed.attempt) not in state.upkeep,
            job.queued.spec.priority,
            float("inf") if saved_at is None else -saved_at.timestamp(),
            -job.placed.placed_at.timestamp(),
            job_id,
        )
        placed = job.placed
        found.append(
            _Candidate(
                spec=job.queued.spec,
                attempt=placed.attempt,
                retries_used_count=placed.retries_used,
                order=order,
                pods=tuple(own),
            )
        )
    return sorted(found, key=lambda candidate: candidate.order)


def _is_running(job: JobRecord) -> bool:
    is_over = job.finished is not None or job.cancel_requested is not None
    return job.placed is not None and not is_over and not is_waiting(job)


def _is_protected(spec: JobSpec) -> bool:
    """True for a job that must not be interrupted; marks of its pods count too, once they exist."""
    marks = (spec.pod_annotations.get(key) for key in (labels.DO_NOT_DISRUPT, labels.KARPENTER_DO_NOT_DISRUPT))
    return not spec.is_preemptible or any(mark not in (None, "false") for mark in marks)


def _saved_at(pods: Iterable[PodObserved]) -> datetime | None:
    """Return since when every pod of the job has a checkpoint; None: some pod has none."""
    saves = [checkpointed_at(dict(pod.annotations)) for pod in pods]
    known = [save for save in saves if save is not None]
    return min(known) if known and len(known) == len(saves) else None


def queued_spec(state: ClusterState, held: Deferred) -> JobSpec | None:
    """Return the spec of the deferred job; None: no accepted job is known."""
    job = state.jobs.get(JobId(held.subject.removeprefix("job/")))
    return None if job is None or job.queued is None else job.queued.spec


def _preemption(victim: _Candidate, reason: PreemptReason) -> Preemption:
    return Preemption(
        job_id=victim.spec.job_id,
        attempt=victim.attempt,
        retries_used_count=victim.retries_used_count,
        reason=reason,
        pods=victim.pods,
    )
