"""What is derived from a state, handed on from state to state with the keys that changed.

`fold` knows which keys a batch changed. A derivation that was read from the state before is updated where they concern
it, in time proportional to the changes; without such a state, or after many changes, it is built from nothing. Both
ways give equal values. What is derived is no field of the state: it is neither compared nor stored.

A state may be read by several threads: a plan is computed beside the event loop. Two threads may derive the same value.
"""

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
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
    """A value that some fields of the state determine. Made once, when its module is imported."""

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
        _DERIVATIONS.append(self)

    def of(self, state: ClusterState) -> T:
        """Return the value; the same object while nothing that it is derived from changes."""
        cell = self.cell(state)
        value = cell.value
        if value is None:
            known, batches = cell.last_known()
            if known is not None:
                value = self._update(cast("T", known.value), state, _merged(batches))
            if value is None:
                value = self.build(state)
            cell.put(value)
        return cast("T", value)

    def put(self, state: ClusterState, value: T) -> None:
        """Hold a value of this state, instead of one that was derived before."""
        self.cell(state).put(value)

    def cell(self, state: ClusterState) -> "_Cell":
        """Return what holds the value of this state."""
        cells: dict[Derivation[Any], _Cell] = state.__dict__.setdefault("lineage", {})
        return cells.get(self) or cells.setdefault(self, _Cell())


_DERIVATIONS: list[Derivation[Any]] = []  # all of this process


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


class _Cell:
    """A derived value of a state, once it is known; before, the cell of an earlier state and what changed since.

    A plan derives values of its state while newer states are folded: these find them through their cells.
    """

    __slots__ = ("batches_count", "before", "changes", "keys_count", "value")

    def __init__(self, before: "_Cell | None" = None, changes: Changes = MappingProxyType({})) -> None:
        self.value: object = None
        self.before = before
        self.changes = changes
        # Since a value, as far as known now.
        self.batches_count, self.keys_count = 1, sum(map(len, changes.values()))
        if before is not None and before.value is None:
            self.batches_count += before.batches_count
            self.keys_count += before.keys_count

    def put(self, value: object) -> None:
        self.value = value
        self.before = None  # earlier values are not held

    def last_known(self) -> tuple["_Cell | None", list[Changes]]:
        """Return the last cell before this one that has a value, and the batches since; None without one."""
        batches, before = [self.changes], self.before
        while before is not None:
            further = before.before  # read first: another thread drops it after it has put the value
            if before.value is not None:
                return before, batches
            batches.append(before.changes)
            before = further
        return None, batches

    def next(self, changes: Changes) -> "_Cell":
        """Return the cell of a state with these changes; an empty one where building from nothing costs less."""
        cell = _Cell(self, changes)
        if cell.is_short:
            return cell
        known, batches = cell.last_known()  # another thread may have put a value since the batches were counted
        if known is None or len(batches) > BATCHES_COUNT_MAX:
            return _Cell()
        cell = _Cell(known, _merged(batches))
        return cell if cell.is_short else _Cell()

    @property
    def is_short(self) -> bool:
        return self.batches_count <= BATCHES_COUNT_MAX and self.keys_count <= CHANGED_KEYS_COUNT_MAX


def hand_on(before: ClusterState, state: ClusterState, changes: Changes) -> None:
    """Let the state derive from what is derived before. `changes` are all fields in which the two differ."""
    cells = state.__dict__.setdefault("lineage", {})
    for derivation in _DERIVATIONS:
        cell = derivation.cell(before)
        own = {name: keys for name, keys in changes.items() if name in derivation.fields}
        cells[derivation] = cell.next(own) if own else cell


def _merged(batches: Sequence[Changes]) -> Changes:
    if len(batches) == 1:
        return batches[0]
    names = {name for changes in batches for name in changes}
    return {name: frozenset[Hashable]().union(*(changes.get(name, ()) for changes in batches)) for name in names}
