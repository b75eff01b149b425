"""Runs one service on a bus (facts, ticks, sources and state) until it is stopped.

Handlers of one kind run one at a time, so a service needs no locks between two facts, two ticks or two items. Handlers
of different kinds may interleave at an `await`, so that a slow cloud never delays a decision. A service that can
handle several facts concurrently declares `concurrency_max`.
"""

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

import structlog

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import LEASES, STREAMS, consumers_for, lane_durable
from gpu_autoscaler.model.errors import ConfigError, PermanentError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.loop_context import Limits, LoopContext
from gpu_autoscaler.runtime.loops.effects import EffectLoop, MaxDeliveriesLoop
from gpu_autoscaler.runtime.loops.fold import FoldingLoop
from gpu_autoscaler.runtime.loops.follow import FollowLoop
from gpu_autoscaler.runtime.loops.tick import TickLoop
from gpu_autoscaler.runtime.loops.watch import WatchLoop
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.resync import Resync
from gpu_autoscaler.runtime.retry import pause
from gpu_autoscaler.runtime.service import (
    FactInput,
    FoldInput,
    Service,
    TickInput,
    WatchInput,
    lanes_of,
    urgency_filter,
)
from gpu_autoscaler.runtime.slots import LaneSlots
from gpu_autoscaler.runtime.stall_detector import LoopStalled, LoopUnrecoverable

log = structlog.get_logger()

BUS_POLL_SECONDS = 0.25


def instance_name(configured: str) -> str:
    """Return the name of this replica: the configured one, otherwise host name and process id."""
    return configured or f"{socket.gethostname()}-{os.getpid()}"


