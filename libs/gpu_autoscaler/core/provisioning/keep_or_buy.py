"""Keep versus buy: which free capacity a queued job leaves unused, because a new node costs less than to keep that one.

A node stays until its last work ends. Where the run times of k + 1 jobs are exponential with one mean, the last of them
is expected to end 1/(k + 1) of that mean after the last of k: so much longer does a node with k jobs stay for one more.
A new node costs its boot besides the run, and the job waits for it. Both prices are compared for one member.
"""

from datetime import datetime, timedelta
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gpu_autoscaler.core.demand.durations import Durations
from gpu_autoscaler.core.demand.elastic import OrderedBins
from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.demand.sources import job_spec
from gpu_autoscaler.core.next_change import note, plain
from gpu_autoscaler.core.nodes.views import NodeIndex, bin_key
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.kept_nodes import WITH_FREE_GPUS
from gpu_autoscaler.core.placement.resources import Floats, Ints
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.offers import UNKNOWN_PRICE, OfferCatalog
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.jobs import PRIORITY_NAMES, JobSpec

# Of work of which nothing is known. Source: our own.
RUN_SECONDS = 1800.0
# Time in which a plan buys the node. Without one, limits or the cloud prevent it, and the job uses what is free.
BUY_SECONDS_MAX = 30.0


class _Columns(NamedTuple):
    """The nodes with free GPUs, in columns."""

    keys: tuple[str, ...]  # of their bins
    micro_usd_per_hour: Floats  # with the overhead of a node, divided by the jobs that would share its end
    free_gpu_count: Ints


class _New(NamedTuple):
    """The cheapest new node for a member."""

    micro_usd_per_hour: float  # for one member, with the overhead of a node
    boot_seconds: float


def _may_wait(item: DemandItem) -> bool:
    """True for a queued job below high priority without a deadline, whose members go on any node with whole GPUs. The
    first job of a strict queue does not wait: all others would wait with it."""
    if item.source is not DemandSource.QUEUED_JOB or item.blocked is not None or not item.shape.resources.gpu_count:
        return False
    is_urgent = item.priority >= PRIORITY_NAMES["high"] or item.start_by_at is not None
    return not is_urgent and item.strict_queue is None and item.within is None and item.shape.pod_constraints.is_any


class KeepOrBuy:
    """The comparison in one plan or schedule."""

    def __init__(
        self,
        state: ClusterState,
        policy: ScalingPolicy,
        as_of: datetime,
        nodes: NodeIndex,
        catalog: OfferCatalog | None = None,
    ) -> None:
        """Without `catalog` it is made when it is needed first."""
        self._state, self._policy, self._as_of, self._nodes = state, policy, as_of, nodes
        self._catalog_there = catalog
        self._new: dict[tuple[Shape, int], _New | None] = {}

    def avoided(self, item: DemandItem, free_capacity: FreeCapacity, spec: JobSpec | None = None) -> tuple[str, ...]:
        """Return the keys of the bins that could take a member of a queued job, and are not used for it now because a
        new node costs less. `spec`: of a job that is not in the queue yet.

        None for work that does not wait, after the policy's wait, and where no plan has bought a node for it in time.
        """
        if not _may_wait(item):
            return ()
        own = self._ordered.bought_for(item)
        until = self._until(item, is_bought_for=bool(own))
        if plain(self._as_of) >= until:
            return ()
        columns, gpu_count = self._columns, item.shape.resources.gpu_count
        new = self._new_node(item) if columns.keys else None
        if new is None or new.boot_seconds > self._policy.new_node_wait_seconds_max:
            return ()
        run_seconds = self._run_seconds(spec or job_spec(self._state, item.job_id))
        value = self._policy.removal.waiting_micro_usd_per_hour / item.member_count
        buy = new.micro_usd_per_hour * (run_seconds + new.boot_seconds) + value * new.boot_seconds
        members = np.minimum(columns.free_gpu_count // gpu_count, item.member_count)
        keep = columns.micro_usd_per_hour * run_seconds
        places = np.flatnonzero((members > 0) & (keep > buy * members)).tolist()
        expensive = [key for place in places if (key := columns.keys[place]) not in own]
        avoided = free_capacity.fitting(expensive, item.shape) if expensive else ()
        if avoided:
            note(self._as_of, until)
        return avoided

    def _until(self, item: DemandItem, *, is_bought_for: bool) -> datetime:
        seconds = self._policy.new_node_wait_seconds_max
        return item.since + timedelta(seconds=seconds if is_bought_for else min(seconds, BUY_SECONDS_MAX))

    def _run_seconds(self, spec: JobSpec | None) -> float:
        expected = None if spec is None else self._durations.predicted(spec)
        return RUN_SECONDS if expected is None else expected.median_seconds

    def _new_node(self, item: DemandItem) -> _New | None:
        """Return the cheapest available node for a member of the item; None: there is none of known price."""
        asked = (item.shape, item.member_count)
        if asked not in self._new:
            self._new[asked] = self._cheapest(*asked)
        return self._new[asked]

    def _cheapest(self, shape: Shape, count: int) -> _New | None:
        catalog = self._catalog
        members = catalog.members(shape)
        places = np.flatnonzero((members > 0) & (catalog.prices_micro_usd_per_hour != UNKNOWN_PRICE))
        if not places.size:
            return None
        hourly = catalog.prices_micro_usd_per_hour[places] + self._policy.node_overhead_micro_usd_per_hour
        each = hourly / np.minimum(members[places], count)
        best = int(each.argmin())
        return _New(float(each[best]), float(catalog.boot_seconds[places[best]]))

    @cached_property
    def _columns(self) -> _Columns:
        kept = sorted(self._nodes.table(WITH_FREE_GPUS).values(), key=lambda entry: entry.view.name)
        overhead = self._policy.node_overhead_micro_usd_per_hour
        prices = [entry.shared_micro_usd_per_hour(overhead) for entry in kept]
        return _Columns(
            keys=tuple(bin_key(entry.view) for entry in kept),
            micro_usd_per_hour=np.array(prices, dtype=np.float64),
            free_gpu_count=np.array([entry.free_gpu_count for entry in kept], dtype=np.int64),
        )

    @cached_property
    def _catalog(self) -> OfferCatalog:
        return self._catalog_there or OfferCatalog(self._nodes, self._state, self._policy, self._as_of)

    @cached_property
    def _durations(self) -> Durations:
        return Durations(self._state)

    @cached_property
    def _ordered(self) -> OrderedBins:
        return OrderedBins(self._nodes)
