"""A service at work on a real broker, in the test's own process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Ack, Publication
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.loop_context import Limits
from gpu_autoscaler.runtime.runner import Runner

RECOVERY_SECONDS_MAX = 120.0  # a cluster on a busy machine takes a minute


@contextlib.asynccontextmanager
async def working(bus: NatsBus, service: Any, limits: Limits | None = None) -> AsyncIterator[Runner]:  # noqa: ANN401 - any service of a test with its view
    """Run it with the limits that services have, and stop it in good order afterwards; the test ends if it ends."""
    runner = Runner(service, bus, view=service.view, clock=Clock(), limits=limits)
    run = asyncio.create_task(runner.run())
    test, is_wanted = asyncio.current_task(), True
    assert test is not None, "called by a task"
    run.add_done_callback(lambda _: is_wanted and test.cancel())
    try:
        yield runner
        is_wanted = False
        runner.stop()
        await asyncio.wait_for(run, RECOVERY_SECONDS_MAX)
    except asyncio.CancelledError:
        if is_wanted and run.done() and not run.cancelled():
            test.uncancel()
            raise AssertionError("the service ended during the test") from run.exception()
        raise
    finally:
        is_wanted = False
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def until(holds: Callable[[], bool], what: str, seconds_max: float = RECOVERY_SECONDS_MAX) -> None:
    """Wait for it, within the limit; fails with the words of `what`."""
    try:
        async with asyncio.timeout(seconds_max):
            while not holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {seconds_max:g} s: {what}") from None


async def persistently(bus: NatsBus, publications: list[Publication]) -> list[Ack]:
    """Store them as every caller does: the whole again under the same ids while the broker is away."""
    async with asyncio.timeout(RECOVERY_SECONDS_MAX):
        while True:
            try:
                return list(await bus.publish_many(publications))
            except TransientError:
                await asyncio.sleep(0.05)
