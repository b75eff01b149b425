"""Which facts do the streams hold? Reads them in order, up to the last one stored. Used by `replay/`, `why` and the
start from a snapshot of another version."""

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime

import msgspec

from gpu_autoscaler.bus.protocol import Bus, Message, StreamSpan
from gpu_autoscaler.bus.streams import subject_filter
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.decode import decode_message


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded fact and the time at which its stream stored it."""

    at: Instant  # cluster time by the broker's clock
    recorded: Recorded


class History:
    """The streams of one broker. `clock` dates facts without a time of their own by their arrival.

    `keeps_refused`: with demand reports that every other reader refuses for their unknown fields.
    """

    def __init__(self, bus: Bus, clock: Clock, *, keeps_refused: bool = False) -> None:
        self._bus = bus
        self._keeps_refused = keeps_refused
        self._clock = clock

    async def span(self, stream: str) -> StreamSpan:
        return await self._bus.span(stream)

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        return await self._bus.message_at(stream, sequence)

    async def facts(self, stream: str, facts: Sequence[type[Fact]], last: int) -> list[Recorded]:
        """Return the stored facts of these types up to this sequence. Raises as `read`."""
        return [stored.recorded async for batch in self.read(stream, facts, last=last) for stored in batch]

    async def read(
        self,
        stream: str,
        facts: Sequence[type[Fact]],
        *,
        after: int = 0,
        last: int | None = None,
        aside: frozenset[tuple[str, int]] = frozenset(),
    ) -> AsyncIterator[list[Stored]]:
        """Yield batches of facts of these types with `after` < sequence <= `last`; None: the current last.

        Omits dead letters in `aside`; ends early if the rest has expired. Raises TransientError without a broker.
        """
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

    async def last(self, fact: type[Fact]) -> Recorded | None:
        """Return the last stored fact of this type; None without one, or if it is a dead letter."""
        message = await self._bus.last_message(fact.stream(), fact.subject_root())
        return None if message is None else self._recorded(message)

    async def first_plan(self, is_sought: Callable[[ScalingPlanMade, datetime], bool]) -> ScalingPlanMade | None:
        """Return the first plan for which `is_sought`, called with the plan and its storage time, is true."""
        async for batch in self.read(ScalingPlanMade.stream(), [ScalingPlanMade]):
            for stored in batch:
                fact = stored.recorded.fact
                if isinstance(fact, ScalingPlanMade) and is_sought(fact, stored.at):
                    return fact
        return None

    async def is_from_the_beginning(self, stream: str) -> bool:
        return await self._bus.message_at(stream, 1) is not None or await self._bus.last_sequence(stream) == 0

    def _recorded(self, message: Message) -> Recorded | None:
        try:
            return decode_message(message, self._clock, keeps_refused=self._keeps_refused)
        except InvalidFact:
            return None  # a dead letter; a cut names only the newest of them
