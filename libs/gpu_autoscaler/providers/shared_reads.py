"""One read shared by all concurrent callers: fresh for each of them, and no more reads than needed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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
