"""A service on a bus in this process, with short timeouts: the ground of the runner's tests."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import ClassVar

from tests.support.memory_bus import MemoryBus

from gpu_autoscaler.bus.dead_letters import DeadLetter, DeadLetters
from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.protocol import Ack, Message, Publication
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.catalog import FACT_CATALOG
from gpu_autoscaler.events.envelope import Envelope, Recorded, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.loop_context import Limits
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.retry import Backoff
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.service import Outputs, Service, consumers_of

QUICK = Limits(
    fetch_seconds_max=0.2,
    effect_seconds_max=2.0,
    heartbeat_seconds=0.2,
    lag_seconds=0.2,
    stream_watch_seconds=0.2,
    max_deliveries_poll_seconds=0.2,
    follow_seconds=0.1,
    follow_nak_seconds=0.2,
    fold_seconds_max=1.0,
    shutdown_seconds_max=1.0,
    backoff=Backoff(first_seconds=0.01, seconds_max=0.05),
)


class Away(MemoryBus):
    """A bus whose broker can be stopped: nothing is stored, nothing is fetched."""

    is_away = False

    @property
    def is_connected(self) -> bool:
        return not self.is_away

    async def publish_many(self, publications: Sequence[Publication]) -> Sequence[Ack]:
        if self.is_away:
            raise TransientError("the broker is away")
        return await super().publish_many(publications)


class Place:
    """A broker, and what tests ask of it. `passed` is wall time that a test lets pass at once."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.passed = timedelta()
        self._numbers = itertools.count(1)

    def now(self) -> datetime:
        """The broker's time."""
        return datetime.now(UTC) + self.passed

    async def bus(self, service: "type[Service | Probe] | None" = None, kind: type[MemoryBus] = Away) -> MemoryBus:
        """A hand on the broker, with the consumers of a service."""
        consumers = () if service is None else consumers_of(service)
        bus = kind(self.broker, BusDeclaration(streams=streams(), consumers=consumers), now=self.now)
        await bus.ensure()
        return bus

    async def say(self, fact: Fact, name: str | None = None, *, at: datetime | None = None) -> Ack:
        """Somebody publishes a fact."""
        event_id = FactId(name or fact.condition() or f"said-{next(self._numbers)}")
        envelope = Envelope(id=event_id, source="/tests", time=at or datetime.now(UTC), fact=fact)
        return await self.send(fact.subject(), encode(envelope), event_id)

    async def send(self, subject: str, payload: bytes, message_id: str) -> Ack:
        """Somebody publishes bytes."""
        return await (await self.bus()).publish(subject, payload, message_id=message_id)

    async def stored(self, kind: type[Fact]) -> list[Envelope]:
        """Everything of this type that the stream has."""
        messages = await self.messages(kind.stream())
        return [FACT_CATALOG.decode(message.payload) for message in messages if message.subject == kind.subject_root()]

    async def messages(self, stream: str) -> list[Message]:
        """Every message of a stream."""
        bus = await self.bus()
        last = await bus.last_sequence(stream)
        found = [await bus.message_at(stream, sequence) for sequence in range(1, last + 1)]
        return [message for message in found if message is not None]

    async def dead_letters(self) -> Sequence[DeadLetter]:
        """What was set aside."""
        return await DeadLetters(await self.bus()).page()


class Probe:
    """A service that does what a test defines and records its input. Subclasses define input and output."""

    name: ClassVar[str] = "probe"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = ()
    publishes: ClassVar[tuple[type[Fact], ...]] = ()
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = None

    def __init__(
        self,
        on_fact: Callable[[Recorded], Awaitable[Outputs]] | None = None,
        on_tick: Callable[[datetime], Awaitable[Outputs]] | None = None,
    ) -> None:
        self.view = StateView()
        self.given: list[Recorded] = []
        self.ticks: list[datetime] = []
        self._on_fact = on_fact
        self._on_tick = on_tick

    async def on_fact(self, recorded: Recorded) -> Outputs:
        """Record the fact and do what the test defines."""
        self.given.append(recorded)
        return () if self._on_fact is None else await self._on_fact(recorded)

    async def on_tick(self, now: datetime) -> Outputs:
        """Record the tick and do what the test defines."""
        self.ticks.append(now)
        return () if self._on_tick is None else await self._on_tick(now)


@asynccontextmanager
async def running(
    place: Place,
    service: Service | Probe,
    *,
    bus: MemoryBus | None = None,
    limits: Limits = QUICK,
    view: StateView | None = None,
) -> AsyncIterator[Runner]:
    """Run the service until the block ends, then stop it cleanly. A probe brings its own view."""
    own = service.view if isinstance(service, Probe) else StateView()
    hand = bus or await place.bus(type(service))
    runner = Runner(service, hand, view=view or own, clock=Clock(), instance="test", limits=limits)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
        runner.stop()
        async with asyncio.timeout(60):
            await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(holds: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds_max: float = 60.0) -> None:
    """Wait until something holds; fail when it does not within the time."""
    try:
        async with asyncio.timeout(seconds_max):
            while True:
                answer = holds()
                if answer if isinstance(answer, bool) else await answer:
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never came true within {seconds_max} s") from None
