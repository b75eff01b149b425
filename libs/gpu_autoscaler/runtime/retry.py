"""How long to wait before the next try. Waits are wall time: they protect what is outside, not the cluster's story."""

import asyncio
import random

import msgspec

from gpu_autoscaler.model.errors import TransientError

# Whoever asks for more is asked again all the same: a slip of theirs must not keep us deaf for a day. Source: our own.
ASKED_SECONDS_MAX = 300.0


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Waits that double from the first to the longest. Source of the numbers: our own; a broker's restart takes 2 s."""

    first_seconds: float = 0.25
    seconds_max: float = 30.0

    def wait_seconds(self, tries_count: int, error: Exception | None = None) -> float:
        """Return how long to wait after the `tries_count`-th failure in a row (1 is the first).

        As long as a TransientError asks for, within ASKED_SECONDS_MAX; else doubled, less up to a quarter by chance,
        which keeps replicas from coming back all at once.
        """
        if isinstance(error, TransientError) and error.retry_after_seconds is not None:
            return min(max(0.0, error.retry_after_seconds), ASKED_SECONDS_MAX)
        doubled = self.first_seconds * 2.0 ** min(max(tries_count, 1) - 1, 32)
        return min(doubled, self.seconds_max) * random.uniform(0.75, 1.0)  # noqa: S311 - spreads load, guards nothing


async def pause(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for `seconds` of wall time or until `stop`; True when it is time to stop."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True
