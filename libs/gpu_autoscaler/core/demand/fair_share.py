"""Fair share: which project, and which of its users, has used the least GPU time lately.

GPU time counts half per half-life of the queue. A running attempt counts for at least an hour, and so does each job
that goes first: a project that submits many jobs at once gets one start, then it is the turn of the others.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from gpu_autoscaler.core.policy.quota_settings import project_owner
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.state.usage_history import (
    WHOLE,
    gpus_of_member,
    last_attempt,
    member_owner,
    owners_of,
    time_in_parts,
    weighted,
)
from gpu_autoscaler.model.jobs import JobSpec

# Project default. With the time since its start alone, each job of a burst would find that the last one used nothing.
ASSUMED_HOURS = 1
_HOUR_MICROSECONDS = 3_600_000_000
_ASSUMED = timedelta(hours=ASSUMED_HOURS)


class RecentUse(NamedTuple):
    """Recent GPU time of a project, and the average of the projects with jobs in its queue."""

    queue: str
    used_gpu_hours: float
    average_gpu_hours: float

    def sentence(self) -> str:
        """Return both, and what follows."""
        side = "below" if self.used_gpu_hours < self.average_gpu_hours else "not below"
        return (
            f"Its project used {self.used_gpu_hours:,.1f} GPU-hours lately, {side} the average of"
            f" {self.average_gpu_hours:,.1f} in queue {self.queue} (fair-share)."
        )


class RecentUsage:
    """GPU time of all owners at one instant, running attempts included, in weighted microseconds."""

    def __init__(self, state: ClusterState, as_of: datetime, half_life_hours: float) -> None:
        self._state = state
        self._as_of = as_of
        self._half_life = half_life_hours
        self._ended: dict[str, int] = {}
        self._running = _running_of(state, as_of, half_life_hours)

    def of(self, owner: str) -> int:
        """Return the weighted microseconds of the owner."""
        if owner not in self._ended:
            usage = self._state.gpu_time.get(owner, {})
            self._ended[owner] = weighted(usage, self._as_of, self._half_life)
        return self._ended[owner] + self._running.get(owner, 0)


def _running_of(state: ClusterState, as_of: datetime, half_life_hours: float) -> Mapping[str, int]:
    running: dict[str, int] = {}
    for job in state.jobs.values():
        attempt = last_attempt(job)
        if attempt is None or attempt.ended_at is not None or job.queued is None:
            continue
        until = max(as_of, attempt.placed_at + _ASSUMED)
        amount = attempt.gpu_count * weighted(dict(time_in_parts(attempt.placed_at, until)), as_of, half_life_hours)
        for owner in owners_of(job.queued.spec):
            running[owner] = running.get(owner, 0) + amount
    return running


def fair_order(specs: Sequence[JobSpec], usage: RecentUsage) -> list[int]:
    """Return the positions of jobs, which come in the order within one user, in turns: the project with the least GPU
    time goes first, and of it the user with the least. Of equals the one whose next job comes first in `specs`."""
    users: dict[tuple[str, str], list[_Entry]] = {}
    for position, spec in enumerate(specs):
        gpu_count = spec.gang_count * gpus_of_member(spec)
        entry = _Entry(position, gpu_count * ASSUMED_HOURS * _HOUR_MICROSECONDS * WHOLE)
        users.setdefault((spec.project_id, spec.submitted_by), []).append(entry)
    projects: dict[str, list[tuple[int, list[_Entry]]]] = {}
    for (project, user), entries in users.items():
        projects.setdefault(project, []).append((usage.of(member_owner(project, user)), entries))
    merged = _in_turns([(usage.of(project_owner(name)), _in_turns(parts)) for name, parts in projects.items()])
    return [entry.position for entry in merged]


class _Entry(NamedTuple):
    position: int
    assumed: int  # GPU time that its start is assumed to use


def _in_turns(parts: Sequence[tuple[int, list[_Entry]]]) -> list[_Entry]:
    """Merge the jobs of several owners, each with the GPU time used so far; each job adds to that of its owner."""
    waiting = [(used, entries[0].position, number, 0) for number, (used, entries) in enumerate(parts)]
    heapify(waiting)
    merged: list[_Entry] = []
    while waiting:
        used, _, number, taken = waiting[0]
        entries = parts[number][1]
        merged.append(entries[taken])
        if taken + 1 < len(entries):
            heapreplace(waiting, (used + entries[taken].assumed, entries[taken + 1].position, number, taken + 1))
        else:
            heappop(waiting)
    return merged


def gpu_hours(amount: int) -> float:
    """Return weighted microseconds in hours."""
    return amount / WHOLE / _HOUR_MICROSECONDS