class Runner:
    """Runs one service. `view` is the StateView that the service was constructed with."""

    def __init__(
        self,
        service: Service,
        bus: Bus,
        *,
        view: StateView,
        clock: Clock,
        metrics: Metrics | None = None,
        readiness: Readiness | None = None,
        instance: str = "",
        limits: Limits | None = None,
    ) -> None:
        self.service = service
        self.bus = bus
        self.view = view
        self.metrics = Metrics(service.name) if metrics is None else metrics
        self.readiness = Readiness() if readiness is None else readiness
        self._context = LoopContext(
            service,
            bus,
            view=view,
            clock=clock,
            metrics=self.metrics,
            readiness=self.readiness,
            instance=instance_name(instance),
            limits=Limits() if limits is None else limits,
        )
        lease = self._context.lease
        if lease is not None:
            self.metrics.is_leader.set_function(lambda: float(lease.is_held))  # at the time of the scrape
        self._update_state_condition()  # before any loop runs: /readyz must not report ready before the state is folded

    def stop(self) -> None:
        """Take no more work; `run` returns when the work in hand is finished."""
        self._context.stop.set()

    async def run(self) -> None:
        """Run until `stop`.

        Raises ConfigError when the broker's streams differ from the declared ones, LoopUnrecoverable when restarts of a
        stalled read do not help.
        """
        service = self.service
        for domain in sorted({fact.domain() for fact in (*service.consumes, *service.folds, *service.publishes)}):
            self.metrics.declare_domain(domain)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_bus())
            group.create_task(self._watch_streams())
            for name, loop in self._loops():
                group.create_task(self._supervise(name, loop))

    def _loops(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        service, context = self.service, self._context
        loops: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        fold_input = service if isinstance(service, FoldInput) else None
        is_urgent = urgency_filter(service)
        for stream in sorted({fact.stream() for fact in service.folds}):
            folds = [fact for fact in service.folds if fact.stream() == stream]
            loops.append((f"fold {stream}", FoldingLoop(context, fold_input, stream, folds, is_urgent).run))
        if service.consumes:
            assert isinstance(service, FactInput), f"{service.name} consumes facts but has no on_fact"  # noqa: S101
            loops += self._effect_loops(service)
            loops.append(("max deliveries", MaxDeliveriesLoop(context).run))
        if context.lease is not None:
            loops.append(("lease", partial(context.lease.run, context.stop)))
        if self.metrics.owns("stream_fill_ratio"):
            loops.append(("stream gauges", self._measure_streams))
        if context.resync is not None:
            loops.append(("resync", partial(self._resync, context.resync)))
        if service.tick_seconds is not None:
            assert isinstance(service, TickInput), f"{service.name} has tick_seconds but no on_tick"  # noqa: S101
            loops.append(("ticks", TickLoop(context, service, service.tick_seconds).run))
        if isinstance(service, WatchInput):
            lock = asyncio.Semaphore(1)
            loops += [
                (f"source {number}", WatchLoop(context, service, number, lock).run)
                for number in range(len(service.sources()))
            ]
        return loops

    def _effect_loops(self, service: FactInput) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """Return the loops of the durable consumers. Each lane has slots of its own, the others share theirs."""
        lanes = lanes_of(self.service)
        shared = LaneSlots(getattr(service, "concurrency_max", 1))
        slots = {lane_durable(self.service.name, lane): LaneSlots(lane.concurrency_max) for lane in lanes}
        names = {lane_durable(self.service.name, lane): lane.name for lane in lanes}
        all_slots = (shared, *slots.values())
        loops: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        for spec in consumers_for(self.service.name, self.service.consumes, lanes):
            if spec.lanes:
                loops.append((f"position {spec.durable}", FollowLoop(self._context, spec).run))
                continue
            own_slots = slots.get(spec.durable, shared)
            effects = EffectLoop(self._context, service, spec, own_slots, all_slots, names.get(spec.durable))
            loops.append((f"consumer {spec.durable}", effects.run))
        return loops

    async def _supervise(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run a loop until `stop`. A failed loop is reported on `/readyz` and restarted after a back-off."""
        context = self._context
        tries = 0
        while not context.stop.is_set():
            started = context.clock.monotonic_seconds()
            backoff = context.limits.interruption
            try:
                await loop()
            except TransientError as exc:
                log.warning("loop interrupted, restart scheduled", loop=name, error=str(exc))
                self.metrics.loop_restarts.labels("stalled" if isinstance(exc, LoopStalled) else "interrupted").inc()
                reason: Exception = exc
            except (ConfigError, LoopUnrecoverable):
                raise
            except Exception as exc:
                log.exception("loop failed, restart scheduled", loop=name)
                self.metrics.loop_restarts.labels("bug").inc()
                reason, backoff = exc, context.limits.backoff
            else:
                continue
            if context.clock.monotonic_seconds() - started > context.limits.backoff.seconds_max:
                tries = 0
            tries += 1
            self.readiness.block(name, str(reason) or repr(reason))
            await pause(context.stop, backoff.wait_seconds(tries, reason))

    async def _resync(self, resync: Resync) -> None:
        """Publish again what its stream may soon discard, while active. Raises TransientError: the broker is away."""
        context = self._context
        while await context.wait_until_caught_up() and await context.wait_until_leading():
            for stream in resync.streams:
                facts = resync.due(await self.bus.span(stream), stream, context.clock.wall_now())
                if facts:
                    await context.publish_again(facts)
                    self.metrics.facts_resynced.labels(stream.lower()).inc(len(facts))
            if await pause(context.stop, context.limits.resync_seconds):
                return

    async def _measure_streams(self) -> None:
        """Export how full each stream is, how old its oldest message and how old one may become, while active."""
        context, metrics = self._context, self.metrics
        while await context.wait_until_leading():
            for stream in (spec.name for spec in STREAMS):
                fill_ratio = oldest_seconds = limit_seconds = math.nan  # the broker is away, or the stream is empty
                with contextlib.suppress(TransientError, PermanentError):
                    span = await self.bus.span(stream)
                    fill_ratio = span.bytes_count / span.bytes_max if span.bytes_max > 0 else 0.0
                    limit_seconds = span.age_max.total_seconds()
                    if span.first_stored_at is not None:
                        oldest_seconds = (context.clock.wall_now() - span.first_stored_at).total_seconds()
                metrics.stream_fill.labels(stream).set(fill_ratio)
                metrics.stream_oldest_age.labels(stream).set(oldest_seconds)
                metrics.stream_age_limit.labels(stream).set(limit_seconds)
            if await pause(context.stop, context.limits.stream_gauges_seconds):
                return

    def _update_state_condition(self) -> None:
        progress = self._context.fold_progress
        if progress.caught_up.is_set():
            self.readiness.clear("state")
        else:
            self.readiness.block("state", f"not caught up with {', '.join(progress.behind)}")

    async def _watch_bus(self) -> None:
        """Keep the conditions of broker, state and lease up to date. Raises ConfigError as `run` does."""
        while True:
            if self._context.config_error is not None:
                raise self._context.config_error
            failure = self.bus.failure
            if failure is None:
                self.readiness.clear("bus")
            else:
                self.readiness.block("bus", failure)
            self._update_state_condition()
            lease = self._context.lease
            if lease is not None:
                detail = "held" if lease.is_held else f"standby, {lease.other_holder or 'nobody'} is active"
                self.readiness.note("lease", detail)
            self.metrics.is_bus_connected.set(self.bus.is_connected)
            self.metrics.is_ready.set(self.readiness.is_ready)
            if await pause(self._context.stop, BUS_POLL_SECONDS):
                self.readiness.block("running", "stopping")
                return

    async def _watch_streams(self) -> None:
        """Check periodically that the streams are those of the start. Raises ConfigError when one was replaced.

        Facts of a lost stream must be published again, and only a start does that: a watcher lists, the state is
        folded, the store of record is read.
        """
        service, context = self.service, self._context
        streams = sorted({fact.stream() for fact in (*service.consumes, *service.folds, *service.publishes)})
        if context.lease is not None:
            streams.append(LEASES.stream)
        created_at: dict[str, datetime] = {}
        while True:
            for stream in streams:
                try:
                    stream_created_at = (await self.bus.span(stream)).created_at
                except TransientError:
                    continue
                except PermanentError as exc:
                    raise ConfigError("broker", [f"stream {stream} was deleted: {exc}"]) from exc
                if created_at.setdefault(stream, stream_created_at) != stream_created_at:
                    raise ConfigError(
                        "broker",
                        [f"stream {stream} was recreated at {stream_created_at.isoformat()}; restart the process"],
                    )
            if await pause(context.stop, context.limits.stream_watch_seconds):
                return
