"""One read for all who ask at once: fresh to everybody who gets it, and made no more often than needed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedRead(Generic[T]):
    """A read that began after one asked for it. One runs at a time; all who come meanwhile share the next."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._next: asyncio.Task[T] | None = None
        self._turn = asyncio.Lock()

    async def fresh(self) -> T:
        """Return what a read brings that has not begun yet. Raises what it raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._in_turn())
        # One who gives up does not take it from the others.
        return await asyncio.shield(self._next)

    async def _in_turn(self) -> T:
        async with self._turn:
            self._next = None
            return await self._read()
