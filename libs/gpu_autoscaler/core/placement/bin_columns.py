"""The bins that a plan starts with, as arrays and tables that are updated where a bin changed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from gpu_autoscaler.core.placement.constraints import NodeMatcher
from gpu_autoscaler.core.placement.resources import Bools, Ints, Kinds, kinds_of, rows
from gpu_autoscaler.core.placement.shapes import Bin
from gpu_autoscaler.model.offers import CapacityType

N = TypeVar("N", Ints, Bools)


class Change(NamedTuple):
    """How some bins become others: bins by place that are replaced, places that are removed, bins that are added."""

    replaced: Mapping[int, Bin]
    removed: Sequence[int]
    added: Sequence[Bin]

    @property
    def new(self) -> tuple[Bin, ...]:
        """The bins that were not there before."""
        return (*self.replaced.values(), *self.added)


class Columns(NamedTuple):
    """The amounts and properties of some bins as read-only arrays."""

    kinds: Kinds  # of slices among what is free, and maybe of some that are no longer
    free: Ints
    readiness: Ints
    has_gpus: Bools
    is_on_demand: Bools
    matcher: NodeMatcher

    @classmethod
    def of(cls, bins: Sequence[Bin], kinds: Kinds | None = None, matcher: NodeMatcher | None = None) -> "Columns":
        """Return the columns of these bins."""
        kinds = kinds_of(entry.free for entry in bins) if kinds is None else kinds
        return cls(
            kinds=kinds,
            free=rows((entry.free for entry in bins), kinds),
            readiness=np.array([int(entry.readiness) for entry in bins], dtype=np.int64),
            has_gpus=np.array([entry.has_gpus for entry in bins], dtype=np.bool_),
            is_on_demand=np.array([entry.capacity_type is CapacityType.ON_DEMAND for entry in bins], dtype=np.bool_),
            matcher=NodeMatcher(bins) if matcher is None else matcher,
        )

    def after(self, before: Sequence[Bin], bins: Sequence[Bin], change: Change) -> "Columns":
        """Return the columns of the bins that the change leads to."""
        if not set(kinds_of(entry.free for entry in change.new)) <= set(self.kinds):
            return Columns.of(bins)
        matcher = self.matcher
        if change.removed or change.added or any(not is_alike(before[at], new) for at, new in change.replaced.items()):
            matcher = matcher.after(bins, change.replaced, change.removed, change.added)
        own = Columns.of(change.new, self.kinds, matcher)
        places = np.fromiter(change.replaced, dtype=np.int64)
        return Columns(
            self.kinds,
            _joined(self.free, own.free, places, change),
            _joined(self.readiness, own.readiness, places, change),
            _joined(self.has_gpus, own.has_gpus, places, change),
            _joined(self.is_on_demand, own.is_on_demand, places, change),
            matcher,
        )


def _joined(table: N, new: N, places: Ints, change: Change) -> N:
    """Return the rows after the change; `new` are those of the bins that it brings."""
    joined = table.copy()
    joined[places] = new[: places.size]
    if change.removed:
        joined = np.delete(joined, change.removed, axis=0)
    return np.concatenate((joined, new[places.size :])) if change.added else joined


def is_alike(one: Bin, other: Bin) -> bool:
    """True if the bins satisfy the same shapes, whatever is free."""
    return (
        one.labels == other.labels
        and one.taints == other.taints
        and one.gpu_model == other.gpu_model
        and one.gpu_memory_bytes == other.gpu_memory_bytes
        and one.capacity_type == other.capacity_type
    )


class Bins(tuple[Bin, ...]):  # noqa: SLOT001 - what is derived of the bins stays with them
    """Bins in any order. Their order decides nothing."""

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Return the position of each bin by its key."""
        return {entry.key: place for place, entry in enumerate(self)}

    @cached_property
    def columns(self) -> Columns:
        """The bins as arrays."""
        return Columns.of(self)

    @cached_property
    def pod_shapes(self) -> Mapping[tuple[int, int], int]:
        """How many pods of each shape (CPU in thousandths, GPUs) run on the bins."""
        return _pod_shapes(self)

    def replaced(self, keys: Iterable[str], bins: Iterable[Bin]) -> "Bins":
        """Return these without the bins of some keys, and with others in their place; new ones come last."""
        new = {entry.key: entry for entry in bins}
        known = self.places
        change = Change(
            replaced={known[key]: entry for key, entry in new.items() if key in known},
            removed=sorted({known[key] for key in keys if key in known and key not in new}),
            added=[entry for key, entry in new.items() if key not in known],
        )
        if not change.removed and not change.new:
            return self
        entries = list(self)
        for place, entry in change.replaced.items():
            entries[place] = entry
        for place in reversed(change.removed):
            del entries[place]
        after = Bins((*entries, *change.added))
        derived = vars(after)
        if not change.removed:
            last = len(self)
            places = {entry.key: place for place, entry in enumerate(change.added, last)}
            derived["places"] = {**known, **places} if places else known
        if "columns" in vars(self):
            derived["columns"] = self.columns.after(self, after, change)
        if "pod_shapes" in vars(self):
            shapes = Counter(self.pod_shapes)
            shapes.update(_pod_shapes(change.new))
            shapes.subtract(_pod_shapes(self[place] for place in (*change.replaced, *change.removed)))
            derived["pod_shapes"] = {shape: count for shape, count in shapes.items() if count}
        return after


def _pod_shapes(bins: Iterable[Bin]) -> Mapping[tuple[int, int], int]:
    return Counter((pod.requests.cpu_milli, pod.requests.gpu_count) for entry in bins for pod in entry.pods)
