"""Slots: how many facts a service handles at once. Used by the effect loops.

A slot is held while a fact is handled, except while its handler waits for an API rate limit of ours: then another fact
is handled. How many wait so is limited by the rate limit's longest wait and by the consumer's `max_ack_pending`.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from gpu_autoscaler.providers.throttling import while_waiting


class LaneSlots:
    """The slots of one lane, or of all facts of a service without lanes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.waiting_count = 0  # handlers that wait for a rate limit, without a slot
        self.given_back = asyncio.Event()  # set when a handler begins to wait
        self._free = asyncio.Semaphore(count)
        self._exclusive = asyncio.Lock()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a slot, but not while the handler waits for a rate limit."""
        held = _HandlerSlot(self, self._free)
        await self._free.acquire()
        token = while_waiting.set(held.given_back)
        try:
            yield
        finally:
            while_waiting.reset(token)
            held.end()

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Hold every slot, so that nothing else is handled meanwhile."""
        taken = 0
        async with self._exclusive:
            try:
                while taken < self.count:
                    await self._free.acquire()
                    taken += 1
                yield
            finally:
                for _ in range(taken):
                    self._free.release()


@asynccontextmanager
async def all_of(lanes: Sequence[LaneSlots]) -> AsyncIterator[None]:
    """Hold every slot of every lane; `lanes` in the same order at each call."""
    async with AsyncExitStack() as stack:
        for slots in lanes:
            await stack.enter_async_context(slots.all())
        yield


class _HandlerSlot:
    """The slot of one handler."""

    def __init__(self, slots: LaneSlots, free: asyncio.Semaphore) -> None:
        self._slots = slots
        self._free = free
        self._is_held = True
        self._has_ended = False
        self._waits_count = 0  # calls of the handler that wait now

    def end(self) -> None:
        """The handler has ended."""
        self._has_ended = True
        self._release()

    @asynccontextmanager
    async def given_back(self) -> AsyncIterator[None]:
        """Give the slot back, and take one again at the end; nothing for a call that outlives its handler."""
        self._waits_count += 1
        self._slots.waiting_count += 1
        self._release()
        self._slots.given_back.set()
        try:
            yield
        finally:
            self._waits_count -= 1
            try:
                if not self._waits_count and not self._has_ended:
                    await self._take()
            finally:
                self._slots.waiting_count -= 1

    async def _take(self) -> None:
        await self._free.acquire()
        self._is_held = True
        if self._has_ended:
            self._release()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._free.release()
