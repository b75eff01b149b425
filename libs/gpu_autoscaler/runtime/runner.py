"""Runs one service on a bus: its facts, ticks, sources and state, until it is told to stop.

Doors of a kind are called one at a time, so a service needs no locks between two facts, two ticks or two items. Doors
of different kinds may take concurrency at an `await`, so that a slow cloud never keeps a decision waiting. A service that can
handle several facts at once says so by `concurrency_max`.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

import structlog

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import LEASES, consumers_for
from gpu_autoscaler.model.errors import ConfigError, PermanentError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.effects import EffectLoop, ConcurrencyLimit
from gpu_autoscaler.runtime.folding import FoldingLoop
from gpu_autoscaler.runtime.given_up import MaxDeliveriesLoop
from gpu_autoscaler.runtime.headway import LoopUnrecoverable, LoopStalled
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.plumbing import Limits, LoopContext
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.retry import pause
from gpu_autoscaler.runtime.service import FactInput, FoldInput, Service, TickInput, WatchInput, urgency_filter
from gpu_autoscaler.runtime.ticking import TickLoop
from gpu_autoscaler.runtime.watching import WatchLoop

log = structlog.get_logger()

BUS_POLL_SECONDS = 0.25


def instance_name(configured: str) -> str:
    """The name of this replica: as configured, else host and process."""
    return configured or f"{socket.gethostname()}-{os.getpid()}"


class Runner:
    """One service at work. `view` is the one that the service was made with."""

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
        self._say_how_far()  # before any loop concurrency: who says by then that the process has started, says nothing of it

    def stop(self) -> None:
        """Take no more work; `run` returns when what is in hand is finished."""
        self._context.stop.set()

    async def run(self) -> None:
        """Work until `stop`.

        Raises ConfigError when what the bus holds is not what was declared, LoopUnrecoverable when a read gets no further.
        """
        service = self.service
        for domain in sorted({fact.domain() for fact in (*service.consumes, *service.folds, *service.publishes)}):
            self.metrics.declare_domain(domain)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_bus())
            group.create_task(self._watch_streams())
            for name, loop in self._loops():
                group.create_task(self._keep(name, loop))

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
            concurrency = ConcurrencyLimit(getattr(service, "concurrency_max", 1))
            for consumer in consumers_for(service.name, service.consumes):
                effects = EffectLoop(context, service, consumer.durable, consumer.stream.lower(), concurrency)
                loops.append((f"consumer {consumer.durable}", effects.run))
            loops.append(("given up", MaxDeliveriesLoop(context).run))
        if context.lease is not None:
            loops.append(("lease", partial(context.lease.keep, context.stop)))
        if service.tick_seconds is not None:
            assert isinstance(service, TickInput), f"{service.name} has tick_seconds but no on_tick"  # noqa: S101
            loops.append(("ticks", TickLoop(context, service, service.tick_seconds).run))
        if isinstance(service, WatchInput):
            turn = asyncio.Semaphore(1)
            loops += [
                (f"source {number}", WatchLoop(context, service, number, turn).run)
                for number in range(len(service.sources()))
            ]
        return loops

    async def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run a loop until it is time to stop. One that fails is told on `/readyz` and begun again after a wait."""
        context = self._context
        tries = 0
        while not context.stop.is_set():
            began = context.clock.monotonic_seconds()
            backoff = context.limits.interruption
            try:
                await loop()
            except TransientError as exc:
                log.warning("loop interrupted; it begins again", loop=name, error=str(exc))
                self.metrics.loop_restarts.labels(
                    "stood_still" if isinstance(exc, LoopStalled) else "interrupted"
                ).inc()
                reason: Exception = exc
            except (ConfigError, LoopUnrecoverable):
                raise
            except Exception as exc:
                log.exception("loop failed; it begins again", loop=name)
                self.metrics.loop_restarts.labels("bug").inc()
                reason, backoff = exc, context.limits.backoff
            else:
                continue
            if context.clock.monotonic_seconds() - began > context.limits.backoff.seconds_max:
                tries = 0
            tries += 1
            self.readiness.block(name, str(reason) or repr(reason))
            await pause(context.stop, backoff.wait_seconds(tries, reason))

    def _say_how_far(self) -> None:
        if self._context.fold_progress.caught_up.is_set():
            self.readiness.clear("state")
        else:
            self.readiness.block("state", f"reading {', '.join(self._context.fold_progress.behind)} up to now")

    async def _watch_bus(self) -> None:
        """Keep the broker's and the projections' conditions up to date. Raises ConfigError as `run` does."""
        while True:
            if self._context.config_error is not None:
                raise self._context.config_error
            trouble = self.bus.trouble
            if trouble is None:
                self.readiness.clear("bus")
            else:
                self.readiness.block("bus", trouble)
            self._say_how_far()
            lease = self._context.lease
            if lease is not None:
                words = "held" if lease.is_held else f"{lease.other or 'nobody yet'} is active, this one stands by"
                self.readiness.note("lease", words)
            self.metrics.is_leader.set(lease is None or lease.is_held)
            self.metrics.is_bus_connected.set(self.bus.is_connected)
            self.metrics.is_ready.set(self.readiness.is_ready)
            if await pause(self._context.stop, BUS_POLL_SECONDS):
                self.readiness.block("running", "stopping")
                return

    async def _watch_streams(self) -> None:
        """Look now and then whether the streams are still those of the start. Raises ConfigError when they are not.

        What was said on streams that are gone has to be said again, and only a start does that: a watcher lists, a
        state is folded, the store of record is read.
        """
        service, context = self.service, self._context
        streams = sorted({fact.stream() for fact in (*service.consumes, *service.folds, *service.publishes)})
        if context.lease is not None:
            streams.append(LEASES.stream)
        made_at: dict[str, datetime] = {}
        while True:
            for stream in streams:
                try:
                    now = (await self.bus.span(stream)).created_at
                except TransientError:
                    continue
                except PermanentError as exc:
                    raise ConfigError("broker", [f"stream {stream} is gone: {exc}"]) from exc
                if made_at.setdefault(stream, now) != now:
                    raise ConfigError(
                        "broker",
                        [f"stream {stream} was made anew at {now.isoformat()}; start again from the beginning"],
                    )
            if await pause(context.stop, context.limits.stream_watch_seconds):
                return
