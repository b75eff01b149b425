"""Reservations: capacity kept for the job that has waited longest, and what others may use of it meanwhile.

EASY backfill (D. G. Feitelson and A. M. Weil, "Utilization and Predictability in Scheduling the IBM SP2 with
Backfilling", 1998): the job gets the earliest instant at which enough running jobs have reached their time limits.
Another job starts before it only if it ends by then, or uses what the reservation leaves free then.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem
from gpu_autoscaler.core.demand.sources import job_spec
from gpu_autoscaler.core.next_change import note_always, plain
from gpu_autoscaler.core.nodes.views import NodeView, bin_key
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.provisioning.expected_capacity import ends_at
from gpu_autoscaler.core.state.queries import counts_for_idleness, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.defer_waits import CapacityReserved, ReservationHeld
from gpu_autoscaler.model.resources import NO_RESOURCES, Resources

# From placement to the start of the pods, from which their time limit counts. Source: project default.
START_SECONDS_MAX = 60.0
_START = timedelta(seconds=START_SECONDS_MAX)

Place = Callable[[FreeCapacity], tuple[str, ...]]


class Release(NamedTuple):
    """What a job gives back on one node, at the latest."""

    at: datetime
    key: str  # of the bin
    resources: Resources
    is_moving: bool = False  # the job has not started: the instant moves on until it does


def latest_end(item: DemandItem, as_of: datetime) -> datetime | None:
    """Return when a job that starts now has ended at the latest; None: it has no time limit."""
    if item.work_seconds_max is None:
        return None
    return plain(as_of) + _START + timedelta(seconds=item.work_seconds_max)


def releases_of_pods(
    state: ClusterState, views: Iterable[NodeView], free_capacity: FreeCapacity, as_of: datetime
) -> Iterator[Release]:
    """Yield what the pods of jobs give back by their time limits, on nodes that stay. Other pods have no limit."""
    pods = pods_by_node(state)
    for view in views:
        key = bin_key(view)
        for pod in pods.get(view.name, ()) if key in free_capacity else ():
            spec = job_spec(state, pod.job_id)
            if spec is None or not counts_for_idleness(pod):
                continue
            at = ends_at(pod, state)
            if at is None:
                limit = timedelta(seconds=spec.duration_seconds_max)
                yield Release(plain(as_of) + _START + limit, key, pod.requests, is_moving=True)
            else:
                yield Release(max(at, plain(as_of)), key, pod.requests)


class Reservation:
    """Capacity kept for one job at one instant. A scratch pad of one schedule."""

    def __init__(self, job_id: JobId, item: DemandItem, until: datetime, later: FreeCapacity) -> None:
        """`later`: the capacity at `until`, less that of the job."""
        self.job_id = job_id
        self.until = until
        self._gpu_count = item.member_count * item.shape.resources.gpu_count
        self._later = later
        self._extra: tuple[int, FreeCapacity] | None = None  # with the state of the free capacity that it is of

    @property
    def own_reason(self) -> ReservationHeld:
        """Why the job itself waits."""
        return ReservationHeld(job_id=self.job_id, gpu_count=self._gpu_count, until=self.until)

    @property
    def reason(self) -> CapacityReserved:
        """Why a job waits that would fit without the reservation."""
        return CapacityReserved(job_id=self.job_id, gpu_count=self._gpu_count, until=self.until)

    def is_over_before(self, item: DemandItem, as_of: datetime) -> bool:
        """True for a job that has ended when the reserved capacity is needed; false without a time limit."""
        if item.work_seconds_max is None:
            return False
        return as_of <= self.until - _START - timedelta(seconds=item.work_seconds_max)

    def capacity_beside(self, free_capacity: FreeCapacity, keys: Sequence[str]) -> FreeCapacity:
        """Return what is free on these nodes both now and beside the reserved capacity."""
        now = free_capacity.mark()
        if self._extra is None or self._extra[0] != now:
            entries = (
                msgspec.structs.replace(free_capacity[key], free=_least(free_capacity[key].free, self._later[key].free))
                for key in keys
                if key in free_capacity and key in self._later
            )
            self._extra = now, FreeCapacity(entries)
        return self._extra[1]

    def take(self, keys: tuple[str, ...], shape: Shape, free_capacity: FreeCapacity) -> None:
        """Place members that were placed on the extra capacity."""
        counts = Counter(keys)
        free_capacity.place_counts(counts, shape)
        self._later.place_counts(counts, shape)
        self._extra = None


def reserve(
    item: DemandItem,
    place: Place,
    releases: Sequence[Release],
    free_capacity: FreeCapacity,
    keys: Sequence[str],
    as_of: datetime,
) -> Reservation | None:
    """Return the reservation of a job that does not fit now; None: it does not fit either when all jobs have ended.

    `place` places the job; it fits later if it does with what is released until then, so the search is binary.
    """
    ends = sorted({release.at for release in releases})
    first, last = 0, len(ends) - 1
    if item.job_id is None or not ends or _fitting(place, item, releases, free_capacity, keys, ends[-1]) is None:
        return None
    while first < last:
        middle = (first + last) // 2
        if _fitting(place, item, releases, free_capacity, keys, ends[middle]) is None:
            first = middle + 1
        else:
            last = middle
    later = _fitting(place, item, releases, free_capacity, keys, ends[first])
    assert later is not None, "the search ends where the job fits"  # noqa: S101 - invariant
    if any(release.is_moving and release.at <= ends[first] for release in releases):
        note_always(as_of)
    return Reservation(item.job_id, item, ends[first], later)


def _fitting(
    place: Place,
    item: DemandItem,
    releases: Sequence[Release],
    free_capacity: FreeCapacity,
    keys: Sequence[str],
    at: datetime,
) -> FreeCapacity | None:
    """Return the capacity at this instant less that of the job; None: the job does not fit."""
    released: dict[str, Resources] = {}
    for release in releases:
        if release.at <= at:
            released[release.key] = released.get(release.key, NO_RESOURCES) + release.resources
    entries = (free_capacity[key] for key in keys if key in free_capacity)
    later = FreeCapacity(
        msgspec.structs.replace(entry, free=entry.free + released.get(entry.key, NO_RESOURCES)) for entry in entries
    )
    return later if len(place(later)) == item.member_count else None


def _least(one: Resources, other: Resources) -> Resources:
    others = dict(other.slices)
    slices = ((name, min(count, others.get(name, 0))) for name, count in one.slices)
    return Resources(
        cpu_milli=min(one.cpu_milli, other.cpu_milli),
        memory_bytes=min(one.memory_bytes, other.memory_bytes),
        gpu_count=min(one.gpu_count, other.gpu_count),
        ephemeral_storage_bytes=min(one.ephemeral_storage_bytes, other.ephemeral_storage_bytes),
        pod_count=min(one.pod_count, other.pod_count),
        slices=tuple((name, count) for name, count in slices if count > 0),
    )
