"""Calls the tick door every `tick_seconds` of cluster time, and when urgent facts ask for it (`runtime/urgency.py`)."""

import asyncio

import structlog

from gpu_autoscaler.bus.protocol import Ack
from gpu_autoscaler.model.errors import StalePlan, TransientError
from gpu_autoscaler.runtime.plumbing import LoopContext
from gpu_autoscaler.runtime.service import TickInput

log = structlog.get_logger()


class TickLoop:
    """One service's ticks, one at a time. The first comes when the projections have caught up."""

    def __init__(self, context: LoopContext, service: TickInput, tick_seconds: float) -> None:
        self._context = context
        self._service = service
        self._tick_seconds = tick_seconds
        self._next_seconds = tick_seconds  # as the last tick wants it
        self._failures_count = 0  # in a row
        self._was_stale = False

    async def run(self) -> None:
        """Tick until it is time to stop."""
        context = self._context
        if not await context.wait_until_caught_up():
            return
        now = context.clock.monotonic_seconds
        while await context.wait_until_leading():
            # Before the tick reads the state: an urgent fact that comes meanwhile brings another tick.
            context.urgency.start_tick(now())
            await self._tick()
            context.urgency.end_tick(now())
            await self._rest(now() + self._interval_seconds())

    async def _rest(self, regular_at: float) -> None:
        """Wait for the next regular tick, or for the one that urgent facts bring forward."""
        context = self._context
        while not context.stop.is_set():
            context.urgent_event.clear()
            urgent_at = context.urgency.due_at
            # One that failed is not tried again without a pause, whatever comes.
            due_at = regular_at if urgent_at is None or self._failures_count else min(urgent_at, regular_at)
            seconds = due_at - context.clock.monotonic_seconds()
            if seconds <= 0:
                break
            await context.wait_for_any(context.urgent_event, seconds)
        if waited_seconds := context.urgency.waited_seconds:
            context.metrics.batch_window_seconds.observe(waited_seconds)
        await asyncio.sleep(0)  # ticks that follow each other at once leave the other doors their turn

    def _interval_seconds(self) -> float:
        """Wall time to the next regular tick: as declared, less when this one came to nothing."""
        regular = self._context.clock.wall_seconds(self._next_seconds)
        if self._failures_count == 0 and not self._was_stale:
            return regular
        return min(regular, self._context.limits.backoff.wait_seconds(self._failures_count))

    async def _tick(self) -> None:
        """One tick with its canonical log line."""
        context = self._context
        started = context.clock.monotonic_seconds()
        now = context.clock.now()
        facts_count, seconds = 0, 0.0
        error: Exception | None = None
        self._next_seconds = self._tick_seconds
        try:
            outcome = await context.with_timeout(self._service.on_tick(now))
            seconds = context.clock.monotonic_seconds() - started
            context.metrics.decision_seconds.observe(seconds)
            context.metrics.controller_duration.set(seconds)
            facts_count = len(outcome.facts)
            acks = await context.publish(outcome)
            if outcome.expected_last_sequence is not None:
                await self._see_own(acks)
            self._next_seconds = outcome.next_tick_seconds or self._tick_seconds
            ended = "done"
        except StalePlan as exc:
            ended, error = "stale", exc
            context.metrics.plans_stale.inc()
        except TransientError as exc:
            ended, error = "retried", exc
        except Exception as exc:
            ended, error = "bug", exc
            if self._failures_count == 0:
                log.exception("tick failed")
        self._count(ended, error)
        if error is None:
            context.observer.ticked(now)
            say = log.info if facts_count else log.debug
            say("tick", outcome=ended, facts_count=facts_count, duration_seconds=round(seconds, 6))
        else:
            say = log.info if ended == "stale" else log.warning  # of two scalers one is always too late
            say("tick", outcome=ended, error=str(error))

    def _count(self, ended: str, error: Exception | None) -> None:
        context = self._context
        context.metrics.ticks.labels(ended).inc()
        self._was_stale = ended == "stale"
        if ended in {"done", "stale"}:
            self._failures_count = 0
            context.readiness.clear("ticks")
            return
        self._failures_count += 1
        context.metrics.reconcile_errors.inc()
        context.metrics.controller_errors.inc()
        if ended == "bug" or self._failures_count >= context.limits.tick_failures_count_max:
            context.readiness.block("ticks", f"{self._failures_count} failed in a row, the last with {error!r}")

    async def _see_own(self, acks: tuple[Ack, ...]) -> None:
        """After a fenced fact the next tick must know of it, else it decides the same again."""
        for ack in acks:
            if not await self._context.fold_progress.wait_for(
                ack.stream, ack.sequence, self._context.limits.fold_seconds_max
            ):
                log.warning("state has not reached our own plan; ticking without it", sequence=ack.sequence)
