"""API rate limits and time limits of calls. Shared by all drivers."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

from gpu_autoscaler.model.errors import TransientError

T = TypeVar("T")

SLOWER_RATIO = 0.5  # the rate is multiplied by this when the cloud throttles
FASTER_RATIO = 0.05  # share of the full rate that each successful call restores
RATE_RATIO_MIN = 0.05

# Entered while a call waits for its rate limit: who handles many facts at once gives the slot of this one to another
# (`runtime/slots.py`).
while_waiting: ContextVar[Callable[[], AbstractAsyncContextManager[None]]] = ContextVar(
    "while_waiting", default=nullcontext
)


class NotSent(TransientError):
    """The call was not sent, or the cloud reports that it did nothing: there is no result to look for."""


class RateLimit:
    """Token bucket of calls, refilled at `per_second`; slower for a while after the cloud throttled."""

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
        self._left = float(burst)  # negative: calls already granted
        self._filled_at = now()
        self._rate_ratio = 1.0

    async def take(self, call: str) -> None:
        """Wait until the call may be made. Raises NotSent if the wait would be too long."""
        wait_seconds = self._wait_seconds()
        if wait_seconds > self._wait_seconds_max:
            raise NotSent(
                f"{call}: own rate limit of {self._per_second:g} calls per second is exhausted for {wait_seconds:.1f} s"
                " (it protects the account's limit); retried later",
                retry_after_seconds=wait_seconds,
            )
        self._left -= 1.0
        if wait_seconds > 0:
            async with while_waiting.get()():
                await asyncio.sleep(wait_seconds)

    def throttled(self) -> None:
        """Slow down: the cloud has throttled."""
        self._rate_ratio = max(self._rate_ratio * SLOWER_RATIO, RATE_RATIO_MIN)
        self._left = min(self._left, 0.0)

    def succeeded(self) -> None:
        """Restore part of the full rate."""
        self._rate_ratio = min(self._rate_ratio + FASTER_RATIO, 1.0)

    def _wait_seconds(self) -> float:
        now = self._now()
        rate = self._per_second * self._rate_ratio
        self._left = min(self._left + (now - self._filled_at) * rate, self._burst)
        self._filled_at = now
        return max(0.0, (1.0 - self._left) / rate)


NameT = TypeVar("NameT", bound=str)


def rate_limits(rates: Mapping[NameT, tuple[float, int]], wait_seconds_max: float) -> dict[NameT, RateLimit]:
    """Return a cloud's rate limits, from calls per second and burst."""
    return {
        name: RateLimit(per_second, burst, wait_seconds_max=wait_seconds_max)
        for name, (per_second, burst) in rates.items()
    }


class BoundedCalls:
    """Blocking SDK calls in a bounded thread pool, each with a time limit."""

    def __init__(self, name: str, *, threads_count: int, call_seconds_max: float) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads_count, thread_name_prefix=name)
        self._call_seconds_max = call_seconds_max

    async def run(self, call: str, function: Callable[[], T]) -> T:
        """Return the function's result; time in the queue counts. Raises TransientError on a timeout. The thread keeps
        running until the SDK's own limits: the call may still take effect."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        try:
            return await asyncio.wait_for(future, self._call_seconds_max)
        except TimeoutError as exc:
            raise TransientError(f"{call}: no answer within {self._call_seconds_max:g} s; safe to retry") from exc

    def close(self) -> None:
        """Start no more calls; running ones end by their own limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
