"""Packing policies: scores of nodes with a pod on them. The highest wins, ties are broken by the smallest name.

`tests/support/gpu_packer.py` packs shared GPUs by them, which reproduces the published study (`make bench CASE=V6`).
"""

import enum
from collections.abc import Sequence
from math import log

import numpy as np

from gpu_autoscaler.core.placement.resources import Ints

WHOLE = 1000  # thousandths of one GPU

# Bounds of the hundred steps of a fragmentation gradient's score: 100 / (1 + exp(-x)) reaches k at
# x = log(k / (100 - k)). No integer gradient lies on a bound except x = 0, which is exact.
_STEPS = np.array([log(step / (100 - step)) for step in range(1, 100)])
# The largest node, which scales gradients (Weng and others, "Beware of Fragmentation", USENIX ATC 2023, and their
# simulator's defaults).
_CPU_MILLI_OF_LARGEST = 128_000
_GPU_MILLI_OF_LARGEST = 8 * WHOLE


class PackingPolicy(enum.StrEnum):
    """How a node is selected among those that take a pod."""

    FRAGMENTATION_GRADIENT = "fragmentation-gradient"  # in a hundred whole steps, as published
    LEAST_FRAGMENTS = "least-fragments"  # the same gradient, best fit among equals
    BEST_FIT = "best-fit"  # leaves least CPU and GPU
    PACKING = "packing"  # GPUs in use before idle ones, those of nodes in use before those of idle nodes
    SPREADING = "spreading"  # leaves most GPU
    LEAST_LOADED = "least-loaded"  # leaves the largest share of itself free
    ROUND_ROBIN = "round-robin"  # the node after the one taken last
    RANDOM = "random"  # by the caller's numbers


class Fragmentation:
    """How many idle GPUs the shapes that make up most of the work cannot use."""

    def __init__(self, shapes: Sequence[tuple[int, int]], counts: Sequence[int]) -> None:
        """`shapes` are CPU in thousandths and GPUs, each with the number of its pods."""
        self._cpu = np.array([cpu_milli for cpu_milli, _ in shapes], dtype=np.int64)
        self._number = np.array([gpu_count for _, gpu_count in shapes], dtype=np.int64)
        self._counts = np.array(counts, dtype=np.int64)

    def of_whole(self, cpu_milli: Ints, gpus_count: Ints) -> Ints:
        """Return (nodes,): idle thousandths of whole GPUs, times the number of popular pods that cannot use them."""
        fits = (gpus_count[:, None] >= self._number) & (cpu_milli[:, None] >= self._cpu) & (self._number > 0)
        missed = self._counts.sum() - (fits * self._counts).sum(axis=1)
        return np.asarray(gpus_count * WHOLE * missed, dtype=np.int64)

    def in_steps(self, gradient: Ints) -> Ints:
        """Return the step of each gradient, of a hundred."""
        pods_count = max(int(self._counts.sum()), 1)
        return np.searchsorted(_STEPS, gradient / (WHOLE * pods_count), side="right").astype(np.int64)


def best_fit_scores(cpu_milli: Ints, gpus_milli: Ints) -> Ints:
    """Return scores from the remaining CPU and the GPU remaining over all GPUs, in whole hundredths, as published."""
    whole = 2 * _CPU_MILLI_OF_LARGEST * _GPU_MILLI_OF_LARGEST
    return np.asarray((whole - scaled_rest(cpu_milli, gpus_milli)) * 100 // whole, dtype=np.int64)


def scaled_rest(cpu_milli: Ints, gpus_milli: Ints) -> Ints:
    """Return the remaining CPU and GPU, each as a share of the largest node, on one scale."""
    return np.asarray(cpu_milli * _GPU_MILLI_OF_LARGEST + gpus_milli * _CPU_MILLI_OF_LARGEST, dtype=np.int64)


def packing_scores(idle_count: Ints, gpus_count: Ints, asked_count: Ints, left_milli: Ints) -> Ints:
    """Return scores from idle, all and requested GPUs, and what the GPU to be shared has left before placement."""
    shared = 100 - left_milli * 100 // WHOLE // 10
    in_use = np.where(left_milli < WHOLE, shared, np.maximum(50 - asked_count, 33))
    scores = np.where(idle_count == gpus_count, np.maximum(33 - idle_count, idle_count), in_use)
    return np.where(asked_count > 0, scores, 0).astype(np.int64)


def least_loaded_scores(gpus_milli: Ints, gpus_count: Ints) -> Ints:
    """Return scores from what is left over all GPUs, and the number of GPUs."""
    return np.asarray(gpus_milli * 1_000_000 // np.maximum(gpus_count * WHOLE, 1), dtype=np.int64)
