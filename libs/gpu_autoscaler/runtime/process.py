"""A service as a process: logs, health, composition, signals, exit code. Called by the command line alone."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec
import structlog

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import Settings
from gpu_autoscaler.runtime.health import HealthServer, Readiness
from gpu_autoscaler.runtime.logs import configure_logs
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.retry import Backoff, pause
from gpu_autoscaler.runtime.runner import Runner, instance_name
from gpu_autoscaler.runtime.service import Service

log = structlog.get_logger()

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
START_BACKOFF = Backoff(first_seconds=0.2, seconds_max=5.0)


class ProcessContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a service is composed from. Adapters that are opened are put on `closing`, and closed in reverse."""

    settings: Settings
    clock: Clock
    view: StateView
    metrics: Metrics
    readiness: Readiness
    closing: AsyncExitStack
    lost: asyncio.Event  # set by an adapter that is closed for good: the process ends, to be started again


class _ToldToStop(Exception):
    """It is time to stop before everything was put together."""


Compose = Callable[[ProcessContext], Coroutine[Any, Any, tuple[Service, Bus]]]
T = TypeVar("T")


def run_process(service_name: str, settings: Settings, compose: Compose) -> int:
    """Run a service until SIGTERM or SIGINT and return the exit code: 0 stopped, 1 failed, 2 misconfigured."""
    configure_logs(settings.log, service=service_name, instance=instance_name(settings.instance))
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415 - not there on every platform

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(service_name, settings, compose))
    return asyncio.run(serve(service_name, settings, compose))


async def serve(service_name: str, settings: Settings, compose: Compose) -> int:
    """As `run_process`, on the running loop and with the logs as they are."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        return await _serve(service_name, settings, compose, stop)
    except ConfigError as exc:
        log.error("not started", error=str(exc))  # noqa: TRY400 - the operator's mistake has no traceback
        return EXIT_MISCONFIGURED
    except Exception:
        log.exception("service failed")
        return EXIT_FAILED


async def _serve(service_name: str, settings: Settings, compose: Compose, stop: asyncio.Event) -> int:
    metrics, readiness = Metrics(service_name), Readiness()
    readiness.block("running", "starting")
    health = HealthServer(settings.http, readiness, metrics)
    port = await health.start()
    log.info("listening", host=settings.http.host, port=port)
    try:
        composed = await _composed(settings, compose, metrics, readiness, stop)
        if composed is not None:
            runner, workplace = composed
            async with workplace.closing:
                readiness.clear("running")
                log.info("service started")
                await _run_until(runner, stop, workplace.lost)
    finally:
        await health.close()
    log.info("service stopped")
    return EXIT_STOPPED


async def _composed(
    settings: Settings, compose: Compose, metrics: Metrics, readiness: Readiness, stop: asyncio.Event
) -> tuple[Runner, ProcessContext] | None:
    """Put the service together, again and again while something outside is not there yet; None when told to stop."""
    clock, tries = Clock.from_environment(), 0
    while True:
        view, closing = StateView(), AsyncExitStack()
        workplace = ProcessContext(
            settings=settings,
            clock=clock,
            view=view,
            metrics=metrics,
            readiness=readiness,
            closing=closing,
            lost=asyncio.Event(),
        )
        try:
            service, bus = await _unless(stop, compose(workplace))
            runner = Runner(
                service,
                bus,
                view=view,
                clock=clock,
                metrics=metrics,
                readiness=readiness,
                instance=settings.instance,
            )
        except TransientError as exc:
            await closing.aclose()
            tries += 1
            readiness.block("running", f"starting: {exc}")
            log.warning("cannot start yet; trying again", error=str(exc), tries_count=tries)
            if await pause(stop, START_BACKOFF.wait_seconds(tries, exc)):
                return None
        except _ToldToStop:
            await closing.aclose()
            return None
        except BaseException:
            await closing.aclose()
            raise
        else:
            return runner, workplace


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Return what comes of `work`; it is left where it stands when it is time to stop."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    raise _ToldToStop


async def _run_until(runner: Runner, stop: asyncio.Event, lost: asyncio.Event) -> None:
    """Run until it is time to stop. A runner that ends by itself, or lost an adapter for good, has failed."""
    running = asyncio.create_task(runner.run())
    stopping, losing = asyncio.create_task(stop.wait()), asyncio.create_task(lost.wait())
    await asyncio.wait((running, stopping, losing), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    losing.cancel()
    if lost.is_set() and not stop.is_set():
        running.cancel()  # nothing that it could finish would reach anybody
        await asyncio.gather(running, return_exceptions=True)
        raise RuntimeError("the connection to the broker is closed for good; start again")
    if stop.is_set():
        log.info("stopping")
        runner.stop()
    try:
        await running
    except* ConfigError as group:
        # It had started well, so the operator made no mistake: the broker lost what it had. A new start makes it again.
        raise RuntimeError("the broker changed under us; start again") from group
