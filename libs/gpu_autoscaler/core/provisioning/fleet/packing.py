"""Packing of one node of an offer: the pods that are together worth most for the node's cost.

On a node with GPUs, pods come in tiers: first those that cost there no more than they are worth. Within a tier the
largest come first. While GPUs are free, CPU and memory are kept back for the pods that will take them. On a node
without GPUs, the pod comes first that asks most for the resource of which most is free (Panigrahy and others,
"Heuristics for Vector Bin Packing", Microsoft Research 2011: the dot product).
"""

from dataclasses import dataclass

import numpy as np

from gpu_autoscaler.core.placement.resources import CPU, GPU, MEMORY, Bools, Floats, Ints, gpu_parts
from gpu_autoscaler.core.provisioning.fleet.pricing import ShadowPrices
from gpu_autoscaler.core.provisioning.fleet.problem import FleetProblem

# Bounds between tiers, as worth over cost on the offer. Tuned on pods drawn from the openb trace; nearby values do as
# well within one per cent.
_TIERS = (0.97, 0.85, 0.6)
# How much of the mean request beside a GPU is kept back for each GPU still free. All are tried: none is always best.
_KEEP_BACK_RATIOS = (1.0, 0.8, 0.5, 0.0)
_BESIDE = [CPU, MEMORY]


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """The load of one node, and how much of its cost it is worth: 1 is as good as any fleet can be."""

    value_ratio: float
    pods: tuple[tuple[int, int], ...]  # (class, pods of it), in the order of filling, each class once


class NodePacker:
    """Packs nodes of one offer from the remaining pods."""

    def __init__(
        self, problem: FleetProblem, shadow_prices: ShadowPrices, offer: int, classes: Ints, is_grouped: Bools
    ) -> None:
        self._cost = float(problem.cost[offer])
        self._capacity = problem.capacity[offer]
        has_gpus = bool(gpu_parts(self._capacity))
        requests = problem.requests[classes]
        fitness = _fitness(requests, shadow_prices.by_class[classes], shadow_prices.per_amount[offer])
        beside = requests[:, _BESIDE] / np.maximum(self._capacity[_BESIDE], 1)
        tier = sum((fitness < bound for bound in _TIERS), start=np.zeros(classes.size, dtype=np.int64))
        # Of equals those with a group come first: a node takes only one of each group.
        freedom = ~is_grouped[classes]
        order = np.lexsort((classes, freedom, -beside.max(axis=1, initial=0.0), -gpu_parts(requests), tier))
        self._classes = classes[order]
        self._asked = np.ascontiguousarray(requests[order].T)
        self._is_grouped = is_grouped[self._classes]
        self._worth = shadow_prices.by_class[self._classes]
        # A pod that costs here more than it is worth has to be aligned better.
        self._pull = None if has_gpus else beside[order] * (fitness[order] ** 3)[:, None]
        self._ratios = _KEEP_BACK_RATIOS if has_gpus else (0.0,)

    def fill(self, left: Ints, grouped_max: int) -> NodeLoad | None:
        """Return the load of one node that is worth most, of the remaining pods; None: none of them fits.

        Of pods with a group it takes `grouped_max` at most.
        """
        alive = np.flatnonzero(left[self._classes] > 0)
        if not alive.size:
            return None
        lot = _Lot(
            asked=self._asked[:, alive],
            counts=left[self._classes[alive]],
            is_grouped=self._is_grouped[alive],
            grouped_max=grouped_max,
            pull=None if self._pull is None else self._pull[alive],
        )
        per_gpu = lot.mean_beside_gpu()
        best: NodeLoad | None = None
        for ratio in self._ratios if per_gpu.any() else (0.0,):
            pods = [
                (int(alive[row]), count)
                for row, count in _Node(lot, self._capacity, per_gpu * ratio).fully_packed_nodes()
            ]
            value_ratio = sum(float(self._worth[place]) * count for place, count in pods) / self._cost
            if best is None or value_ratio > best.value_ratio:
                best = NodeLoad(value_ratio, tuple((int(self._classes[place]), count) for place, count in pods))
        return best


