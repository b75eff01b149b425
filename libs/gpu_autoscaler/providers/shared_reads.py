"""No more reads than needed: results kept for a while, and one fresh read shared by all concurrent callers."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class KeptReads(Generic[K, T]):
    """Reads by key, each repeated once its result is older than `kept`."""

    def __init__(self, kept: timedelta) -> None:
        self._kept = kept
        self._known: dict[K, tuple[datetime, T]] = {}

    async def get(self, key: K, now: datetime, read: Callable[[], Awaitable[T]]) -> T:
        """Return the kept result, else that of `read`. Raises what the read raises."""
        known = self._known.get(key)
        if known is None or now - known[0] >= self._kept:
            known = self._known[key] = (now, await read())
        return known[1]


class SharedRead(Generic[T]):
    """A read that begins after the caller asked. One runs at a time; callers in between share the next."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._next: asyncio.Task[T] | None = None
        self._turn = asyncio.Lock()

    async def fresh(self) -> T:
        """Return the result of a read that has not begun yet. Raises what the read raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._in_turn())
        # A canceled caller does not cancel the read of the others.
        return await asyncio.shield(self._next)

    async def _in_turn(self) -> T:
        async with self._turn:
            self._next = None
            return await self._read()
