"""Resources as rows of an array: the columns, and the way there. Used by placement and by the choice of a fleet."""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpu_autoscaler.model.resources import Resources

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

GPU, CPU, MEMORY, STORAGE, PODS = range(5)
COLUMNS_COUNT = 5

Row: TypeAlias = tuple[int, int, int, int, int]


def row(amounts: Resources) -> Row:
    """The amounts in order of columns: GPUs, CPU in thousandths, memory and ephemeral storage in bytes, pods."""
    return (
        amounts.gpu_count,
        amounts.cpu_milli,
        amounts.memory_bytes,
        amounts.ephemeral_storage_bytes,
        amounts.pod_count,
    )


def rows(each: Iterable[Resources]) -> Ints:
    """(number of amounts, columns)."""
    return np.array([row(amounts) for amounts in each], dtype=np.int64).reshape(-1, COLUMNS_COUNT)


def resources(amounts: Ints) -> Resources:
    """The way back."""
    gpu_count, cpu_milli, memory_bytes, ephemeral_storage_bytes, pod_count = amounts.tolist()
    return Resources(
        gpu_count=gpu_count,
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        ephemeral_storage_bytes=ephemeral_storage_bytes,
        pod_count=pod_count,
    )
