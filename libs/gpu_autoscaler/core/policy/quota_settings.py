"""Quotas of users and projects, and how projects share the GPUs. Limits of bought nodes are in `limit_settings.py`.

A nominal quota, a cohort, a borrowing and a lending limit mean what Kueue's nominalQuota, cohort, borrowingLimit and
lendingLimit of a ClusterQueue mean; the project is the ClusterQueue.
"""

from collections.abc import Iterator
from math import floor
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.policy.ranges import Count, Ratio, Seconds, about
from gpu_autoscaler.model.jobs import JobSpec

AllocationStrategy = Literal["static", "dynamic", "hybrid"]

_Hours = Annotated[float, Meta(ge=0)]
_DurationHours = Annotated[float, Meta(gt=0)]
_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_KUEUE = "Kueue, Cluster Queue"


class QuotaLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the jobs of one user or project may use. A job counts with all its members, a share of a GPU as one GPU."""

    gpu_count_max: Annotated[
        Count | None, about("Maximum number of GPUs of all its running jobs; unset: no limit.", "#quotas")
    ] = None
    month_gpu_hours_max: Annotated[
        _Hours | None,
        about(
            "Maximum GPU-hours of its jobs per UTC month; a job starts only if its whole time limit is left. "
            "Unset: no limit.",
            "#quotas",
        ),
    ] = None
    queue_count_max: Annotated[
        Count | None, about("Maximum number of its queued jobs; unset: only that of the policy applies.", "#quotas")
    ] = None
    job_duration_hours_max: Annotated[
        _DurationHours | None,
        about("Maximum time limit that its jobs may request; unset: that of the policy.", "#quotas"),
    ] = None


class UserQuota(QuotaLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The quota of one user."""

    name: Annotated[_Name, about("Name of the user, as in submitted_by of its jobs.", "#quotas")]


