"""How long to wait before the next try. Waits are wall time: they protect what is outside, not the cluster's story."""

import asyncio
import random

from gpu_autoscaler.model.errors import TransientError


def backoff_seconds(tries_count: int, *, first_seconds: float, seconds_max: float) -> float:
    """Return a wait that doubles with every try up to `seconds_max`, less up to a quarter by chance.

    `tries_count` is 1 after the first failure. The chance keeps replicas from coming back all at once.
    """
    doubled = first_seconds * 2.0 ** min(tries_count - 1, 32)
    return min(doubled, seconds_max) * random.uniform(0.75, 1.0)  # noqa: S311 - spreads load, guards nothing


def retry_seconds(error: TransientError, tries_count: int, *, first_seconds: float, seconds_max: float) -> float:
    """Return how long to wait after `error`: as long as it asks for, else the back-off."""
    if error.retry_after_seconds is not None:
        return max(0.0, error.retry_after_seconds)
    return backoff_seconds(tries_count, first_seconds=first_seconds, seconds_max=seconds_max)


async def pause(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for `seconds` of wall time or until `stop`; True when it is time to stop."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True
