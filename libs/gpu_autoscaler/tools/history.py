"""Reads recorded facts back from the streams, in order, up to where they stood. Used by `tools/` and `why`."""

from collections.abc import AsyncIterator, Sequence

import msgspec

from gpu_autoscaler.bus.protocol import Bus, Message
from gpu_autoscaler.bus.streams import subject_filter
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.reading import decode_message


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded fact, and when its stream took it."""

    at: Instant  # cluster time by the broker's clock
    recorded: Recorded


class History:
    """The record of one broker. `clock` gives facts without a time the instant at which they arrived."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def read(
        self,
        stream: str,
        facts: Sequence[type[Fact]],
        *,
        after: int = 0,
        last: int | None = None,
        aside: frozenset[tuple[str, int]] = frozenset(),
    ) -> AsyncIterator[list[Recorded]]:
        """Batches of facts of these types, after one sequence up to and with another (None: now), less those set aside.

        Ends early where the rest is no longer kept. Raises TransientError when the broker is away.
        """
        async for batch in self.stored(stream, facts, after=after, last=last, aside=aside):
            yield [each.recorded for each in batch]

    async def stored(
        self,
        stream: str,
        facts: Sequence[type[Fact]],
        *,
        after: int = 0,
        last: int | None = None,
        aside: frozenset[tuple[str, int]] = frozenset(),
    ) -> AsyncIterator[list[Stored]]:
        """As `read`, with the instant at which the stream took each fact."""
        if last is None:
            last = await self._bus.last_sequence(stream)
        if last <= after:
            return
        subjects = [subject_filter(fact) for fact in facts]
        projection = await self._bus.projection(stream, subjects=subjects, after_sequence=after)
        try:
            if await projection.lag_count() == 0:
                return
            async for batch in projection:
                yield [
                    Stored(at=self._clock.at(message.stored_at), recorded=recorded)
                    for message in batch
                    if message.sequence <= last
                    and (stream, message.sequence) not in aside
                    and (recorded := self._recorded(message)) is not None
                ]
                if batch[-1].sequence >= last or await projection.lag_count() == 0:
                    return
        finally:
            await projection.close()

    async def is_from_the_beginning(self, stream: str) -> bool:
        """False when the first facts of the stream are no longer kept."""
        return await self._bus.message_at(stream, 1) is not None or await self._bus.last_sequence(stream) == 0

    def _recorded(self, message: Message) -> Recorded | None:
        try:
            return decode_message(message, self._clock)
        except InvalidFact:
            return None  # set aside; a cut names only the newest of those
