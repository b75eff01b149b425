"""Resources as rows of an array. Used by placement and the fleet solver."""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpu_autoscaler.model.resources import Resources

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

GPU, CPU, MEMORY, STORAGE, PODS = range(5)
FIRST_SLICE = 5  # from here on one column for each existing kind of slice; none in most clusters

Kinds: TypeAlias = tuple[str, ...]  # resources that are parts of GPUs, in column order


def kinds_of(each: Iterable[Resources]) -> Kinds:
    """Return the kinds of slices that occur, sorted."""
    return tuple(sorted({name for amounts in each if amounts.slices for name, _ in amounts.slices}))


def row(amounts: Resources, kinds: Kinds = ()) -> tuple[int, ...]:
    """Return the amounts in column order.

    GPUs, CPU in thousandths, memory and ephemeral storage in bytes, pods, and slices of these kinds. Other kinds have
    no column, see `has_columns`.
    """
    whole = (
        amounts.gpu_count,
        amounts.cpu_milli,
        amounts.memory_bytes,
        amounts.ephemeral_storage_bytes,
        amounts.pod_count,
    )
    if not kinds:
        return whole
    counts = dict(amounts.slices)
    return whole + tuple(counts.get(kind, 0) for kind in kinds)


def rows(each: Iterable[Resources], kinds: Kinds = ()) -> Ints:
    """Return (number of amounts, columns)."""
    table = [row(amounts, kinds) for amounts in each]
    return np.array(table, dtype=np.int64).reshape(-1, FIRST_SLICE + len(kinds))


def has_columns(amounts: Resources, kinds: Kinds) -> bool:
    """True if every requested resource has a column; one without a column is unavailable."""
    return not amounts.slices or all(name in kinds for name, _ in amounts.slices)


def gpu_parts(amounts: Ints) -> Ints:
    """Return whole GPUs plus slices of each row. The sum only tells whether there are any."""
    parts: Ints = (
        amounts[..., GPU]
        if amounts.shape[-1] == FIRST_SLICE
        else amounts[..., GPU] + amounts[..., FIRST_SLICE:].sum(axis=-1)
    )
    return parts


def resources(amounts: Ints, kinds: Kinds = ()) -> Resources:
    """Return the resources of a row."""
    gpu_count, cpu_milli, memory_bytes, ephemeral_storage_bytes, pod_count, *slices = amounts.tolist()
    return Resources(
        gpu_count=gpu_count,
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        ephemeral_storage_bytes=ephemeral_storage_bytes,
        pod_count=pod_count,
        slices=tuple(sorted((kind, count) for kind, count in zip(kinds, slices, strict=True) if count)),
    )
