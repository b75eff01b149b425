"""Handles consumed facts: decode, call `on_fact`, store the resulting facts, and only then acknowledge.

After a crash at any point the message is delivered again; derived ids make the repeat harmless.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Sequence

import structlog

from gpu_autoscaler.bus.protocol import Delivery, EffectConsumer
from gpu_autoscaler.bus.streams import ConsumerSpec
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.model.errors import ConfigError, PermanentError, RequestRefused, StalePlan, TransientError
from gpu_autoscaler.runtime.loop_context import LoopContext, dead_letter_reason
from gpu_autoscaler.runtime.poison_messages import ATTEMPTS_COUNT_MAX, AttemptRecords, PoisonMessage
from gpu_autoscaler.runtime.retry import pause
from gpu_autoscaler.runtime.service import FactInput, Outcome
from gpu_autoscaler.runtime.slots import LaneSlots, all_of
from gpu_autoscaler.runtime.steps import take_steps

log = structlog.get_logger()

TRIES_REMEMBERED_MAX = 10_000  # messages whose failures in this process are counted
STALE_SECONDS = 0.1  # the fact that won the race arrives within this
ERROR_LENGTH_MAX = 500  # of an error in a log line; the dead letter has all of it


class EffectLoop:
    """Handles the messages of one durable consumer."""

    def __init__(
        self,
        context: LoopContext,
        service: FactInput,
        spec: ConsumerSpec,
        slots: LaneSlots,
        all_slots: Sequence[LaneSlots],
        lane: str | None = None,
    ) -> None:
        """`slots` are those of the lane, or of all the service's loops; `all_slots`: those of every lane."""
        self._context = context
        self._service = service
        self._spec = spec
        self._durable = spec.durable
        self._domain = spec.stream.lower()
        self._condition = f"facts {self._domain}" if spec.split_from is None else f"facts {spec.durable}"
        self._slots = slots
        self._all_slots = all_slots
        self._lane = lane
        self._begun_count = 0  # messages in hand whose handler runs
        self._handled_sequence: int | None = None  # up to here facts were handled before the lane was split off
        self._in_hand: dict[asyncio.Task[None], Delivery] = {}
        # Failures by message. The broker's delivery count includes requested redeliveries, so it cannot be used.
        self._tries: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._survived: OrderedDict[tuple[str, int], None] = OrderedDict()  # handled here before without a crash
        self._attempts = AttemptRecords(context.bus, context.service)

    async def run(self) -> None:
        """Take messages until `stop`, then finish those in hand. Raises TransientError, ConfigError."""
        limits = self._context.limits
        consumer = await self._context.bus.effect_consumer(self._durable)
        alive = asyncio.create_task(self._keep_alive(consumer))
        try:
            if not await self._context.wait_until_caught_up():
                return
            while await self._wait_until_leading():
                in_hand_count = len(self._in_hand) - self._slots.waiting_count
                free = max(limits.in_hand_count_max, self._slots.count) - in_hand_count
                if free <= 0:
                    await self._wait_for_slot()
                    continue
                deliveries = await self._fetch(consumer, free)
                self._context.readiness.clear(f"consumer {self._durable}")
                for delivery in deliveries:
                    task = asyncio.create_task(self._handle(delivery))
                    self._in_hand[task] = delivery
                    task.add_done_callback(self._in_hand.pop)
        finally:
            await self._finish()
            alive.cancel()
            await consumer.close()

    async def _wait_until_leading(self) -> bool:
        """Wait for the lease; False when stopped before. Then find what another release has handled until now."""
        context = self._context
        if self._spec.split_from is None:
            return await context.wait_until_leading()
        if not context.is_leading:
            self._handled_sequence = None
        if not await context.wait_until_leading():
            return False
        if self._handled_sequence is None:
            origin = await context.bus.effect_consumer(self._spec.split_from)
            try:
                self._handled_sequence = await origin.acknowledged_sequence()
            finally:
                await origin.close()
        return True

    async def _wait_for_slot(self) -> None:
        """Return when a message in hand is finished, or waits for a rate limit without its slot, or at `stop`."""
        self._slots.given_back.clear()
        events = [asyncio.create_task(event.wait()) for event in (self._slots.given_back, self._context.stop)]
        try:
            await asyncio.wait((*self._in_hand, *events), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()

    async def _fetch(self, consumer: EffectConsumer, count_max: int) -> list[Delivery]:
        """Fetch, but return at once on `stop`: a message that nobody acknowledges is delivered again."""
        fetching = asyncio.ensure_future(consumer.fetch(count_max, self._context.limits.fetch_seconds_max))
        stopping = asyncio.create_task(self._context.stop.wait())
        try:
            await asyncio.wait((fetching, stopping), return_when=asyncio.FIRST_COMPLETED)
            return list(fetching.result()) if fetching.done() else []
        finally:
            stopping.cancel()
            fetching.cancel()

    async def _finish(self) -> None:
        """Wait for the messages in hand, within the limit; the others are delivered to another process."""
        if not self._in_hand:
            return
        tasks = list(self._in_hand)
        _, late = await asyncio.wait(tasks, timeout=self._context.limits.shutdown_seconds_max)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_alive(self, consumer: EffectConsumer) -> None:
        """Send a heartbeat for every message in hand and measure the lag, until cancelled."""
        while True:
            await asyncio.sleep(self._context.limits.heartbeat_seconds)
            # Concurrently: a heartbeat that the broker does not answer takes seconds, and the ack wait is four.
            beats = (self._answer(delivery.in_progress()) for delivery in self._in_hand.values())
            await asyncio.gather(self._measure_lag(consumer), *beats)

    async def _measure_lag(self, consumer: EffectConsumer) -> None:
        try:
            pending_count = await consumer.pending_count()
            self._context.record_lag(self._domain, self._durable, pending_count)
            self._record_waiting(pending_count)
        except ConfigError as exc:
            self._context.config_error = exc
        except (TransientError, PermanentError) as exc:
            log.debug("lag lookup failed", durable=self._durable, error=str(exc))

    def _record_waiting(self, pending_count: int) -> None:
        """Export how many effects of the lane wait: at the broker, for a slot, or for a rate limit."""
        if self._lane is not None:
            for_slot_count = len(self._in_hand) - self._begun_count
            waiting_count = pending_count + for_slot_count + self._slots.waiting_count
            self._context.metrics.effects_waiting.labels(self._lane).set(waiting_count)

    async def _handle(self, delivery: Delivery) -> None:
        key = (delivery.message.stream, delivery.message.sequence)
        if self._handled_sequence is not None and delivery.message.sequence <= self._handled_sequence:
            await self._answer(delivery.ack())
            return
        if delivery.delivered_count == 1 or key in self._survived:
            async with self._slots.one():
                await self._take(delivery)
        else:
            await self._handle_suspect(delivery)
        self._survived[key] = None
        if len(self._survived) > TRIES_REMEMBERED_MAX:
            self._survived.popitem(last=False)

    async def _handle_suspect(self, delivery: Delivery) -> None:
        """Handle a message that may have ended another process: see `runtime/poison_messages.py`."""
        context, message = self._context, delivery.message
        try:
            attempts_count = await self._attempts.attempts_count(delivery)
            # The last attempt is the only one for which the other lanes wait.
            is_last = attempts_count == ATTEMPTS_COUNT_MAX - 1
            alone = all_of(self._all_slots) if is_last else self._slots.all()
            async with alone if attempts_count else self._slots.one():
                await self._attempts.begin(delivery, attempts_count)
                await self._take(delivery)
            await self._attempts.survived(delivery)
        except PoisonMessage as exc:
            log.error(  # noqa: TRY400 - nothing failed here
                "poison message set aside; see `gpu-autoscaler dead-letters`",
                subject=message.subject, sequence=message.sequence, error=str(exc),
            )  # fmt: skip
            await self._set_aside(delivery, exc)
            context.metrics.facts_handled.labels(self._domain, "set_aside").inc()
        except (TransientError, PermanentError, ConfigError) as exc:
            log.warning("suspect message postponed, its attempts cannot be recorded", error=str(exc))
            await self._answer(delivery.nak(context.limits.backoff.wait_seconds(delivery.delivered_count, exc)))

    async def _take(self, delivery: Delivery) -> None:
        if self._context.stop.is_set():  # fetched, but not started: another process takes it
            await self._answer(delivery.nak(0.0))
            return
        self._begun_count += 1
        try:
            await self._attempt(delivery)
        finally:
            self._begun_count -= 1

    async def _attempt(self, delivery: Delivery) -> None:
        """Handle the message once, from decoding to its acknowledgment, and log it."""
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
            outcome, redeliver_after_seconds = "done", await self._apply(recorded)
            if redeliver_after_seconds is None:
                await self._answer(delivery.ack())
            else:
                outcome = "redelivered"
                await self._answer(delivery.nak(redeliver_after_seconds))
            self._tries.pop((message.stream, message.sequence), None)
            context.readiness.clear(self._condition)
        except StalePlan as exc:
            outcome, error = "stale", exc
            context.metrics.plans_stale.inc()
            await self._answer(delivery.nak(STALE_SECONDS))
        except TransientError as exc:
            outcome, error = "retried", exc
            await self._answer(delivery.nak(context.limits.backoff.wait_seconds(self._count_try(delivery), exc)))
        except PermanentError as exc:
            outcome, error = "set_aside", exc
            await self._set_aside(delivery, exc)
        except Exception as exc:  # noqa: BLE001 - whatever a handler raises, the next fact must be handled
            outcome, error = "bug", exc
            await self._after_bug(delivery, exc)
        seconds = context.clock.monotonic_seconds() - started
        context.metrics.facts_handled.labels(self._domain, outcome).inc()
        context.metrics.handle_seconds.labels(self._domain).observe(seconds)
        write = line.info if error is None else line.warning
        details = {} if error is None else {"error": str(error)[:ERROR_LENGTH_MAX]}
        write("fact handled", outcome=outcome, duration_seconds=round(seconds, 6), **details)

    async def _apply(self, recorded: Recorded) -> float | None:
        """Call the handler and store its facts; return the seconds until redelivery, None when finished."""
        context = self._context
        await context.fold_progress.wait_for_fact(recorded, context.limits.fold_seconds_max)
        outcome = await context.with_timeout(self._service.on_fact(recorded))
        await context.publish(outcome, recorded.envelope)
        if outcome.set_aside_reason is not None:
            raise RequestRefused(outcome.set_aside_reason)
        if not outcome.steps:
            return outcome.redeliver_after_seconds

        def publish(part: Outcome) -> Awaitable[object]:
            return context.publish(part, recorded.envelope)

        return await take_steps(outcome, lambda step: context.with_timeout(step()), publish)

    def _count_try(self, delivery: Delivery) -> int:
        key = (delivery.message.stream, delivery.message.sequence)
        tries = self._tries.pop(key, 0) + 1
        self._tries[key] = tries
        if len(self._tries) > TRIES_REMEMBERED_MAX:
            self._tries.popitem(last=False)
        return tries

    async def _after_bug(self, delivery: Delivery, bug: Exception) -> None:
        """Log the first traceback, retry up to the limit, then set the message aside."""
        context, message = self._context, delivery.message
        tries = self._count_try(delivery)
        if tries == 1:
            log.error("fact handler failed", subject=message.subject, sequence=message.sequence, exc_info=bug)
        context.readiness.block(self._condition, f"{message.subject} #{message.sequence}: {bug!r}")
        if tries >= context.limits.bug_tries_count_max:
            await self._set_aside(delivery, bug)
            context.readiness.clear(self._condition)
            return
        await self._answer(delivery.nak(context.limits.backoff.wait_seconds(tries)))

    async def _set_aside(self, delivery: Delivery, error: Exception) -> None:
        """Store the dead letter, then terminate the message; while storing fails the message stays."""
        context = self._context
        try:
            await context.set_aside(delivery.message, error, delivered_count=delivery.delivered_count)
        except TransientError as exc:
            await self._answer(delivery.nak(context.limits.backoff.wait_seconds(delivery.delivered_count, exc)))
            return
        self._tries.pop((delivery.message.stream, delivery.message.sequence), None)
        await self._answer(delivery.term(dead_letter_reason(error, delivery.message.subject)))

    async def _answer(self, answer: Awaitable[None]) -> None:
        """Answer the broker; if it is away the message is delivered again, which is harmless."""
        try:
            await answer
        except TransientError as exc:
            log.debug("acknowledgment lost", durable=self._durable, error=str(exc))


class MaxDeliveriesLoop:
    """Turns messages that reached the broker's delivery limit into dead letters, so that none is lost silently.

    Reads the MAX_DELIVERIES advisories every `Limits.max_deliveries_poll_seconds`, and at once while there are more.
    Run by every service that consumes; all share one durable consumer, so that each advisory is handled once.
    """

    def __init__(self, context: LoopContext) -> None:
        self._context = context

    async def run(self) -> None:
        """Run until `stop`. Raises TransientError, ConfigError."""
        context = self._context
        while not await pause(context.stop, context.limits.max_deliveries_poll_seconds):
            while not context.stop.is_set() and await self._collect():
                pass
            context.readiness.clear("max deliveries")

    async def _collect(self) -> bool:
        """Set aside the messages of the pending advisories; False when there were none."""
        context = self._context
        advisories = await context.dead_letters.collect_max_deliveries(
            at=context.clock.now(), wait_seconds_max=context.limits.fetch_seconds_max
        )
        for advisory in advisories:
            context.metrics.dead_letters.labels(advisory.stream.lower(), "max_deliveries").inc()
            log.warning(
                "message set aside, delivery limit reached; see `gpu-autoscaler dead-letters`",
                stream=advisory.stream, sequence=advisory.stream_seq, durable=advisory.consumer,
                delivered_count=advisory.deliveries,
            )  # fmt: skip
        return bool(advisories)
