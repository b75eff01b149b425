"""Queues of jobs: which projects wait in which queue, and in which order its jobs start."""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.policy.ranges import Seconds, about

SchedulingPolicy = Literal["fcfs-strict", "fcfs-best-effort", "priority", "fair-share"]

HALF_LIFE_HOURS_DEFAULT = 168.0  # Slurm, Multifactor Priority Plugin, PriorityDecayHalfLife: 7 days
# Usage is kept for 60 days in parts of six hours (`core/state/usage_history.py`): longer half-lives would lose some of
# it, shorter ones would be coarse.
_HalfLife = Annotated[float, Meta(ge=24, le=336)]
_Points = Annotated[float, Meta(ge=0, le=100_000)]
_Name = Annotated[str, Meta(min_length=1, max_length=63)]


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A queue: the waiting jobs of some projects, in an order of their own. Queues share all capacity."""

    name: Annotated[_Name, about("Name of the queue, unique in the policy.", "#queues")]
    projects: Annotated[
        tuple[str, ...],
        about("Projects whose jobs wait in the queue; empty: all projects that no other queue names.", "#queues"),
    ] = ()
    scheduling_policy: Annotated[
        SchedulingPolicy,
        about(
            "Order of the jobs. fcfs-strict: by waiting time, and none passes another; fcfs-best-effort: by waiting "
            "time, jobs that fit pass jobs that do not; priority: by priority, start deadline and waiting time; "
            "fair-share: jobs of the project, then of its user, with the least recent GPU time first.",
            "#queues",
        ),
    ] = "priority"
    aging_hourly_priority: Annotated[
        _Points,
        about("Priority that a job gains per hour of waiting, up to 1000; equal ones go by waiting time.", "#queues"),
    ] = 0.0
    half_life_hours: Annotated[
        _HalfLife | None,
        about(
            "Time after which GPU time counts half for fair-share; unset: 168.",
            "Slurm, Multifactor Priority Plugin, PriorityDecayHalfLife",
        ),
    ] = None
    reserve_after_seconds: Annotated[
        Seconds | None,
        about(
            "Wait after which a job goes first, by waiting time, and reserves the capacity that running jobs will "
            "release; others pass it only if that does not delay it. Unset: never.",
            "#queues",
        ),
    ] = None

    @property
    def half_life(self) -> float:
        """The half-life of GPU time in hours."""
        return HALF_LIFE_HOURS_DEFAULT if self.half_life_hours is None else self.half_life_hours

    @property
    def is_strict(self) -> bool:
        """True if no job passes another."""
        return self.scheduling_policy == "fcfs-strict"

    @property
    def ages(self) -> bool:
        """True if waiting raises the priority."""
        return self.aging_hourly_priority > 0


DEFAULT_QUEUE = QueuePolicy(name="default")


def queue_of(queues: tuple[QueuePolicy, ...], project: str) -> QueuePolicy:
    """Return the queue of a project's jobs: the one that names it, else the one without projects, else the default."""
    return _by_project(queues).get(project) or _catch_all(queues)


@cached_by_identity(4)
def _by_project(queues: tuple[QueuePolicy, ...]) -> dict[str, QueuePolicy]:
    return {project: queue for queue in queues for project in queue.projects}


@cached_by_identity(4)
def _catch_all(queues: tuple[QueuePolicy, ...]) -> QueuePolicy:
    return next((queue for queue in queues if not queue.projects), DEFAULT_QUEUE)


def queue_violations(queues: tuple[QueuePolicy, ...]) -> Iterator[str]:
    """Yield projects of two queues, two queues of all other projects, and settings without effect."""
    owners: dict[str, str] = {}
    rest: str | None = None
    for index, queue in enumerate(queues):
        at = f"queues[{index}]"
        for project in queue.projects:
            if project in owners:
                yield f"{at}.projects: {project!r} is in queue {owners[project]!r} already; name it in one queue only"
            owners.setdefault(project, queue.name)
        if not queue.projects and rest is not None:
            yield (
                f"{at}.projects: is empty, and queue {rest!r} takes all other projects already; name the projects of"
                f" queue {queue.name!r}"
            )
        rest = queue.name if rest is None and not queue.projects else rest
        if queue.half_life_hours is not None and queue.scheduling_policy != "fair-share":
            yield f"{at}.half_life_hours: has no effect with {queue.scheduling_policy}; remove it, or use fair-share"
        if queue.ages and queue.scheduling_policy.startswith("fcfs"):
            yield (
                f"{at}.aging_hourly_priority: has no effect with {queue.scheduling_policy}, which goes by waiting"
                " time; remove it, or use priority or fair-share"
            )
