"""Back-off between retries. Waits are wall time, as they protect external systems."""

import asyncio
import random

import msgspec

from gpu_autoscaler.model.errors import TransientError

# The longest requested wait that is honored: a faulty Retry-After must not stop a service for a day. Source: our own.
RETRY_AFTER_SECONDS_MAX = 300.0


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Exponential back-off. Source of the figures: our own; a broker restart takes 2 s."""

    first_seconds: float = 0.25
    seconds_max: float = 30.0

    def wait_seconds(self, tries_count: int, error: Exception | None = None) -> float:
        """Return how long to wait after the `tries_count`-th failure in a row (1 is the first).

        A TransientError's own `retry_after_seconds`, within RETRY_AFTER_SECONDS_MAX; otherwise the doubled wait with up
        to 25 % jitter, so that replicas do not retry all at once.
        """
        if isinstance(error, TransientError) and error.retry_after_seconds is not None:
            return min(max(0.0, error.retry_after_seconds), RETRY_AFTER_SECONDS_MAX)
        doubled = self.first_seconds * 2.0 ** min(max(tries_count, 1) - 1, 32)
        return min(doubled, self.seconds_max) * random.uniform(0.75, 1.0)  # noqa: S311 - spreads load, no security


async def pause(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for `seconds` of wall time or until `stop`; True when stopped."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True
