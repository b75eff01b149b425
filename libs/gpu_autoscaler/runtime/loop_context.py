"""What the loops of one service share: bus, clock, publisher, limits, state and dead letters."""

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from datetime import datetime

import msgspec
import structlog

from gpu_autoscaler.bus.dead_letters import DeadLetters
from gpu_autoscaler.bus.protocol import Ack, Bus, Message
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.ingress import is_request
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.model.errors import (
    ConfigError,
    InvalidFact,
    MessageTooLarge,
    PermanentError,
    RequestRefused,
    TransientError,
    UnknownType,
)
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.decode import decode_message
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.lease import Lease
from gpu_autoscaler.runtime.metric_families import REFUSED_REQUEST
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.observer import Observer
from gpu_autoscaler.runtime.poison_messages import PoisonMessage
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.publisher import Publisher, as_outcome
from gpu_autoscaler.runtime.resync import Resync
from gpu_autoscaler.runtime.retry import Backoff, pause
from gpu_autoscaler.runtime.service import Outcome, Outputs, ResyncInput, Service
from gpu_autoscaler.runtime.urgency import BatchWindow, Urgency

log = structlog.get_logger()

LEASE_POLL_SECONDS = 0.05
CLOCK_REPORT_SECONDS = 3600.0  # between two log lines about one publisher's clock
CLOCK_SOURCES_COUNT_MAX = 1000
_PLANS = frozenset({ScalingPlanMade, ShadowPlanMade})
READERS = "readers"  # the name under which a message that is no valid fact is set aside, whoever reads it first