def _fitness(requests: Ints, by_class: Floats, per_amount: Floats) -> Floats:
    """Return each class's worth over what it costs on the offer: 1 at most, and 1 where it costs nothing."""
    cost = requests[:, 0] * per_amount[0]
    for resource in range(1, requests.shape[1]):
        cost = cost + requests[:, resource] * per_amount[resource]
    fitness: Floats = np.where(cost > 0, by_class / np.where(cost > 0, cost, 1.0), 1.0)
    return fitness


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lot:
    """The remaining pods of the classes that the offer takes, in the order of trial."""

    asked: Ints  # (resources, rows)
    counts: Ints
    is_grouped: Bools
    grouped_max: int
    pull: Floats | None  # (classes, CPU and memory): requests, if free amounts decide; None: the order decides

    def mean_beside_gpu(self) -> Floats:
        """Return the CPU and memory that pods with GPUs ask for, per GPU; zero if no pod asks for GPUs."""
        gpus = self.asked[GPU] * self.counts
        gpus_sum = int(gpus.sum())
        beside = (self.asked[_BESIDE] * (self.counts * (gpus > 0))).sum(axis=1)
        return beside / gpus_sum if gpus_sum else np.zeros(len(_BESIDE))


class _Node:
    """One node while it is packed."""

    def __init__(self, lot: _Lot, capacity: Ints, per_gpu: Floats) -> None:
        """`per_gpu` is the CPU and memory to keep back for each GPU that stays free."""
        self._lot = lot
        self._free: list[int] = capacity.tolist()
        self._available = lot.counts.copy()
        self._is_left: Bools = self._available > 0
        self._grouped_left = lot.grouped_max
        self._per_gpu: list[float] = per_gpu.tolist()
        self._is_keeping_back = any(self._per_gpu) and self._free[GPU] > 0
        # What each row asks for in excess of what is kept back for its GPUs.
        self._more_than_kept = [
            lot.asked[resource] - lot.asked[GPU] * per_gpu
            for resource, per_gpu in zip(_BESIDE if self._is_keeping_back else (), self._per_gpu, strict=False)
        ]

    def fully_packed_nodes(self) -> list[tuple[int, int]]:
        """Take pods until nothing fits; return (row, count)."""
        taken: dict[int, int] = {}
        while True:
            fits = self._fits()
            row = self._next(fits)
            if fits[row]:
                taken[row] = taken.get(row, 0) + self._take(row)
            elif self._is_keeping_back:
                self._is_keeping_back = False
            else:
                return list(taken.items())

    def _fits(self) -> Bools:
        free = np.array(self._free, dtype=np.int64)
        fits: Bools = np.logical_and.reduce(self._lot.asked <= free[:, None], axis=0)
        fits &= self._is_left
        if self._is_keeping_back:
            for resource, per_gpu, more in zip(_BESIDE, self._per_gpu, self._more_than_kept, strict=True):
                fits &= more <= self._free[resource] - self._free[GPU] * per_gpu
        return fits

    def _next(self, fits: Bools) -> int:
        pull = self._lot.pull
        if pull is None:
            return int(fits.argmax())
        cpu, memory = (self._free[resource] for resource in _BESIDE)
        return int(np.where(fits, pull[:, 0] * cpu + pull[:, 1] * memory, -1.0).argmax())

    def _take(self, row: int) -> int:
        """Take as many pods of the row as its turn allows; where free amounts decide, that changes with each pod."""
        asked: list[int] = self._lot.asked[:, row].tolist()
        left = int(self._available[row])
        count = 1
        if self._lot.pull is None:
            count = min(left, *(free // need for free, need in zip(self._free, asked, strict=True) if need))
        if self._is_keeping_back:
            count = self._count_keeping_back(asked, count)
        self._available[row] = left - count
        self._is_left[row] = left > count
        if self._lot.is_grouped[row]:
            count -= max(count - self._grouped_left, 0)
            self._grouped_left -= count
            if not self._grouped_left:
                self._is_left &= ~self._lot.is_grouped
        self._free = [free - count * need for free, need in zip(self._free, asked, strict=True)]
        return count

    def _count_keeping_back(self, asked: list[int], count: int) -> int:
        """Return how many such pods leave enough for the GPUs that stay free; at least one."""
        for resource, per_gpu in zip(_BESIDE, self._per_gpu, strict=True):
            more_than_mean = asked[resource] - asked[GPU] * per_gpu
            if more_than_mean > 0:
                spare = self._free[resource] - self._free[GPU] * per_gpu
                count = min(count, int(spare // more_than_mean))
        return max(count, 1)
