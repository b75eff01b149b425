"""Read every stream of a running system into a record, as any subscriber can."""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Bus, Message
from gpu_autoscaler.bus.streams import STREAMS as STREAM_SPECS
from gpu_autoscaler.bus.streams import BusDeclaration
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.decode import decode_message
from gpu_autoscaler_services.demo.record import Record, Seen


async def connect(nats_url: str) -> NatsBus:
    """Return a connection without consumers."""
    return await NatsBus.connect(nats_url.split(","), name="demo", declared=BusDeclaration(streams=STREAM_SPECS))


STREAMS = tuple(sorted({fact.stream() for fact in FACTS}))


class Subscriber:
    """Follows all streams from their beginning; calls `on_seen` once per fact, in the order of its stream."""

    def __init__(
        self, bus: Bus, clock: Clock, on_seen: Callable[[Seen], None] = lambda _: None, *, is_kept: bool = True
    ) -> None:
        """Unless `is_kept`, the record stays empty, so that memory stays bounded over weeks."""
        self.record = Record()
        self._is_kept = is_kept
        self._bus = bus
        self._clock = clock
        self._on_seen = on_seen
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._follow(stream), name=f"follow {stream}") for stream in STREAMS]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _follow(self, stream: str) -> None:
        projection = await self._bus.projection(stream)
        try:
            async for batch in projection:
                for message in batch:
                    if (seen := self._read(message)) is not None:
                        if self._is_kept:
                            self.record.add(seen)
                        self._on_seen(seen)
        finally:
            await projection.close()

    def _read(self, message: Message) -> Seen | None:
        try:
            recorded = decode_message(message, self._clock)
        except InvalidFact:
            return None  # a dead letter of a service; see `dead-letters list`
        return Seen(recorded=recorded, stored_at=message.stored_at)
