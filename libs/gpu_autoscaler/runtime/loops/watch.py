"""Passes items of a watched source to `on_item`, one at a time and in order, and stores the resulting facts.

The next item is pulled only when the facts of the last one are stored: nothing piles up while the broker is away.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.loop_context import LoopContext
from gpu_autoscaler.runtime.retry import pause
from gpu_autoscaler.runtime.service import WatchInput

log = structlog.get_logger()

ITEM_LENGTH_MAX = 500  # of an item in a log line


class WatchLoop:
    """One source of a service, by its index. Every run opens it again: a failed source yields nothing more."""

    def __init__(self, context: LoopContext, service: WatchInput, number: int, lock: asyncio.Semaphore) -> None:
        self._context = context
        self._service = service
        self._number = number
        self._name = str(number)
        self._lock = lock  # shared by the service's sources

    async def run(self) -> None:
        """Take items until `stop`, once the state is up to date. A source that ends or fails is a bug."""
        if not await self._context.wait_until_caught_up():
            return
        source: AsyncIterator[Any] = self._service.sources()[self._number]
        stopping = asyncio.create_task(self._context.stop.wait())
        pulling: asyncio.Future[Any] | None = None
        try:
            while not self._context.stop.is_set():
                pulling = asyncio.ensure_future(anext(source))
                await asyncio.wait((pulling, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not pulling.done():
                    return
                try:
                    item = pulling.result()
                except StopAsyncIteration as exc:
                    raise RuntimeError(f"source {self._name} ended; a source must run until it is closed") from exc
                await self._take(item)
        finally:
            stopping.cancel()
            if pulling is not None and not pulling.done():  # a source that is being pulled cannot be closed
                pulling.cancel()
                await asyncio.gather(pulling, return_exceptions=True)
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

    async def _take(self, item: Any) -> None:  # noqa: ANN401 - each service knows its own items
        """Handle the item, retrying in place until its facts are stored."""
        tries = 0
        while True:
            try:
                async with self._lock:
                    outcome = await self._context.with_timeout(self._service.on_item(item))
                await self._context.publish(outcome)
                self._context.readiness.clear(f"source {self._name}")
            except TransientError as exc:
                tries += 1
                self._context.readiness.block(f"source {self._name}", str(exc))
                if await pause(self._context.stop, self._context.limits.backoff.wait_seconds(tries, exc)):
                    return
            except PermanentError:
                log.exception("watched item set aside", source=self._name, item=repr(item)[:ITEM_LENGTH_MAX])
                return
            else:
                return
