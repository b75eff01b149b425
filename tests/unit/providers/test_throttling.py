"""Rate limits of calls, and bounded waits."""

import asyncio
import threading
import time

import pytest

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.providers.throttling import BoundedCalls, RateLimit


class TurnedSeconds:
    """A monotonic clock that the test turns."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def test_a_burst_passes_and_then_the_rate_holds() -> None:
    """Three at once, then two per second; a call that would wait too long gets the waiting time."""
    clock = TurnedSeconds()
    budget = RateLimit(2.0, 3, wait_seconds_max=0.0, now=clock)
    for _ in range(3):
        await budget.take("RunInstances")
    with pytest.raises(TransientError, match=r"RunInstances.*2 calls per second") as refused:
        await budget.take("RunInstances")
    clock.seconds += 0.5
    await budget.take("RunInstances")
    assert refused.value.retry_after_seconds == pytest.approx(0.5)


async def test_throttling_halves_the_rate_for_a_while() -> None:
    """Each throttled call halves it; successful calls restore it."""
    clock = TurnedSeconds()
    budget = RateLimit(2.0, 1, wait_seconds_max=0.0, now=clock)
    budget.throttled()
    budget.throttled()
    clock.seconds += 1.9
    with pytest.raises(TransientError):
        await budget.take("DescribeInstances")
    clock.seconds += 0.2
    await budget.take("DescribeInstances")
    for _ in range(20):
        budget.succeeded()
    clock.seconds += 0.5
    await budget.take("DescribeInstances")


async def test_calls_wait_for_a_thread_at_most_the_call_limit() -> None:
    """Two busy threads: the third call ends at its limit with an error that is safe to retry."""
    calls = BoundedCalls("test", threads_count=2, call_seconds_max=0.2)
    held = threading.Event()
    ran: list[int] = []
    try:
        outcomes = await asyncio.gather(
            calls.run("a", held.wait), calls.run("b", held.wait), calls.run("c", lambda: ran.append(1)),
            return_exceptions=True,
        )  # fmt: skip
    finally:
        held.set()
        calls.close()
    assert [type(outcome) for outcome in outcomes] == [TransientError] * 3
    time.sleep(0.05)  # noqa: ASYNC251 - threads, not the loop, are given the moment
    assert ran == []
