"""Caches keyed by the identity of their arguments, for queries that repeat on every tick.

For small or rarely changed inputs: policies, catalogs, orders, one pod. What is derived from all nodes or pods is
updated from changed keys instead (`core/state/lineage.py`, `core/nodes/views.py: NodeIndex`).

Records are frozen and `fold` replaces only changed ones: an identical object has identical content. The caches may be
used by several threads: a plan is computed beside the event loop. Two threads may compute the same value.
"""

from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import datetime
from functools import wraps
from typing import Generic, NamedTuple, TypeVar, TypeVarTuple

from gpu_autoscaler.core.next_change import TrackedInstant, note, plain

Args = TypeVarTuple("Args")
Result = TypeVar("Result")
T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def cached_by_identity(count_max: int) -> Callable[[Callable[[*Args], Result]], Callable[[*Args], Result]]:
    """Cache the results of the last `count_max` different arguments. Arguments must be frozen."""

    def decorate(function: Callable[[*Args], Result]) -> Callable[[*Args], Result]:
        # The arguments are stored with the result, so that their ids are not reused.
        results: dict[tuple[int, ...], tuple[tuple[*Args], Result]] = {}

        @wraps(function)
        def call(*args: *Args) -> Result:
            key = tuple(map(id, args))
            entry = results.get(key)
            if entry is None:
                entry = (args, function(*args))
                _put(results, key, entry, count_max)
            return entry[1]

        return call

    return decorate


class _Span(NamedTuple, Generic[Result]):
    """A result, and the instants at which it is the same."""

    sources: tuple[object, ...]  # held, so that their ids are not reused
    since: datetime
    until: datetime | None  # None: time alone changes nothing
    result: Result


def cached_until_change(
    count_max: int,
) -> Callable[[Callable[[*Args, datetime], Result]], Callable[[*Args, datetime], Result]]:
    """Cache like `cached_by_identity`, but the last argument is the instant: the result of an earlier one is returned
    until the change that the function noted. The result may hold nothing that moves on with every instant.
    """

    def decorate(function: Callable[[*Args, datetime], Result]) -> Callable[[*Args, datetime], Result]:
        spans: dict[tuple[int, ...], _Span[Result]] = {}

        @wraps(function)
        def call(*args: *tuple[*Args, datetime]) -> Result:
            sources, as_of = args[:-1], args[-1]
            at, key = plain(as_of), tuple(map(id, sources))
            span = spans.get(key)
            if span is None or at < span.since or (span.until is not None and at >= span.until):
                tracked = TrackedInstant.of(at)
                result = function(*sources, tracked)
                span = _Span(sources, at, tracked.next_change_at, result)
                _put(spans, key, span, count_max)
            if span.until is not None:
                note(as_of, span.until)
            return span.result

        return call

    return decorate


def _put(results: dict[tuple[int, ...], T], key: tuple[int, ...], entry: T, count_max: int) -> None:
    """Add the entry, and remove the oldest ones beyond the maximum."""
    while len(results) >= count_max:
        with suppress(RuntimeError):  # another thread changed it meanwhile
            results.pop(next(iter(results)), None)
    results[key] = entry


class RecentValues(Generic[Key, T]):
    """Values by key, until unused while `count_max` others are added.

    A value by the identities of its sources must reference them, so that their ids are not reused.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._young: dict[Key, T] = {}
        self._old: dict[Key, T] = {}

    def get(self, key: Key) -> T | None:
        """Return the value; None if it is not cached."""
        value = self._young.get(key)
        if value is None and (value := self._old.get(key)) is not None:
            self.put(key, value)
        return value

    def put(self, key: Key, value: T) -> None:
        if len(self._young) >= self._count_max:
            self._old, self._young = self._young, {}
        self._young[key] = value
