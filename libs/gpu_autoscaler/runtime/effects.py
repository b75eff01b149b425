"""Gives consumed facts their effect: decode, call the door, store what it says, and only then acknowledge.

A crash anywhere in between makes the message come again; derived ids make the repeat harmless.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import structlog

from gpu_autoscaler.bus.protocol import Delivery, EffectConsumer
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.model.errors import ConfigError, PermanentError, StalePlan, TransientError
from gpu_autoscaler.runtime.plumbing import LoopContext, set_aside_reason
from gpu_autoscaler.runtime.service import FactInput
from gpu_autoscaler.runtime.trials import PoisonMessage, AttemptRecords

log = structlog.get_logger()

TRIES_REMEMBERED_MAX = 10_000  # messages of which this process knows how often they failed here
STALE_SECONDS = 0.1  # the fact that beat this one arrives within this
ERROR_LENGTH_MAX = 500  # of an error in a log line; a dead letter carries it whole


class ConcurrencyLimit:
    """How many facts are in a service's door at once, over all its domains."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.turn = asyncio.Semaphore(count)
        self._alone = asyncio.Lock()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """The turn of one that nobody else may have beside it."""
        taken = 0
        async with self._alone:
            try:
                while taken < self.count:
                    await self.turn.acquire()
                    taken += 1
                yield
            finally:
                for _ in range(taken):
                    self.turn.release()


