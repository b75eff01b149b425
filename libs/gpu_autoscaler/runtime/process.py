"""Runs a service as a process: logs, health, composition, signals, exit code. Called only by the command line.

Logs are structured lines on stderr: text on a terminal, otherwise JSON. The first argument of a log call is a constant
lower-case phrase, everything else a key.
"""

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Protocol, TextIO, TypeVar

import msgspec
import structlog

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import LogSettings, Settings
from gpu_autoscaler.runtime.health import HealthServer, Readiness
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.retry import Backoff, pause
from gpu_autoscaler.runtime.runner import Runner, instance_name
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler.runtime.signals import stop_event

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logs(settings: LogSettings, *, service: str, instance: str, stream: TextIO | None = None) -> None:
    """Configure the logs of this process, each line with service and instance. Called once, at its start."""
    out = sys.stderr if stream is None else stream
    as_text = settings.format == "text" or (settings.format == "auto" and out.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Libraries that use the standard logging (aiohttp, nats) get the same format.
    tail: list[structlog.typing.Processor] = (
        # Plain: a traceback with local variables would reveal tokens.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if as_text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail]
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(_LEVELS[settings.level], logging.INFO))
    structlog.configure(
        processors=[*shared, *tail],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service, instance=instance)


def _to_json(event: object, **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()


log = structlog.get_logger()

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
START_BACKOFF = Backoff(first_seconds=0.2, seconds_max=5.0)


class ProcessContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a service is composed from. Opened adapters are pushed on `closing` and closed in reverse order."""

    settings: Settings
    clock: Clock
    view: StateView
    metrics: Metrics
    readiness: Readiness
    closing: AsyncExitStack
    lost: asyncio.Event  # set by an adapter that is closed for good: the process ends and must be restarted


class _StopRequested(Exception):
    """The process was stopped before the service was composed."""


class Runnable(Protocol):
    """Runs until it is stopped, and finishes what it has in hand."""

    async def run(self) -> None:
        """Run until `stop`."""

    def stop(self) -> None:
        """Take no more work."""


# A service with its bus, which a Runner runs; or what runs by itself, without a state.
Composed = tuple[Service, Bus] | Runnable
Compose = Callable[[ProcessContext], Coroutine[Any, Any, Composed]]
T = TypeVar("T")


def run_process(service_name: str, settings: Settings, compose: Compose) -> int:
    """Run a service until SIGTERM or SIGINT and return the exit code: 0 stopped, 1 failed, 2 misconfigured."""
    configure_logs(settings.log, service=service_name, instance=instance_name(settings.instance))
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415 - missing on some platforms

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(service_name, settings, compose))
    return asyncio.run(serve(service_name, settings, compose))


async def serve(service_name: str, settings: Settings, compose: Compose) -> int:
    """Run like `run_process`, on the running event loop and without configuring logs."""
    stop = stop_event()
    try:
        return await _serve(service_name, settings, compose, stop)
    except ConfigError as exc:
        log.error("start refused", error=str(exc))  # noqa: TRY400 - a configuration error needs no traceback
        return EXIT_MISCONFIGURED
    except Exception:
        log.exception("service failed")
        return EXIT_FAILED


async def _serve(service_name: str, settings: Settings, compose: Compose, stop: asyncio.Event) -> int:
    metrics, readiness = Metrics(service_name, role=settings.sensing.role), Readiness()
    readiness.block("running", "starting")
    health = HealthServer(settings.http, readiness, metrics)
    port = await health.start()
    log.info("health server started", host=settings.http.host, port=port)
    try:
        composed = await _compose_with_retries(settings, compose, metrics, readiness, stop)
        if composed is not None:
            runner, process = composed
            async with process.closing:
                readiness.clear("running")
                log.info("service started")
                gc.collect()
                gc.freeze()  # modules and a restored state live on: collections need not search them
                await _run_until(runner, stop, process.lost)
    finally:
        await health.close()
    log.info("service stopped")
    return EXIT_STOPPED


async def _compose_with_retries(
    settings: Settings, compose: Compose, metrics: Metrics, readiness: Readiness, stop: asyncio.Event
) -> tuple[Runnable, ProcessContext] | None:
    """Compose the service, retrying while an external system is unavailable; None when stopped before."""
    clock, tries = Clock.from_environment(), 0
    while True:
        view, closing = StateView(), AsyncExitStack()
        process = ProcessContext(
            settings=settings,
            clock=clock,
            view=view,
            metrics=metrics,
            readiness=readiness,
            closing=closing,
            lost=asyncio.Event(),
        )
        try:
            composed = await _unless_stopped(stop, compose(process))
            runner = _runner_of(composed, process) if isinstance(composed, tuple) else composed
        except TransientError as exc:
            await closing.aclose()
            tries += 1
            readiness.block("running", f"starting: {exc}")
            log.warning("start failed, retry scheduled", error=str(exc), tries_count=tries)
            if await pause(stop, START_BACKOFF.wait_seconds(tries, exc)):
                return None
        except _StopRequested:
            await closing.aclose()
            return None
        except BaseException:
            await closing.aclose()
            raise
        else:
            return runner, process


def _runner_of(composed: tuple[Service, Bus], process: ProcessContext) -> Runner:
    service, bus = composed
    return Runner(
        service,
        bus,
        view=process.view,
        clock=process.clock,
        metrics=process.metrics,
        readiness=process.readiness,
        instance=process.settings.instance,
    )


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is canceled by `stop`. Raises _StopRequested then."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    raise _StopRequested


async def _run_until(runner: Runnable, stop: asyncio.Event, lost: asyncio.Event) -> None:
    """Run until `stop`. A runner that ends by itself or loses an adapter for good has failed."""
    running = asyncio.create_task(runner.run())
    stopping, losing = asyncio.create_task(stop.wait()), asyncio.create_task(lost.wait())
    await asyncio.wait((running, stopping, losing), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    losing.cancel()
    if lost.is_set() and not stop.is_set():
        running.cancel()  # without the broker nothing that it finishes would be published
        await asyncio.gather(running, return_exceptions=True)
        raise RuntimeError("connection to the broker closed for good; restart the process")
    if stop.is_set():
        log.info("stop requested")
        runner.stop()
    try:
        await running
    except* ConfigError as group:
        # The start succeeded, so the configuration is valid: the broker lost its streams, and a restart creates them.
        raise RuntimeError("the broker's streams changed while running; restart the process") from group
