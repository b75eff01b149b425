"""What the loops of one service share: its bus, clock, voice, limits, and where messages go that nobody can read."""

import asyncio
from collections.abc import Awaitable

import msgspec

from gpu_autoscaler.bus.dead_letters import DeadLetters
from gpu_autoscaler.bus.protocol import Ack, Bus, Message
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.model.errors import ConfigError, InvalidFact, PermanentError, TransientError, UnknownType
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.lease import Lease
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.observing import Observer
from gpu_autoscaler.runtime.progress import FoldProgress
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.publisher import Publisher, as_outcome
from gpu_autoscaler.runtime.reading import decode_message
from gpu_autoscaler.runtime.retry import Backoff, pause
from gpu_autoscaler.runtime.service import Outcome, Outputs, Service
from gpu_autoscaler.runtime.trials import PoisonMessage
from gpu_autoscaler.runtime.urgency import BatchWindow, Urgency

LEASE_POLL_SECONDS = 0.05
READERS = "readers"  # in whose name a message is set aside that is no valid fact for anybody


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Where every wait, queue and retry of the runtime ends. Seconds are wall time. Source: our own."""

    in_hand_count_max: int = 16  # messages of a consumer fetched and not ended
    fetch_seconds_max: float = 1.0
    effect_seconds_max: float = 120.0  # one call of a door
    heartbeat_seconds: float = 1.0  # well below the broker's ack_wait
    lag_seconds: float = 5.0  # between two looks at how far a projection is behind
    # More than a read needs by itself to notice that its connection or its consumer is gone, and to go on.
    stall_seconds_max: float = 30.0
    stream_watch_seconds: float = 3.0  # between two looks whether the streams are still the same
    max_deliveries_poll_seconds: float = 60.0  # between two looks at what the broker no longer delivers
    fold_seconds_max: float = 5.0  # for the projection to reach a fact that a door is to handle, or a plan of its own
    bug_tries_count_max: int = 5
    batch_window: BatchWindow = BatchWindow()
    tick_failures_count_max: int = 3  # in a row, until the process says that it is not ready
    shutdown_seconds_max: float = 10.0
    backoff: Backoff = Backoff()
    # Of a loop that something outside interrupted: the broker is back for at most so long before it is noticed.
    interruption: Backoff = Backoff(seconds_max=1.0)


class LoopContext:
    """Made by the runner, handed to each loop."""

    def __init__(
        self,
        service: Service,
        bus: Bus,
        *,
        view: StateView,
        clock: Clock,
        metrics: Metrics,
        readiness: Readiness,
        instance: str,
        limits: Limits,
    ) -> None:
        self.service = service.name
        self.bus = bus
        self.view = view
        self.clock = clock
        self.metrics = metrics
        self.readiness = readiness
        self.limits = limits
        self.lease: Lease | None = getattr(service, "lease", None)
        self.stop = asyncio.Event()
        self.config_error: ConfigError | None = None  # the broker is not as declared any more: the runner ends
        self.dead_letters = DeadLetters(bus)
        self.fold_progress = FoldProgress(view, service.folds)
        self.urgency = Urgency(limits.batch_window)
        self.urgent_event = asyncio.Event()  # something urgent came
        self.observer = Observer(metrics, view)
        self._publisher = Publisher(
            bus, clock, metrics, service=service.name, instance=instance, publishes=service.publishes
        )

    def decode(self, message: Message) -> Recorded:
        """Return the fact of a message with its place in the record. Raises InvalidFact, UnknownType."""
        return decode_message(message, self.clock)

    async def publish(self, outputs: Outputs, cause: Envelope | None = None) -> tuple[Ack, ...]:
        """Store what a door said. Raises what `Bus.publish` raises.

        A stream that was taken away ends the process, whose next start makes it again; until then nothing is at fault
        that waits for it.
        """
        outcome = as_outcome(outputs)
        try:
            acks = await self._publisher.publish(outcome, cause)
        except ConfigError as exc:
            self.config_error = exc
            raise TransientError(str(exc)) from exc
        for fact, ack in zip(outcome.facts, acks, strict=True):
            if not ack.is_duplicate:
                self.observer.published(fact)
        return acks

    def record_urgent(self, count: int) -> None:
        """So many urgent facts went into the state: the tick loop is to look when it ticks next."""
        self.urgency.record(count, self.clock.monotonic_seconds())
        self.urgent_event.set()

    async def wait_until_caught_up(self) -> bool:
        """Wait until the state is up to date, as doors expect to find it; False when it is time to stop before."""
        await self.wait_for_any(self.fold_progress.caught_up, None)
        return not self.stop.is_set()

    async def wait_until_leading(self) -> bool:
        """Wait until this process is the active one of its service; False when it is time to stop before."""
        while self.lease is not None and not self.lease.is_held:
            if await pause(self.stop, LEASE_POLL_SECONDS):
                return False
        return not self.stop.is_set()

    async def wait_for_any(self, event: asyncio.Event, seconds: float | None) -> None:
        """Wait for the event, the end of the wait, or the time to stop, whichever comes first."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self.stop.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def with_timeout(self, door: Awaitable[Outputs]) -> Outcome:
        """Return what a door says. Raises TransientError when it takes longer than any door may."""
        limit = asyncio.timeout(self.limits.effect_seconds_max)
        try:
            async with limit:
                return as_outcome(await door)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise TransientError(f"a door of {self.service} took over {self.limits.effect_seconds_max:g} s") from exc

    async def set_aside(self, message: Message, error: Exception, *, delivered_count: int) -> None:
        """Store the message as a dead letter with its reason. Raises TransientError while the broker is away."""
        reason = str(error) if isinstance(error, PermanentError) else f"bug in {self.service}: {error!r}"
        await self.dead_letters.set_aside(
            message,
            # What nobody can read is set aside once, whoever comes upon it first.
            service=READERS if isinstance(error, InvalidFact) else self.service,
            reason=reason,
            error_kind=type(error).__name__,
            delivered_count=delivered_count,
            at=self.clock.now(),
        )
        self.metrics.dead_letters.labels(message.stream.lower(), set_aside_reason(error)).inc()


def set_aside_reason(error: Exception) -> str:
    """Return the metric label for why a message was set aside."""
    if isinstance(error, UnknownType):
        return "unknown_type"
    if isinstance(error, InvalidFact):
        return "invalid_fact"
    if isinstance(error, PoisonMessage):
        return "poison_message"
    return "permanent_error" if isinstance(error, PermanentError) else "bug"
