"""Caches keyed by the identity of their arguments, for queries that repeat on every tick.

For small or rarely changed inputs: policies, catalogs, orders, one pod. What is derived from all nodes or pods is
updated from changed keys instead (`core/state/lineage.py`, `core/nodes/views.py: NodeIndex`).

Records are frozen and `fold` replaces only changed ones: an identical object has identical content. Both caches may be
used by several threads: a plan is computed beside the event loop. Two threads may compute the same value.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Generic, TypeVar, TypeVarTuple

Args = TypeVarTuple("Args")
Result = TypeVar("Result")
T = TypeVar("T")


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
                while len(results) >= count_max:
                    with suppress(RuntimeError):  # another thread changed it meanwhile
                        results.pop(next(iter(results)), None)
                results[key] = entry
            return entry[1]

        return call

    return decorate


class IdentityCache(Generic[T]):
    """Values by the identities of their sources, until unused while `count_max` others are added.

    A value must reference its sources, so that their ids are not reused.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._young: dict[tuple[int, ...], T] = {}
        self._old: dict[tuple[int, ...], T] = {}

    def get(self, key: tuple[int, ...]) -> T | None:
        """Return the value; None if it is not cached."""
        value = self._young.get(key)
        if value is None and (value := self._old.get(key)) is not None:
            self.put(key, value)
        return value

    def put(self, key: tuple[int, ...], value: T) -> None:
        if len(self._young) >= self._count_max:
            self._old, self._young = self._young, {}
        self._young[key] = value
