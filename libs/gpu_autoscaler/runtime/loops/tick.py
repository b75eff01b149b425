"""Calls `on_tick` every `tick_seconds` of cluster time, and earlier for urgent facts (`runtime/urgency.py`)."""

import asyncio
from datetime import datetime

import structlog

from gpu_autoscaler.bus.protocol import Ack
from gpu_autoscaler.model.errors import StalePlan, TransientError
from gpu_autoscaler.runtime.loop_context import LoopContext
from gpu_autoscaler.runtime.service import TickFilter, TickInput

log = structlog.get_logger()


class TickLoop:
    """One service's ticks, one at a time, from the moment the projections have caught up."""

    def __init__(self, context: LoopContext, service: TickInput, tick_seconds: float) -> None:
        self._context = context
        self._service = service
        self._filter = service if isinstance(service, TickFilter) else None
        self._tick_seconds = tick_seconds
        self._next_seconds = tick_seconds  # as the last tick requested
        self._failures_count = 0  # in a row
        self._stale_count = 0  # in a row
        self._is_active = False  # this process has the lease and counts the age of its last plan

    async def run(self) -> None:
        """Tick until `stop`."""
        context = self._context
        if not await context.wait_until_caught_up():
            return
        now = context.clock.monotonic_seconds
        while await self._wait_until_leading():
            # Before the tick reads the state: an urgent fact that arrives during the tick brings another one.
            context.urgency.start_tick(now())
            await self._tick()
            context.urgency.end_tick(now())
            await self._rest(now() + self._interval_seconds())

    async def _wait_until_leading(self) -> bool:
        """Wait until this process is the active one; False when stopped before."""
        lease = self._context.lease
        if lease is not None and not lease.is_held:
            self._is_active = False
            self._context.observer.term_ended()
        is_leading = await self._context.wait_until_leading()
        if is_leading and not self._is_active:
            self._is_active = True
            self._mark_planned()
        return is_leading

    def _mark_ticked(self, now: datetime) -> None:
        self._context.observer.ticked(now)
        self._mark_planned()

    def _mark_planned(self) -> None:
        if self._context.is_planner:
            self._context.metrics.set_planned(self._context.clock.monotonic_seconds)

    async def _rest(self, regular_at: float) -> None:
        """Wait for the next regular tick, or for the earlier one that urgent facts ask for."""
        context = self._context
        while not context.stop.is_set():
            context.urgent_event.clear()
            urgent_at = context.urgency.due_at
            # A failed tick is not retried before its back-off, not even for an urgent fact.
            due_at = regular_at if urgent_at is None or self._failures_count else min(urgent_at, regular_at)
            seconds = due_at - context.clock.monotonic_seconds()
            if seconds <= 0:
                break
            await context.wait_for_any(context.urgent_event, seconds)
        if waited_seconds := context.urgency.waited_seconds:
            context.metrics.batch_window_seconds.observe(waited_seconds)
        await asyncio.sleep(0)  # consecutive ticks must not starve the other loops

    def _interval_seconds(self) -> float:
        """Wall time to the next regular tick: as requested, or the back-off after a failed or stale tick."""
        regular = self._context.clock.wall_seconds(self._next_seconds)
        tries_count = self._failures_count or self._stale_count
        return min(regular, self._context.limits.backoff.wait_seconds(tries_count)) if tries_count else regular

    async def _tick(self) -> None:
        """Run one tick and log it."""
        context = self._context
        started = context.clock.monotonic_seconds()
        now = context.clock.now()
        facts_count, seconds = 0, 0.0
        error: Exception | None = None
        self._next_seconds = self._tick_seconds
        if self._filter is not None and not self._filter.needs_tick(now):
            self._count("done", None)
            self._mark_ticked(now)
            return
        try:
            outcome = await context.with_timeout(self._service.on_tick(now))
            seconds = context.clock.monotonic_seconds() - started
            context.metrics.decision_seconds.observe(seconds)
            context.metrics.controller_duration.set(seconds)
            facts_count = len(outcome.facts)
            if context.lease is not None and facts_count:
                context.lease.require()  # it may have ended during the tick: the next holder plans on newer facts
            acks = await context.publish(outcome)
            if outcome.expected_last_sequence is not None:
                await self._wait_for_own_plan(acks)
            self._next_seconds = outcome.next_tick_seconds or self._tick_seconds
            result = "done"
        except StalePlan as exc:
            result, error = "stale", exc
            context.metrics.plans_stale.inc()
        except TransientError as exc:
            result, error = "retried", exc
        except Exception as exc:
            result, error = "bug", exc
            if self._failures_count == 0:
                log.exception("tick failed")
        self._count(result, error)
        if error is None:
            self._mark_ticked(now)
            write = log.info if facts_count else log.debug
            write("tick completed", outcome=result, facts_count=facts_count, duration_seconds=round(seconds, 6))
        else:
            write = log.info if result == "stale" else log.warning  # one of two scalers always loses the race
            write("tick completed", outcome=result, error=str(error))

    def _count(self, result: str, error: Exception | None) -> None:
        context = self._context
        context.metrics.ticks.labels(result).inc()
        self._stale_count = self._stale_count + 1 if result == "stale" else 0
        if result in {"done", "stale"}:
            self._failures_count = 0
            context.readiness.clear("ticks")
            return
        self._failures_count += 1
        context.metrics.reconcile_errors.inc()
        context.metrics.controller_errors.inc()
        if result == "bug" or self._failures_count >= context.limits.tick_failures_count_max:
            context.readiness.block("ticks", f"{self._failures_count} ticks failed in a row, the last with {error!r}")

    async def _wait_for_own_plan(self, acks: tuple[Ack, ...]) -> None:
        """Wait until the state holds the fenced fact; without it the next tick would decide the same again."""
        for ack in acks:
            if not await self._context.fold_progress.wait_for(
                ack.stream, ack.sequence, self._context.limits.fold_seconds_max
            ):
                log.warning("own plan not folded in time, tick continued without it", sequence=ack.sequence)
