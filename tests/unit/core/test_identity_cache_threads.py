"""Caches of the core are used by two threads at once: the event loop, and the thread that plans."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gpu_autoscaler.core.identity_cache import RecentValues, cached_by_identity

CALLS_COUNT = 60_000
VALUES = [object() for _ in range(40)]


def test_threads_get_right_values_from_a_cache_that_evicts() -> None:
    """No call fails, each result belongs to its argument, and the cache keeps its bound."""

    @cached_by_identity(8)
    def named(value: object) -> tuple[object, int]:
        return value, id(value)

    def use(offset: int) -> int:
        return sum(
            named(value)[0] is value
            for number in range(CALLS_COUNT)
            for value in (VALUES[(number * 7 + offset) % len(VALUES)],)
        )

    assert _in_threads(use) == [CALLS_COUNT] * 4


def test_threads_share_an_identity_cache() -> None:
    """A value is that of its key, or not cached."""
    cache: RecentValues[tuple[int, ...], object] = RecentValues(8)

    def use(offset: int) -> int:
        wrong = 0
        for number in range(CALLS_COUNT):
            value = VALUES[(number * 3 + offset) % len(VALUES)]
            known = cache.get((id(value),))
            wrong += known not in (None, value)
            cache.put((id(value),), value)
        return wrong

    assert _in_threads(use) == [0] * 4


def _in_threads(use: Callable[[int], int]) -> list[int]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(use, range(4)))
    finally:
        sys.setswitchinterval(before)
