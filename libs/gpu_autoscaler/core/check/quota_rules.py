"""Rules of the plan check for quotas: what is bought for queued jobs stays within the quotas of their owners."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime, timedelta

from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.quota_settings import ProjectQuota, QuotaLimits, QuotasPolicy
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.preempt import PriorityPreempted, QuotaReclaimed

FOR_ANOTHER = (QuotaReclaimed, PriorityPreempted)  # ends that give up the quota of a job

_EPOCH, _PART = datetime(1970, 1, 1, tzinfo=UTC), timedelta(hours=6)  # of `ClusterState.gpu_time`


def quota_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield quotas that the jobs with purchases would exceed together with all jobs that have their quota already.

    A quota that was lowered below what runs is no violation by itself: a purchase for its owner is.
    """
    quotas = policy.quotas
    if not plan.purchases or not quotas.is_set:
        return
    lost = lost_placements(state)
    bought = _jobs_bought_for(plan, state, lost)
    if not bought:
        return
    with_pods = {pod.job_id for pod in state.pods.values() if pod.phase not in ("succeeded", "failed")}
    running = [
        spec
        for job_id, job in state.jobs.items()
        if job_id not in bought and (spec := _kept_spec(job, lost, has_pods=job_id in with_pods))
    ]
    for kind in ("project", "user"):
        for owner in sorted({_owner(spec, kind) for spec in bought.values()}):
            jobs = [spec for spec in (*running, *bought.values()) if _owner(spec, kind) == owner]
            demand = tuple(f"job/{spec.job_id}" for spec in bought.values() if _owner(spec, kind) == owner)
            most, hours_max = _maxima(quotas, kind, owner)
            used = sum(map(_gpus, jobs))
            if most is not None and used > most:
                yield Violation(f"{kind} {owner} would use {used} GPUs of its quota of {most}", demand=demand)
            hours = _hours_of_month(jobs, kind, owner, state, plan.as_of) if hours_max is not None else 0.0
            if hours_max is not None and hours > hours_max + 1e-6:
                what = f"{hours:g} GPU-hours of {hours_max:g} this month"
                yield Violation(f"{kind} {owner} would use {what}", demand=demand)
    yield from _cohorts(quotas, running, bought.values())


def _jobs_bought_for(plan: Plan, state: ClusterState, lost: Collection[JobId]) -> dict[JobId, JobSpec]:
    """Return the queued jobs with GPUs that nodes are bought for and that have no quota yet."""
    keys = {key for decision in plan.purchases for key in getattr(decision.reason, "demand", ())}
    jobs = ((JobId(key.removeprefix("job/")), key) for key in sorted(keys) if key.startswith("job/"))
    records = ((job_id, state.jobs.get(job_id)) for job_id, _ in jobs)
    return {
        job_id: job.queued.spec
        for job_id, job in records
        if job is not None
        and job.queued is not None
        and _kept_spec(job, lost, has_pods=False) is None
        and _gpus(job.queued.spec)
    }


def lost_placements(state: ClusterState) -> set[JobId]:
    """Return the jobs whose placement no fact tells any more, but their pods or the loss of an attempt."""
    members = {pod.job_id for pod in state.pods.values() if pod.phase != "failed" and pod.deleting_since is None}
    return {
        job_id
        for job_id, job in state.jobs.items()
        if job.placed is None and (job.preempted is not None or job_id in members)
    }


def _kept_spec(job: JobRecord, lost: Collection[JobId], *, has_pods: bool) -> JobSpec | None:
    """Return the job if it has its quota: it was placed, has not ended, and was not preempted for another job, or its
    pods remain. `lost`: jobs whose placement is known by that alone."""
    if job.queued is None or job.finished is not None:
        return None
    if job.placed is None and job.queued.job_id not in lost:
        return None
    last, attempt = job.preempted, 0 if job.placed is None else job.placed.attempt
    is_out = last is not None and last.attempt >= attempt and isinstance(last.preemption, FOR_ANOTHER)
    return None if is_out and job.cancel_requested is None and not has_pods else job.queued.spec