class EffectLoop:
    """One durable consumer's messages on their way through the service's fact door."""

    def __init__(self, context: LoopContext, service: FactInput, durable: str, domain: str, concurrency: ConcurrencyLimit) -> None:
        self._context = context
        self._service = service
        self._durable = durable
        self._domain = domain
        self._concurrency = concurrency  # shared by the service's loops
        self._in_hand: dict[asyncio.Task[None], Delivery] = {}
        # Failures by message. The broker's own count also counts waits that were asked for, so it says nothing.
        self._tries: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._survived: OrderedDict[tuple[str, int], None] = OrderedDict()  # begun here, and we are still there
        self._trials = AttemptRecords(context.bus, context.service)

    async def run(self) -> None:
        """Take messages until it is time to stop, then finish what is in hand. Raises TransientError, ConfigError."""
        limits = self._context.limits
        consumer = await self._context.bus.effect_consumer(self._durable)
        alive = asyncio.create_task(self._keep_alive(consumer))
        try:
            if not await self._context.wait_until_caught_up():
                return
            while await self._context.wait_until_leading():
                room = max(limits.in_hand_count_max, self._concurrency.count) - len(self._in_hand)
                if room <= 0:
                    await asyncio.wait(self._in_hand, return_when=asyncio.FIRST_COMPLETED)
                    continue
                deliveries = await self._fetch(consumer, room)
                self._context.readiness.clear(f"consumer {self._durable}")
                for delivery in deliveries:
                    task = asyncio.create_task(self._handle(delivery))
                    self._in_hand[task] = delivery
                    task.add_done_callback(self._in_hand.pop)
        finally:
            await self._finish()
            alive.cancel()
            await consumer.close()

    async def _fetch(self, consumer: EffectConsumer, room: int) -> list[Delivery]:
        """Fetch, but leave at once when it is time to stop: what is delivered to nobody comes again by itself."""
        fetching = asyncio.ensure_future(consumer.fetch(room, self._context.limits.fetch_seconds_max))
        stopping = asyncio.create_task(self._context.stop.wait())
        try:
            await asyncio.wait((fetching, stopping), return_when=asyncio.FIRST_COMPLETED)
            return list(fetching.result()) if fetching.done() else []
        finally:
            stopping.cancel()
            fetching.cancel()

    async def _finish(self) -> None:
        """Wait for what is in hand, within the limit; what is left is delivered again to somebody else."""
        if not self._in_hand:
            return
        tasks = list(self._in_hand)
        _, late = await asyncio.wait(tasks, timeout=self._context.limits.shutdown_seconds_max)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_alive(self, consumer: EffectConsumer) -> None:
        """Tell the broker that work goes on, and count what waits, until cancelled."""
        while True:
            await asyncio.sleep(self._context.limits.heartbeat_seconds)
            # All at once: one that the broker has forgotten takes seconds to fail, and the others have four.
            beats = (self._tell(delivery.in_progress()) for delivery in self._in_hand.values())
            await asyncio.gather(self._count_lag(consumer), *beats)

    async def _count_lag(self, consumer: EffectConsumer) -> None:
        try:
            self._context.metrics.consumer_lag.labels(self._domain).set(await consumer.pending_count())
        except ConfigError as exc:
            self._context.config_error = exc
        except (TransientError, PermanentError) as exc:
            log.debug("lag not known", durable=self._durable, error=str(exc))

    async def _handle(self, delivery: Delivery) -> None:
        key = (delivery.message.stream, delivery.message.sequence)
        if delivery.delivered_count == 1 or key in self._survived:
            async with self._concurrency.turn:
                await self._take(delivery)
        else:
            await self._try_suspect(delivery)
        self._survived[key] = None
        if len(self._survived) > TRIES_REMEMBERED_MAX:
            self._survived.popitem(last=False)

    async def _try_suspect(self, delivery: Delivery) -> None:
        """Somebody else had it, and may have died of it: see `runtime/trials.py`."""
        context, message = self._context, delivery.message
        try:
            attempts_count = await self._trials.attempts_count(delivery)
            async with self._concurrency.alone() if attempts_count else self._concurrency.turn:
                await self._trials.begin(delivery, attempts_count)
                await self._take(delivery)
            await self._trials.survived(delivery)
        except PoisonMessage as exc:
            log.error(  # noqa: TRY400 - nothing failed here
                "message set aside: no process survives it; see `gpu-autoscaler dead-letters`",
                subject=message.subject, sequence=message.sequence, error=str(exc),
            )  # fmt: skip
            await self._set_aside(delivery, exc)
            context.metrics.facts_handled.labels(self._domain, "set_aside").inc()
        except (TransientError, PermanentError, ConfigError) as exc:
            log.warning("suspect message left for later: its record is out of reach", error=str(exc))
            await self._tell(delivery.nak(context.limits.backoff.wait_seconds(delivery.delivered_count, exc)))

    async def _take(self, delivery: Delivery) -> None:
        if self._context.stop.is_set():  # fetched, but not begun: somebody else's
            await self._tell(delivery.nak(0.0))
            return
        await self._attempt(delivery)

    async def _attempt(self, delivery: Delivery) -> None:
        """One try of one message, from reading to its end, with its canonical log line."""
        context, message = self._context, delivery.message
        started = context.clock.monotonic_seconds()
        line = log.bind(subject=message.subject, sequence=message.sequence, delivered_count=delivery.delivered_count)
        error: Exception | None = None
        try:
            recorded = context.decode(message)
            line = line.bind(
                fact_type=recorded.envelope.type,
                fact_id=recorded.envelope.id,
                correlation_id=recorded.envelope.correlation_id,
                about=recorded.fact.entity(),
            )
            outcome, redeliver_after_seconds = "done", await self._effect(recorded)
            if redeliver_after_seconds is None:
                await self._tell(delivery.ack())
            else:
                outcome = "again"
                await self._tell(delivery.nak(redeliver_after_seconds))
            self._tries.pop((message.stream, message.sequence), None)
            context.readiness.clear(f"facts {self._domain}")
        except StalePlan as exc:
            outcome, error = "stale", exc
            context.metrics.plans_stale.inc()
            await self._tell(delivery.nak(STALE_SECONDS))
        except TransientError as exc:
            outcome, error = "retried", exc
            await self._tell(delivery.nak(context.limits.backoff.wait_seconds(self._count_try(delivery), exc)))
        except PermanentError as exc:
            outcome, error = "set_aside", exc
            await self._set_aside(delivery, exc)
        except Exception as exc:  # noqa: BLE001 - whatever a door raises, the next fact must have its turn
            outcome, error = "bug", exc
            await self._after_bug(delivery, exc)
        seconds = context.clock.monotonic_seconds() - started
        context.metrics.facts_handled.labels(self._domain, outcome).inc()
        context.metrics.handle_seconds.labels(self._domain).observe(seconds)
        say = line.info if error is None else line.warning
        told = {} if error is None else {"error": str(error)[:ERROR_LENGTH_MAX]}
        say("fact handled", outcome=outcome, duration_seconds=round(seconds, 6), **told)

    async def _effect(self, recorded: Recorded) -> float | None:
        """Call the door and store what it says; the seconds after which it wants the fact again, if it does."""
        context = self._context
        await context.fold_progress.wait_for_fact(recorded, context.limits.fold_seconds_max)
        outcome = await context.with_timeout(self._service.on_fact(recorded))
        await context.publish(outcome, recorded.envelope)
        if outcome.set_aside_reason is not None:
            raise PermanentError(outcome.set_aside_reason)
        return outcome.redeliver_after_seconds

    def _count_try(self, delivery: Delivery) -> int:
        key = (delivery.message.stream, delivery.message.sequence)
        tries = self._tries.pop(key, 0) + 1
        self._tries[key] = tries
        if len(self._tries) > TRIES_REMEMBERED_MAX:
            self._tries.popitem(last=False)
        return tries

    async def _after_bug(self, delivery: Delivery, bug: Exception) -> None:
        """Log the traceback once, try again up to the limit, then set the message aside."""
        context, message = self._context, delivery.message
        tries = self._count_try(delivery)
        if tries == 1:
            log.error("fact door failed", subject=message.subject, sequence=message.sequence, exc_info=bug)
        context.readiness.block(f"facts {self._domain}", f"{message.subject} #{message.sequence}: {bug!r}")
        if tries >= context.limits.bug_tries_count_max:
            await self._set_aside(delivery, bug)
            context.readiness.clear(f"facts {self._domain}")
            return
        await self._tell(delivery.nak(context.limits.backoff.wait_seconds(tries)))

    async def _set_aside(self, delivery: Delivery, error: Exception) -> None:
        """Store the dead letter, then give the message up; while that fails the message stays."""
        context = self._context
        try:
            await context.set_aside(delivery.message, error, delivered_count=delivery.delivered_count)
        except TransientError as exc:
            await self._tell(delivery.nak(context.limits.backoff.wait_seconds(delivery.delivered_count, exc)))
            return
        self._tries.pop((delivery.message.stream, delivery.message.sequence), None)
        await self._tell(delivery.term(set_aside_reason(error)))

    async def _tell(self, word: Awaitable[None]) -> None:
        """Tell the broker how it went; if it is away the message comes again, which is harmless."""
        try:
            await word
        except TransientError as exc:
            log.debug("acknowledgement lost", durable=self._durable, error=str(exc))