class ProjectQuota(QuotaLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The quota of one project, and its part of a cohort."""

    name: Annotated[_Name, about("Name of the project, as in project_id of its jobs.", "#quotas")]
    nominal_gpu_count: Annotated[
        Count | None, about("GPUs that are the project's own; unset: it is in no cohort.", f"{_KUEUE}, nominalQuota")
    ] = None
    cohort: Annotated[
        str,
        about("Projects of one cohort lend each other unused nominal quota; empty: none.", f"{_KUEUE}, Cohort",
              max_length=253),
    ] = "default"  # fmt: skip
    borrowing_gpu_count_max: Annotated[
        Count | None,
        about("Maximum number of GPUs above its nominal quota; unset: no limit.", f"{_KUEUE}, BorrowingLimit"),
    ] = None
    lending_gpu_count_max: Annotated[
        Count | None,
        about("Maximum number of its nominal GPUs that others may borrow; unset: all.", f"{_KUEUE}, LendingLimit"),
    ] = None


class QuotasPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quotas of users and projects."""

    strategy: Annotated[
        AllocationStrategy,
        about(
            "static: a project uses its nominal quota only; dynamic: unused nominal quota is shared within the cohort; "
            "hybrid: reserved_ratio of it is not.",
            "#quotas",
        ),
    ] = "dynamic"
    reserved_ratio: Annotated[
        Ratio, about("Share of each nominal quota that hybrid never lends, rounded down.", "#quotas")
    ] = 0.3
    is_reclaim_on: Annotated[
        bool,
        about(
            "If true, jobs that run on borrowed quota are preempted when the owner of the quota needs it.",
            "Kueue, Cluster Queue, Preemption, reclaimWithinCohort",
        ),
    ] = True
    is_priority_preemption_on: Annotated[
        bool,
        about(
            "If true, jobs of lower priority are preempted where a limit or availability bars the purchase of nodes.",
            "#preemption",
        ),
    ] = False
    checkpoint_seconds_max: Annotated[
        Seconds, about("Maximum time that a job has to save a checkpoint before it is preempted.", "#preemption")
    ] = 120.0
    yield_seconds_max: Annotated[
        Seconds,
        about("Maximum time that a preempted job waits for the start of the job it made room for.", "#preemption"),
    ] = 600.0
    project_default: Annotated[
        QuotaLimits, about("Limits of each project, where its own entry sets none.", "#quotas")
    ] = QuotaLimits()
    user_default: Annotated[QuotaLimits, about("Limits of each user, where its own entry sets none.", "#quotas")] = (
        QuotaLimits()
    )
    projects: Annotated[tuple[ProjectQuota, ...], about("Quotas of single projects.", "#quotas")] = ()
    users: Annotated[tuple[UserQuota, ...], about("Quotas of single users.", "#quotas")] = ()

    @property
    def is_set(self) -> bool:
        """True if any job may be limited."""
        unlimited = QuotaLimits()
        return bool(self.projects or self.users) or (self.project_default, self.user_default) != (unlimited, unlimited)


class Lender(msgspec.Struct, frozen=True, kw_only=True):
    """A project's part of its cohort, after the strategy."""

    project: str
    cohort: str  # empty: none
    nominal: int
    lendable: int  # of the nominal quota
    borrowable: int | None  # above the nominal quota; None: no limit

    @property
    def kept(self) -> int:
        """The nominal quota that no other project uses."""
        return self.nominal - self.lendable


def user_owner(user: str) -> str:
    """Return the owner key of a user; all jobs of unknown users have one owner."""
    return f"user/{user}"


def project_owner(project: str) -> str:
    """Return the owner key of a project."""
    return f"project/{project}"


def owners_with_limits(quotas: QuotasPolicy, project: str, user: str) -> tuple[tuple[str, QuotaLimits], ...]:
    """Return the owners of a job with their limits."""
    projects, users = _by_name(quotas)
    return (
        (project_owner(project), projects.get(project, quotas.project_default)),
        (user_owner(user), users.get(user, quotas.user_default)),
    )


def gpus_of(spec: JobSpec) -> int:
    """Return the GPUs that the job counts with: of all members, elastic ones too; a share counts as one GPU."""
    resources = spec.member_resources
    return spec.member_count * (resources.gpu_count + sum(count for _, count in resources.slices))


def month_gpu_seconds_max(limits: QuotaLimits) -> int | None:
    """Return the monthly limit in GPU-seconds; None: no limit."""
    return None if limits.month_gpu_hours_max is None else floor(limits.month_gpu_hours_max * 3600.0)


def owner_name(owner: str) -> str:
    """Return the owner as in a sentence."""
    kind, _, name = owner.partition("/")
    return f"{kind} {name}" if name else "jobs without a known user"


def gpus_within_reach(quotas: QuotasPolicy, project: str) -> tuple[int, str] | None:
    """Return the GPUs that the project could use if all others used none, and its cohort; None: no nominal quota."""
    lenders = lenders_of(quotas)
    mine = lenders.get(project)
    if mine is None:
        return None
    lent = sum(
        other.lendable
        for other in lenders.values()
        if mine.cohort and other.cohort == mine.cohort and other.project != project
    )
    return mine.nominal + (lent if mine.borrowable is None else min(lent, mine.borrowable)), mine.cohort


@cached_by_identity(4)
def lenders_of(quotas: QuotasPolicy) -> dict[str, Lender]:
    """Return each project with a nominal quota. Static lends and borrows nothing; hybrid keeps its reserved share."""
    return {quota.name: _lender(quota, quotas) for quota in quotas.projects if quota.nominal_gpu_count is not None}


def _lender(quota: ProjectQuota, quotas: QuotasPolicy) -> Lender:
    nominal = quota.nominal_gpu_count or 0
    is_alone = quotas.strategy == "static" or not quota.cohort
    reserved = floor(nominal * quotas.reserved_ratio) if quotas.strategy == "hybrid" else 0
    lendable = min(nominal - reserved, nominal if quota.lending_gpu_count_max is None else quota.lending_gpu_count_max)
    return Lender(
        project=quota.name,
        cohort="" if is_alone else quota.cohort,
        nominal=nominal,
        lendable=0 if is_alone else lendable,
        borrowable=0 if is_alone else quota.borrowing_gpu_count_max,
    )


@cached_by_identity(4)
def _by_name(quotas: QuotasPolicy) -> tuple[dict[str, QuotaLimits], dict[str, QuotaLimits]]:
    """Limits of projects and users with their defaults filled in."""
    return (
        {quota.name: _filled(quota, quotas.project_default) for quota in quotas.projects},
        {quota.name: _filled(quota, quotas.user_default) for quota in quotas.users},
    )


def _filled(quota: QuotaLimits, default: QuotaLimits) -> QuotaLimits:
    names = QuotaLimits.__struct_fields__
    own = {name: getattr(quota, name) for name in names}
    return QuotaLimits(**{name: getattr(default, name) if value is None else value for name, value in own.items()})


def quota_contradictions(quotas: QuotasPolicy) -> Iterator[str]:
    """Yield settings of cohorts that have no effect, or contradict each other."""
    for index, quota in enumerate(quotas.projects):
        at, nominal = f"quotas.projects[{index}]", quota.nominal_gpu_count
        limits = {name: getattr(quota, name) for name in ("borrowing_gpu_count_max", "lending_gpu_count_max")}
        for name in (name for name, value in limits.items() if value is not None):
            if nominal is None:
                yield f"{at}.{name}: has no effect without nominal_gpu_count; set it, or remove {name}"
            elif not quota.cohort:
                yield f"{at}.{name}: has no effect without a cohort; name one, or remove {name}"
        lent = quota.lending_gpu_count_max
        if nominal is not None and lent is not None and lent > nominal:
            yield f"{at}.lending_gpu_count_max: {lent} is above nominal_gpu_count {nominal}; lower it"
        if nominal is not None and quota.gpu_count_max is not None and nominal > quota.gpu_count_max:
            most = quota.gpu_count_max
            yield f"{at}.nominal_gpu_count: {nominal} is above gpu_count_max {most}; lower it or raise the other"