def _gpus(spec: JobSpec) -> int:
    of_member = spec.member_resources.gpu_count + sum(count for _, count in spec.member_resources.slices)
    return of_member * spec.member_count


def _owner(spec: JobSpec, kind: str) -> str:
    return spec.project_id if kind == "project" else spec.submitted_by


def _maxima(quotas: QuotasPolicy, kind: str, owner: str) -> tuple[int | None, float | None]:
    """Return the maximum of GPUs and of monthly GPU-hours: the owner's own, else the default."""
    named: Iterable[QuotaLimits] = quotas.projects if kind == "project" else quotas.users
    own = next((quota for quota in named if getattr(quota, "name", None) == owner), None)
    default = quotas.project_default if kind == "project" else quotas.user_default
    both = [default] if own is None else [own, default]
    gpus = [quota.gpu_count_max for quota in both if quota.gpu_count_max is not None]
    hours = [quota.month_gpu_hours_max for quota in both if quota.month_gpu_hours_max is not None]
    return next(iter(gpus), None), next(iter(hours), None)


def _hours_of_month(jobs: list[JobSpec], kind: str, owner: str, state: ClusterState, as_of: datetime) -> float:
    """Return the GPU-hours of ended attempts and what these jobs may use until their time limit or the month's end."""
    begin = as_of.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    end = (begin + timedelta(days=32)).replace(day=1)
    past = state.gpu_time.get(f"{kind}/{owner}", state.gpu_time.get("others", {}))
    seconds = sum(used for part, used in past.items() if begin <= _EPOCH + part * _PART < end) / 1e6
    for spec in jobs:
        job = state.jobs[spec.job_id]
        is_over = job.preempted is not None and job.placed is not None and job.preempted.attempt >= job.placed.attempt
        since = as_of if job.placed is None or is_over else job.placed.placed_at
        until = min(since + timedelta(seconds=spec.duration_seconds_max), end)
        seconds += max(0.0, (until - max(since, begin)).total_seconds()) * _gpus(spec)
    return seconds / 3600.0


def _cohorts(quotas: QuotasPolicy, running: Iterable[JobSpec], bought: Iterable[JobSpec]) -> Iterator[Violation]:
    """Yield projects above their borrowing limit, and cohorts that use more than they lend."""
    used: Counter[str] = Counter()
    for spec in (*running, *bought):
        used[spec.project_id] += _gpus(spec)
    wanted = {spec.project_id: f"job/{spec.job_id}" for spec in bought}
    shared: Counter[str] = Counter()  # what is left of the lent quotas
    for quota in quotas.projects:
        if quota.nominal_gpu_count is None:
            continue
        nominal, mine = quota.nominal_gpu_count, used[quota.name]
        kept, borrowed_max = _kept(quota, quotas)
        if borrowed_max is not None and mine > nominal + borrowed_max and quota.name in wanted:
            what = f"{mine} GPUs, {mine - nominal} more than its nominal quota of {nominal}"
            yield Violation(
                f"project {quota.name} would use {what}; it may borrow {borrowed_max}", demand=(wanted[quota.name],)
            )
        shared[quota.cohort] += nominal - kept - max(0, mine - kept)
    for quota in quotas.projects:
        kept, _ = _kept(quota, quotas)
        beyond = quota.nominal_gpu_count is not None and used[quota.name] > kept
        if beyond and quota.name in wanted and quota.cohort and shared[quota.cohort] < 0:
            what = f"{-shared[quota.cohort]} GPUs more than its projects lend"
            yield Violation(f"cohort {quota.cohort} would use {what}", demand=(wanted[quota.name],))


def _kept(quota: ProjectQuota, quotas: QuotasPolicy) -> tuple[int, int | None]:
    """Return the nominal quota that is never lent, and the most that may be borrowed (None: no limit)."""
    nominal = quota.nominal_gpu_count or 0
    if quotas.strategy == "static" or not quota.cohort:
        return nominal, 0
    kept = 0 if quota.lending_gpu_count_max is None else nominal - quota.lending_gpu_count_max
    if quotas.strategy == "hybrid":
        kept = max(kept, int(nominal * quotas.reserved_ratio))
    return kept, quota.borrowing_gpu_count_max
