"""What is derived from a state, handed on from state to state with the keys that changed.

`fold` knows which keys a batch changed. A derivation that was read from the state before is updated where they concern
it, in time proportional to the changes; without such a state, or after many changes, it is built from nothing. Both
ways give equal values. What is derived is no field of the state: it is neither compared nor stored.

A state may be read by several threads: a plan is computed beside the event loop. Two threads may derive the same value.
"""

import heapq
from collections.abc import Callable, Hashable, Mapping
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeVar, cast

from gpu_autoscaler.core.state.state import ClusterState

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Changed keys by field of the state; empty for a field that is no table, or whose keys do not matter.
Changes = Mapping[str, frozenset[Any]]

# Beyond these, building from nothing costs less, or too many old values are held.
CHANGED_KEYS_COUNT_MAX = 4096
BATCHES_COUNT_MAX = 256


class Derivation(Generic[T]):
    """A value that some fields of the state determine."""

    def __init__(
        self,
        fields: tuple[str, ...],
        build: Callable[[ClusterState], T],
        update: Callable[[T, ClusterState, Changes], T | None],
    ) -> None:
        """`update` returns the value of the state from an earlier one and all changes since; None: build it."""
        self.fields = frozenset(fields)
        self.build = build
        self._update = update

    def of(self, state: ClusterState) -> T:
        """Return the value; the same object while nothing that it is derived from changes."""
        lineage = _lineage(state)
        value = lineage.values.get(self)
        if value is None:
            before = lineage.earlier.get(self)
            if before is not None:
                value = self._update(cast("T", before.value), state, _merged(before.batches))
            if value is None:
                value = self.build(state)
            self.put(state, value)
        return cast("T", value)

    def put(self, state: ClusterState, value: T) -> None:
        """Hold a value of this state, instead of one that was derived before."""
        lineage = _lineage(state)
        lineage.values[self] = value
        lineage.earlier.pop(self, None)


def part_of(field: str, is_in: Callable[[V], bool]) -> Derivation[Mapping[K, V]]:
    """Derive the entries of a table that are in, by key; `is_in` reads nothing but the entry."""

    def build(state: ClusterState) -> Mapping[K, V]:
        return {key: entry for key, entry in getattr(state, field).items() if is_in(entry)}

    def update(before: Mapping[K, V], state: ClusterState, changes: Changes) -> Mapping[K, V]:
        table, keys = getattr(state, field), changes[field]
        added = {key: entry for key in keys if (entry := table.get(key)) is not None and is_in(entry)}
        if not added and before.keys().isdisjoint(keys):
            return before
        return {**{key: entry for key, entry in before.items() if key not in keys}, **added}

    return Derivation((field,), build, update)


class Newest(NamedTuple, Generic[K, V]):
    """The newest entries of a table, at least as many as asked for; with the instant of each."""

    entries: Mapping[K, tuple[datetime, V]]
    after: tuple[datetime, K] | None  # every entry after this instant and key is among them; None: every entry is


def newest_of(field: str, at: Callable[[V], datetime | None], count: int) -> Derivation[Newest[K, V]]:
    """Derive the newest entries of a table by the instant that `at` reads from an entry; None: it does not count."""

    def cut(entries: Mapping[K, tuple[datetime, V]], after: tuple[datetime, K] | None) -> Newest[K, V]:
        if len(entries) <= 4 * count:
            return Newest(entries, after)
        keys = heapq.nlargest(2 * count + 1, entries, key=lambda key: (entries[key][0], key))
        last = keys.pop()
        return Newest({key: entries[key] for key in keys}, (entries[last][0], last))

    def build(state: ClusterState) -> Newest[K, V]:
        table = getattr(state, field).items()
        return cut({key: (instant, entry) for key, entry in table if (instant := at(entry)) is not None}, None)

    def update(before: Newest[K, V], state: ClusterState, changes: Changes) -> Newest[K, V] | None:
        table, keys, after = getattr(state, field), changes[field], before.after
        added = {
            key: (instant, entry)
            for key in keys
            if (entry := table.get(key)) is not None
            and (instant := at(entry)) is not None
            and (after is None or (instant, key) > after)
        }
        if not added and before.entries.keys().isdisjoint(keys):
            return before
        entries = {**{key: entry for key, entry in before.entries.items() if key not in keys}, **added}
        return None if after is not None and len(entries) < count else cut(entries, after)

    return Derivation((field,), build, update)


class _Earlier(NamedTuple):
    """A value of an earlier state, and what has changed since."""

    value: object
    batches: tuple[Changes, ...]
    keys_count: int


class _Lineage:
    """What was derived from a state, and what can be updated to be."""

    def __init__(self) -> None:
        self.values: dict[Derivation[Any], object] = {}
        self.earlier: dict[Derivation[Any], _Earlier] = {}


def _lineage(state: ClusterState) -> _Lineage:
    lineage = state.__dict__.get("lineage")
    if lineage is None:
        lineage = state.__dict__.setdefault("lineage", _Lineage())
    return cast("_Lineage", lineage)


def hand_on(before: ClusterState, state: ClusterState, changes: Changes) -> None:
    """Let the state derive from what was derived before. `changes` are all fields in which the two differ."""
    known = before.__dict__.get("lineage")
    if known is None:
        return
    lineage = _lineage(state)
    # Copied at once: another thread may derive more meanwhile.
    for derivation, value in dict(known.values).items():
        _hand_on(lineage, derivation, _Earlier(value, (), 0), changes)
    for derivation, earlier in dict(known.earlier).items():
        if derivation not in lineage.values and derivation not in lineage.earlier:
            _hand_on(lineage, derivation, earlier, changes)


def _hand_on(lineage: _Lineage, derivation: Derivation[Any], earlier: _Earlier, changes: Changes) -> None:
    own = {name: keys for name, keys in changes.items() if name in derivation.fields}
    if not own:
        if earlier.batches:
            lineage.earlier[derivation] = earlier
        else:
            lineage.values[derivation] = earlier.value
        return
    keys_count = earlier.keys_count + sum(map(len, own.values()))
    if keys_count <= CHANGED_KEYS_COUNT_MAX and len(earlier.batches) < BATCHES_COUNT_MAX:
        lineage.earlier[derivation] = _Earlier(earlier.value, (*earlier.batches, own), keys_count)


def _merged(batches: tuple[Changes, ...]) -> Changes:
    if len(batches) == 1:
        return batches[0]
    names = {name for changes in batches for name in changes}
    return {name: frozenset[Hashable]().union(*(changes.get(name, ()) for changes in batches)) for name in names}
