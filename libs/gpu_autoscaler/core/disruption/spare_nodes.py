"""Which empty nodes the next work will likely use, by what arrived lately.

The arrivals of the last two hours are replayed from many instants onto the capacity that is free now: nodes with work
first, then empty nodes, the cheapest first. Where arrivals are random, keeping a node pays if at least one is expected
within its break-even time: if one comes with a probability of 1 - 1/e within that time, and less within a part of it.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.demand.sources import job_shape, pod_shape
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.next_change import note_whole, plain
from gpu_autoscaler.core.nodes.views import NodeView, bin_key
from gpu_autoscaler.core.placement.pod_affinity import NO_RULES
from gpu_autoscaler.core.placement.shapes import Bin, BinReadiness
from gpu_autoscaler.core.state.lineage import Derivation, Newest, newest_of
from gpu_autoscaler.core.state.queries import is_workload
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import CapacityType

_STEP_SECONDS = 300
_STARTS_COUNT_MAX = 24  # two hours
_STARTS_COUNT_MIN = 6  # with less history the break-even rule decides alone
# These bound the time of a plan, with the number of empty nodes. Busy nodes with most free GPUs are not counted.
_ARRIVALS_COUNT_MAX = 256
_BUSY_NODES_COUNT_MAX = 128


class Spare(NamedTuple):
    """An empty node, and how long it is kept if work needs it: its break-even time, or a limit before that."""

    view: NodeView
    kept_seconds: float
    break_even_seconds: float


class ExpectedUse(NamedTuple):
    """How often an empty node would have been used in the time for which it is kept, and the share that pays for it."""

    uses_count: int
    starts_count: int
    use_ratio_min: float

    @property
    def is_needed(self) -> bool:
        return self.uses_count >= self.use_ratio_min * self.starts_count


class Arrival(NamedTuple):
    """Members or pods that arrived at one instant."""

    at: datetime
    member_count: int
    gpu_count: int  # of each
    gpu_models: tuple[str, ...]
    is_spot_allowed: bool

    def takes(self, node: "_Free", free_count: int) -> bool:
        is_spot_fine = self.is_spot_allowed or node.capacity_type is not CapacityType.SPOT
        return is_spot_fine and self.gpu_count <= free_count and (not self.gpu_models or node.model in self.gpu_models)


class _Free(NamedTuple):
    """Free GPUs of a node."""

    model: str
    capacity_type: CapacityType | None
    free_count: int
    kept_seconds: float  # of an empty node; else 0


def expected_uses(
    empty: Sequence[Spare], leaving: Collection[str], draft: Draft, state: ClusterState
) -> Mapping[str, ExpectedUse]:
    """Return the expected use of these empty nodes by name. Without those that have no whole GPUs, and empty while too
    little history is known. `leaving`: names of nodes that take no more work."""
    if not empty or not (arrivals := arrivals_of(state)):
        return {}
    free = {entry.key: (count, entry) for entry, count in draft.free_capacity.with_free_gpus() if _is_node(entry)}
    by_price = sorted(empty, key=lambda spare: (spare.view.price_micro_usd_per_hour or 0, spare.view.name))
    spares = [spare for spare in by_price if bin_key(spare.view) in free]
    if not spares:
        return {}
    names = {spare.view.name for spare in empty}.union(leaving)
    busy = ((count, entry.name, key) for key, (count, entry) in free.items() if entry.name not in names)
    nodes = [_free(*free[key], 0.0) for _, _, key in sorted(busy)[:_BUSY_NODES_COUNT_MAX]]
    first = len(nodes)
    nodes += (_free(*free[bin_key(spare.view)], spare.kept_seconds) for spare in spares)
    note_whole(draft.as_of, _STEP_SECONDS)
    uses, starts = [0] * len(nodes), [0] * len(nodes)
    for start, until in _starts(arrivals, plain(draft.as_of)):
        used_after = _replay(arrivals, start, nodes)
        for place in range(first, len(nodes)):
            seconds = nodes[place].kept_seconds
            if (until - start).total_seconds() >= seconds:
                starts[place] += 1
                uses[place] += used_after.get(place, math.inf) <= seconds
    return {
        spare.view.name: ExpectedUse(
            uses[place], starts[place], 1.0 - math.exp(-spare.kept_seconds / spare.break_even_seconds)
        )
        for place, spare in enumerate(spares, first)
        if starts[place] >= _STARTS_COUNT_MIN
    }


def _is_node(entry: Bin) -> bool:
    """Return True for a node with GPUs of a known model that this plan does not buy."""
    return bool(entry.gpu_model) and entry.readiness is not BinReadiness.BOUGHT


def _free(free_count: int, entry: Bin, kept_seconds: float) -> _Free:
    return _Free(entry.gpu_model or "", entry.capacity_type, free_count, kept_seconds)


def _starts(arrivals: Sequence[Arrival], as_of: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Yield the instants of the last two hours from which arrivals are replayed, and the end of what is known; none
    before the first known arrival."""
    until = datetime.fromtimestamp(int(as_of.timestamp()) // _STEP_SECONDS * _STEP_SECONDS, UTC)
    for number in range(1, _STARTS_COUNT_MAX + 1):
        start = until - timedelta(seconds=number * _STEP_SECONDS)
        if start + timedelta(seconds=_STEP_SECONDS) <= arrivals[0].at:
            return
        yield start, until


def _replay(arrivals: Sequence[Arrival], start: datetime, nodes: Sequence[_Free]) -> Mapping[int, float]:
    """Return after how many seconds each node is used first, by its place."""
    free = [node.free_count for node in nodes]
    used_after: dict[int, float] = {}
    longest = max(node.kept_seconds for node in nodes)
    for arrival in arrivals[bisect_left(arrivals, start, key=lambda arrival: arrival.at) :]:
        after = (arrival.at - start).total_seconds()
        if after > longest:
            break
        left = arrival.member_count
        for place, node in enumerate(nodes):
            if arrival.takes(node, free[place]):
                count = min(left, free[place] // arrival.gpu_count)
                free[place] -= count * arrival.gpu_count
                left -= count
                used_after.setdefault(place, after)
                if not left:
                    break
    return used_after


def _queued_at(job: JobRecord) -> datetime | None:
    spec = None if job.queued is None else job.queued.spec
    return spec.requested_at if spec is not None and spec.member_resources.gpu_count else None


def _created_at(pod: PodObserved) -> datetime | None:
    return pod.created_at if pod.job_id is None and pod.requests.gpu_count and is_workload(pod) else None


_JOBS: Derivation[Newest[JobId, JobRecord]] = newest_of("jobs", _queued_at, _ARRIVALS_COUNT_MAX)
_PODS: Derivation[Newest[PodUid, PodObserved]] = newest_of("pods", _created_at, _ARRIVALS_COUNT_MAX)


def arrivals_of(state: ClusterState) -> tuple[Arrival, ...]:
    """Return the last jobs and pods that request whole GPUs, oldest first. Deleted pods of other owners are unknown."""
    return _arrivals(_JOBS.of(state).entries, _PODS.of(state).entries)


@cached_by_identity(4)
def _arrivals(
    jobs: Mapping[JobId, tuple[datetime, JobRecord]], pods: Mapping[PodUid, tuple[datetime, PodObserved]]
) -> tuple[Arrival, ...]:
    found: list[tuple[datetime, str, JobSpec | PodObserved]] = [
        (at, job_id, job.queued.spec) for job_id, (at, job) in jobs.items() if job.queued is not None
    ]
    found += ((at, uid, pod) for uid, (at, pod) in pods.items())
    last = heapq.nlargest(_ARRIVALS_COUNT_MAX, found, key=lambda arrival: arrival[:2])
    return tuple(_arrival(at, work) for at, _, work in reversed(last))


def _arrival(at: datetime, work: JobSpec | PodObserved) -> Arrival:
    if isinstance(work, JobSpec):
        shape, member_count = job_shape(work), work.member_count
    else:
        shape, member_count = pod_shape(work, None, NO_RULES), 1
    return Arrival(at, member_count, shape.resources.gpu_count, shape.gpu_models, shape.is_spot_allowed)
