"""How often a cloud may be asked, and for how long one call may take. Used by every driver; knows no cloud."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gpu_autoscaler.model.errors import TransientError

T = TypeVar("T")

SLOWER_RATIO = 0.5  # of the rate is left after the cloud has said "too often"
FASTER_RATIO = 0.05  # of the full rate comes back with each call that went well
RATE_RATIO_MIN = 0.05


class NotSent(TransientError):
    """The cloud was not asked, or says itself that it has done nothing: nothing has to be looked for."""


class RateLimit:
    """A bucket of calls that fills by `per_second`; a cloud that throttles makes it fill more slowly for a while."""

    def __init__(
        self,
        per_second: float,
        burst: int,
        *,
        wait_seconds_max: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._wait_seconds_max = wait_seconds_max
        self._now = now
        self._left = float(burst)  # below zero: so many have been promised already
        self._filled_at = now()
        self._rate_ratio = 1.0

    async def take(self, call: str) -> None:
        """Return when the call may be made. Raises TransientError where that would take too long."""
        wait_seconds = self._wait_seconds()
        if wait_seconds > self._wait_seconds_max:
            raise NotSent(
                f"{call}: our own limit of {self._per_second:g} calls a second is used up for {wait_seconds:.1f} s,"
                " so that the account's is not; asked again later",
                retry_after_seconds=wait_seconds,
            )
        self._left -= 1.0
        if wait_seconds > 0:
            await asyncio.sleep(wait_seconds)

    def throttled(self) -> None:
        """Ask less often: the cloud has said that it is too often."""
        self._rate_ratio = max(self._rate_ratio * SLOWER_RATIO, RATE_RATIO_MIN)
        self._left = min(self._left, 0.0)

    def succeeded(self) -> None:
        """Come back to the full rate, step by step."""
        self._rate_ratio = min(self._rate_ratio + FASTER_RATIO, 1.0)

    def _wait_seconds(self) -> float:
        now = self._now()
        rate = self._per_second * self._rate_ratio
        self._left = min(self._left + (now - self._filled_at) * rate, self._burst)
        self._filled_at = now
        return max(0.0, (1.0 - self._left) / rate)


class BoundedCalls:
    """Blocking calls of an SDK, in so many threads and no more, each with a limit of time."""

    def __init__(self, name: str, *, threads_count: int, call_seconds_max: float) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads_count, thread_name_prefix=name)
        self._call_seconds_max = call_seconds_max

    async def run(self, call: str, function: Callable[[], T]) -> T:
        """Return what it returns; the time in the queue counts. Raises TransientError when it takes too long.

        The thread is left to the SDK's own limits: what it does may still be done.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        try:
            return await asyncio.wait_for(future, self._call_seconds_max)
        except TimeoutError as exc:
            raise TransientError(
                f"{call}: no answer within {self._call_seconds_max:g} s; the same call may be made again"
            ) from exc

    def close(self) -> None:
        """Start no more; what runs ends by its own limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