class FoldProgress:
    """How far the state is folded: written by the fold loops, awaited by handlers that need a fact in the state."""

    def __init__(self, view: StateView, folds: tuple[type[Fact], ...]) -> None:
        self._view = view
        self._folds = frozenset(folds)
        self._advanced = asyncio.Event()
        self._behind = {fact.stream() for fact in folds}
        self.caught_up = asyncio.Event()
        if not self._behind:
            self.caught_up.set()

    def mark_advanced(self) -> None:
        """Wake those who wait: the state changed."""
        self._advanced.set()
        self._advanced = asyncio.Event()

    def mark_caught_up(self, stream: str) -> None:
        """Record that every stored fact of this stream is folded."""
        self._behind.discard(stream)
        if not self._behind:
            self.caught_up.set()

    @property
    def behind(self) -> tuple[str, ...]:
        """Streams not caught up since the start, sorted."""
        return tuple(sorted(self._behind))

    async def wait_for_fact(self, recorded: Recorded, seconds_max: float) -> None:
        """Return when the state holds the fact; at once for facts that are not folded. Raises TransientError."""
        if type(recorded.fact) in self._folds and not await self.wait_for(
            recorded.stream, recorded.sequence, seconds_max
        ):
            raise TransientError(
                f"state has not reached {recorded.stream} #{recorded.sequence} yet; the fact is retried"
            )

    async def wait_for(self, stream: str, sequence: int, seconds_max: float) -> bool:
        """Wait until the state holds this sequence; False after `seconds_max` of wall time."""
        deadline = time.monotonic() + seconds_max
        while self._view.last_sequence(stream) < sequence:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._advanced.wait()
            except TimeoutError:
                return False
        return True


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limit of every wait, queue and retry of the runtime. Seconds are wall time. Source: our own."""

    in_hand_count_max: int = 16  # messages of a consumer that are fetched and not finished
    fetch_seconds_max: float = 1.0
    effect_seconds_max: float = 120.0  # one call of a handler
    heartbeat_seconds: float = 1.0  # well below the broker's ack_wait
    lag_seconds: float = 5.0  # between two checks of how far a projection is behind
    # Longer than a read takes to notice by itself that its connection or its consumer is lost, and to recover.
    stall_seconds_max: float = 30.0
    stream_watch_seconds: float = 3.0  # between two checks that the streams are still the same
    stream_gauges_seconds: float = 15.0  # between two looks at how full the streams are
    resync_seconds: float = 60.0  # between two checks whether streams may soon discard something living
    max_deliveries_poll_seconds: float = 60.0  # between two reads of the broker's MAX_DELIVERIES advisories
    follow_seconds: float = 5.0  # between two steps of a consumer that follows the lanes it was split into
    # Until it sees a message again that a lane has not finished: 20,000 deliveries of an endless one take a week.
    follow_nak_seconds: float = 30.0
    fold_seconds_max: float = 5.0  # until the projection holds a fact that is to be handled, or our own plan
    bug_tries_count_max: int = 5
    batch_window: BatchWindow = BatchWindow()
    tick_failures_count_max: int = 3  # in a row, before the process reports not ready
    shutdown_seconds_max: float = 10.0
    backoff: Backoff = Backoff()
    # Of a loop that an external error interrupted: the longest wait before a recovered broker is noticed.
    interruption: Backoff = Backoff(seconds_max=1.0)


class LoopContext:
    """Created by the runner, passed to each loop."""

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
        self.is_planner = not _PLANS.isdisjoint(service.publishes)
        self.lease: Lease | None = getattr(service, "lease", None)
        self.stop = asyncio.Event()
        self.config_error: ConfigError | None = None  # the broker no longer matches the declaration: the runner ends
        self.dead_letters = DeadLetters(bus)
        self.fold_progress = FoldProgress(view, service.folds)
        self.urgency = Urgency(limits.batch_window)
        self.urgent_event = asyncio.Event()  # set by every urgent fact
        self.observer = Observer(metrics, view, lambda: self.is_leading)
        self._clock_reported_at: dict[str, float] = {}  # by source
        self.resync = Resync(service) if isinstance(service, ResyncInput) else None
        self._lag_counts: dict[tuple[str, str], int] = {}  # by domain and durable consumer
        self._publisher = Publisher(
            bus, clock, metrics, service=service.name, instance=instance, publishes=service.publishes
        )

    def decode(self, message: Message) -> Recorded:
        """Return the fact of a message with its stream and sequence. Raises InvalidFact, UnknownType."""
        return decode_message(message, self.clock)

    async def publish(self, outputs: Outputs, cause: Envelope | None = None) -> tuple[Ack, ...]:
        """Store the facts of a handler's result. Raises what `Bus.publish` raises.

        A deleted stream ends the process, whose next start creates it; until then the call fails with TransientError,
        so that no message is blamed for it.
        """
        outcome = as_outcome(outputs)
        try:
            acks = await self._publisher.publish(outcome, cause)
        except ConfigError as exc:
            self.config_error = exc
            raise TransientError(str(exc)) from exc
        except MessageTooLarge as exc:
            if not outcome.facts_if_too_large:
                raise
            log.warning("facts refused as too large, shorter ones published", error=str(exc))
            shorter = msgspec.structs.replace(outcome, facts=outcome.facts_if_too_large, facts_if_too_large=())
            return await self.publish(shorter, cause)
        for fact, ack in zip(outcome.facts, acks, strict=True):
            if self.resync is not None:
                now = self.clock.wall_now()
                self.resync.published(fact, ack.sequence, stored_at=now, time=self.clock.at(now))
            if not ack.is_duplicate:
                self.observer.published(fact)
        return acks

    async def publish_again(self, facts: Sequence[tuple[Fact, datetime]]) -> None:
        """Store facts once more, with the times of their events. Raises what `Bus.publish` raises."""
        assert self.resync is not None, f"{self.service} resyncs nothing"  # noqa: S101 - a bug
        acks = await self._publisher.publish_again(facts)
        now = self.clock.wall_now()
        for (fact, happened_at), ack in zip(facts, acks, strict=True):
            self.resync.published(fact, ack.sequence, stored_at=now, time=happened_at)

    def report_clock_ahead(self, recorded: Recorded) -> None:
        """Report that a publisher's clock is ahead, so that its fact was dated back; once an hour per publisher."""
        source, now = recorded.envelope.source, self.clock.monotonic_seconds()
        self.metrics.facts_dated_ahead.labels(recorded.stream.lower()).inc()
        if now - self._clock_reported_at.get(source, -math.inf) >= CLOCK_REPORT_SECONDS:
            if len(self._clock_reported_at) >= CLOCK_SOURCES_COUNT_MAX:
                self._clock_reported_at.clear()
            self._clock_reported_at[source] = now
            log.warning(
                "clock of a publisher is ahead of the broker's; synchronize it",
                source=source, ahead_seconds=round(recorded.ahead_seconds), subject=recorded.fact.subject(),
            )  # fmt: skip

    def record_lag(self, domain: str, durable: str, count: int) -> None:
        """Export how many messages of the domain wait for this service, in all lanes together."""
        self._lag_counts[domain, durable] = count
        self.metrics.consumer_lag.labels(domain).set(
            sum(count for (lag_domain, _), count in self._lag_counts.items() if lag_domain == domain)
        )

    def record_urgent(self, count: int) -> None:
        """Record `count` urgent facts that were folded together, and wake the tick loop."""
        self.urgency.record(count, self.clock.monotonic_seconds())
        self.urgent_event.set()

    async def wait_until_caught_up(self) -> bool:
        """Wait until the state is up to date, as handlers require; False when stopped before."""
        await self.wait_for_any(self.fold_progress.caught_up, None)
        return not self.stop.is_set()

    @property
    def is_leading(self) -> bool:
        """True while this process holds the lease of its service, or the service has none."""
        return self.lease is None or self.lease.is_held

    async def wait_until_leading(self) -> bool:
        """Wait until this process holds the lease of its service; False when stopped before."""
        while not self.is_leading:
            if await pause(self.stop, LEASE_POLL_SECONDS):
                return False
        return not self.stop.is_set()

    async def wait_for_any(self, event: asyncio.Event, seconds: float | None) -> None:
        """Wait for the event, the timeout or `stop`, whichever comes first."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self.stop.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def with_timeout(self, call: Awaitable[Outputs]) -> Outcome:
        """Return the result of a handler. Raises TransientError when it exceeds `effect_seconds_max`."""
        limit = asyncio.timeout(self.limits.effect_seconds_max)
        try:
            async with limit:
                return as_outcome(await call)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise TransientError(
                f"a handler of {self.service} exceeded {self.limits.effect_seconds_max:g} s and is retried"
            ) from exc

    async def set_aside(self, message: Message, error: Exception, *, delivered_count: int) -> None:
        """Store the message as a dead letter with its reason. Raises TransientError while the broker is away."""
        reason = str(error) if isinstance(error, PermanentError) else f"bug in {self.service}: {error!r}"
        await self.dead_letters.set_aside(
            message,
            # One letter for a message that no service can read, whichever comes upon it first.
            service=READERS if isinstance(error, InvalidFact) else self.service,
            reason=reason,
            error_kind=type(error).__name__,
            delivered_count=delivered_count,
            at=self.clock.now(),
        )
        self.metrics.dead_letters.labels(message.stream.lower(), dead_letter_reason(error, message.subject)).inc()


def dead_letter_reason(error: Exception, subject: str) -> str:
    """Return the value of the metric label `reason` for a message that was set aside.

    A client's mistake is for its author to correct: no operator is alerted.
    """
    if isinstance(error, RequestRefused) or (isinstance(error, InvalidFact) and is_request(subject)):
        return REFUSED_REQUEST
    if isinstance(error, UnknownType):
        return "unknown_type"
    if isinstance(error, InvalidFact):
        return "invalid_fact"
    if isinstance(error, PoisonMessage):
        return "poison_message"
    return "permanent_error" if isinstance(error, PermanentError) else "bug"
