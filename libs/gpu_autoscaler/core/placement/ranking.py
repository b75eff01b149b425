"""The order in which suitable nodes are filled: the policies of `core/placement/gpu_packing.py` over all nodes at once.

Existing nodes come before coming ones, and nodes with unneeded GPUs last; ties are broken by the smallest name.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from gpu_autoscaler.core.placement.bin_columns import Bins
from gpu_autoscaler.core.placement.gpu_packing import (
    WHOLE,
    Fragmentation,
    PackingPolicy,
    best_fit_scores,
    least_loaded_scores,
    packing_scores,
)
from gpu_autoscaler.core.placement.measured_use import LEAST_UTILIZED, UNKNOWN_USE, MeasuredUse
from gpu_autoscaler.core.placement.resources import CPU, FIRST_SLICE, GPU, MEMORY, Ints
from gpu_autoscaler.core.placement.shapes import Shape

# The default is the gradient with best fit among equals, which leaves fewer GPUs idle than the gradient alone
# (`make bench CASE=V6`).
BY_NAME: Mapping[str, PackingPolicy] = {
    "fragmentation-gradient": PackingPolicy.LEAST_FRAGMENTS,
    "best-fit": PackingPolicy.BEST_FIT,
    "packing": PackingPolicy.PACKING,
    "spreading": PackingPolicy.SPREADING,
    "least-loaded": PackingPolicy.LEAST_LOADED,
    LEAST_UTILIZED: PackingPolicy.LEAST_LOADED,  # less what held GPUs leave unused
    "round-robin": PackingPolicy.ROUND_ROBIN,
    "random": PackingPolicy.RANDOM,
}
# Policies under which a node that took a pod is better for the next one, so that it is filled before others.
_FILL_UP = frozenset({PackingPolicy.LEAST_FRAGMENTS, PackingPolicy.BEST_FIT, PackingPolicy.PACKING})
DEFAULT_PLACEMENT = "fragmentation-gradient"
# Shapes that make up this share of the pods; the rest is too rare to keep capacity for.
_POPULAR_RATIO = 0.95


class Ranking:
    """One packing policy over the work of one cluster."""

    def __init__(
        self, name: str, bins: Bins, waiting: Iterable[Shape] = (), used: Mapping[str, MeasuredUse] = UNKNOWN_USE
    ) -> None:
        """`bins` hold the running work, `waiting` are the shapes that need capacity: both measure fragmentation.

        `used`: what telemetry shows of held GPUs, by bin; those without an entry count as used.
        """
        self.policy = BY_NAME[name]
        self._bins = bins
        self._waiting = tuple(waiting)
        self._used = used
        self._taken_count = 0  # where random and round-robin continue

    @property
    def fills_up(self) -> bool:
        """True if a node is filled before the next one is begun; else the order is evaluated after each pod."""
        return self.policy in _FILL_UP

    @cached_property
    def _fragmentation(self) -> Fragmentation:
        counts = Counter(self._bins.pod_shapes)
        counts.update((shape.resources.cpu_milli, shape.resources.gpu_count) for shape in self._waiting)
        popular = _popular(counts)
        return Fragmentation(tuple(popular), tuple(popular.values()))

    def keys(
        self, shape: Shape, free: Ints, gpus_count: Callable[[], Ints], names: Callable[[], Sequence[str]]
    ) -> tuple[Ints, ...]:
        """Return sort keys of nodes with these free amounts, the least significant first; the smallest comes first.

        `gpus_count` returns the total GPUs of each node, `names` their names.
        """
        gpu_count, cpu_milli = shape.resources.gpu_count, shape.resources.cpu_milli
        gpus, cpu = free[:, GPU], free[:, CPU]
        after_milli = (gpus - gpu_count) * WHOLE
        match self.policy:
            case PackingPolicy.LEAST_FRAGMENTS:
                now = self._fragmentation.of_whole(cpu, gpus)
                then = self._fragmentation.of_whole(cpu - cpu_milli, gpus - gpu_count)
                slices = free[:, FIRST_SLICE:].sum(axis=1)
                return free[:, MEMORY], cpu, slices, gpus, -self._fragmentation.in_steps(now - then)
            case PackingPolicy.BEST_FIT:
                return (-best_fit_scores(cpu - cpu_milli, after_milli),)
            case PackingPolicy.PACKING:
                asked = np.full(gpus.size, gpu_count, dtype=np.int64)
                return (-packing_scores(gpus, gpus_count(), asked, np.full(gpus.size, WHOLE, dtype=np.int64)),)
            case PackingPolicy.SPREADING:
                return -cpu, -after_milli
            case PackingPolicy.LEAST_LOADED:
                if self._used:
                    uses = (self._used.get(name) for name in names())
                    after_milli += np.array([0 if use is None else use.idle_milli for use in uses], dtype=np.int64)
                return -cpu, -least_loaded_scores(after_milli, gpus_count())
            case PackingPolicy.ROUND_ROBIN:
                order = np.argsort(np.argsort(np.array(names())))
                return ((order - self._taken_count) % max(order.size, 1),)
            case _:
                salt = self._taken_count
                return (np.array([zlib.crc32(f"{salt}/{name}".encode()) for name in names()], dtype=np.int64),)

    def taken(self, count: int) -> None:
        """Record that this many pods have got their node."""
        self._taken_count += count


def _popular(counts: Counter[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return the most common of these shapes (CPU in thousandths, GPUs) until they cover most of the pods."""
    popular: dict[tuple[int, int], int] = {}
    total, covered = counts.total(), 0
    for shape in sorted(counts, key=lambda shape: (-counts[shape], shape)):
        if covered >= _POPULAR_RATIO * total:
            break
        popular[shape] = counts[shape]
        covered += counts[shape]
    return popular
