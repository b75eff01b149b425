"""Calls the tick door every `tick_seconds` of cluster time, and when urgent facts ask for it (`runtime/urgency.py`)."""

import asyncio

import structlog

from gpu_autoscaler.bus.protocol import Ack
from gpu_autoscaler.model.errors import StalePlan, TransientError
from gpu_autoscaler.runtime.plumbing import Plumbing
from gpu_autoscaler.runtime.service import TickDoor

log = structlog.get_logger()


class TickLoop:
    """One service's ticks, one at a time. The first comes when the projections have caught up."""

    def __init__(self, plumbing: Plumbing, door: TickDoor, tick_seconds: float) -> None:
        self._plumbing = plumbing
        self._door = door
        self._tick_seconds = tick_seconds
        self._next_seconds = tick_seconds  # as the last tick wants it
        self._failures_count = 0  # in a row
        self._was_stale = False

    async def run(self) -> None:
        """Tick until it is time to stop."""
        plumbing = self._plumbing
        if not await plumbing.caught_up():
            return
        now = plumbing.clock.monotonic_seconds
        while await plumbing.leading():
            # Before the tick reads the state: an urgent fact that comes meanwhile brings another tick.
            plumbing.urgency.tick_began(now())
            await self._tick()
            plumbing.urgency.tick_ended(now())
            await self._rest(now() + self._interval_seconds())

    async def _rest(self, regular_at: float) -> None:
        """Wait for the next regular tick, or for the one that urgent facts bring forward."""
        plumbing = self._plumbing
        while not plumbing.stop.is_set():
            plumbing.hurried.clear()
            urgent_at = plumbing.urgency.due_at
            # One that failed is not tried again without a pause, whatever comes.
            due_at = regular_at if urgent_at is None or self._failures_count else min(urgent_at, regular_at)
            seconds = due_at - plumbing.clock.monotonic_seconds()
            if seconds <= 0:
                break
            await plumbing.either(plumbing.hurried, seconds)
        if waited_seconds := plumbing.urgency.waited_seconds:
            plumbing.metrics.quiet_seconds.observe(waited_seconds)
        await asyncio.sleep(0)  # ticks that follow each other at once leave the other doors their turn

    def _interval_seconds(self) -> float:
        """Wall time to the next regular tick: as declared, less when this one came to nothing."""
        regular = self._plumbing.clock.wall_seconds(self._next_seconds)
        if self._failures_count == 0 and not self._was_stale:
            return regular
        return min(regular, self._plumbing.limits.backoff.wait_seconds(self._failures_count))

    async def _tick(self) -> None:
        """One tick with its canonical log line."""
        plumbing = self._plumbing
        started = plumbing.clock.monotonic_seconds()
        now = plumbing.clock.now()
        facts_count, seconds = 0, 0.0
        error: Exception | None = None
        self._next_seconds = self._tick_seconds
        try:
            outcome = await plumbing.within_limit(self._door.on_tick(now))
            seconds = plumbing.clock.monotonic_seconds() - started
            plumbing.metrics.decision_seconds.observe(seconds)
            plumbing.metrics.controller_duration.set(seconds)
            facts_count = len(outcome.facts)
            acks = await plumbing.publish(outcome)
            if outcome.expected_last_sequence is not None:
                await self._see_own(acks)
            self._next_seconds = outcome.next_tick_seconds or self._tick_seconds
            ended = "done"
        except StalePlan as exc:
            ended, error = "stale", exc
            plumbing.metrics.plans_stale.inc()
        except TransientError as exc:
            ended, error = "retried", exc
        except Exception as exc:
            ended, error = "bug", exc
            if self._failures_count == 0:
                log.exception("tick failed")
        self._count(ended, error)
        if error is None:
            plumbing.observer.ticked(now)
            say = log.info if facts_count else log.debug
            say("tick", outcome=ended, facts_count=facts_count, duration_seconds=round(seconds, 6))
        else:
            say = log.info if ended == "stale" else log.warning  # of two scalers one is always too late
            say("tick", outcome=ended, error=str(error))

    def _count(self, ended: str, error: Exception | None) -> None:
        plumbing = self._plumbing
        plumbing.metrics.ticks.labels(ended).inc()
        self._was_stale = ended == "stale"
        if ended in {"done", "stale"}:
            self._failures_count = 0
            plumbing.readiness.clear("ticks")
            return
        self._failures_count += 1
        plumbing.metrics.reconcile_errors.inc()
        plumbing.metrics.controller_errors.inc()
        if ended == "bug" or self._failures_count >= plumbing.limits.tick_failures_count_max:
            plumbing.readiness.hold("ticks", f"{self._failures_count} failed in a row, the last with {error!r}")

    async def _see_own(self, acks: tuple[Ack, ...]) -> None:
        """After a fenced fact the next tick must know of it, else it decides the same again."""
        for ack in acks:
            if not await self._plumbing.folded.wait_for(
                ack.stream, ack.sequence, self._plumbing.limits.fold_seconds_max
            ):
                log.warning("state has not reached our own plan; ticking without it", sequence=ack.sequence)
