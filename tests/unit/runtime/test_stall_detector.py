"""A read that gets no further although there is more: never without a word, and never for good."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import msgspec
import pytest
import structlog
from tests.support.memory_bus import MemoryProjection
from tests.support.runners import QUICK, Away, Place, Probe, running, until

from gpu_autoscaler.bus.protocol import Message, Projection
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.stall_detector import RESTARTS_COUNT_MAX, LoopStalled, LoopUnrecoverable, StallDetector

IMPATIENT = msgspec.structs.replace(QUICK, stall_seconds_max=0.3, lag_seconds=0.1)


class Reader(Probe):
    """Keeps jobs as state."""

    name = "reader"
    folds: ClassVar[tuple[type[Fact], ...]] = (JobCancelRequested,)


class Mute(Away):
    """A bus whose first reads say how much there is, and give nothing."""

    mute_count = 1

    async def projection(self, stream: str, *, subjects: Sequence[str] = (), after_sequence: int = 0) -> Projection:
        """A read that gives nothing, as long as there are such reads left."""
        projection = await super().projection(stream, subjects=subjects, after_sequence=after_sequence)
        if self.mute_count == 0:
            return projection
        self.mute_count -= 1
        assert isinstance(projection, MemoryProjection)

        class Silent:
            async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
                await asyncio.Event().wait()
                yield ()

            async def lag_count(self) -> int:
                return await projection.lag_count()

            async def close(self) -> None:
                await projection.close()

        return Silent()


async def mute(place: Place, count: int) -> Mute:
    """Return a bus whose first `count` reads stall, with a fact to read."""
    await place.say(JobCancelRequested(job_id=JobId("a")))
    bus = await place.bus(Reader, Mute)
    assert isinstance(bus, Mute)
    bus.mute_count = count
    return bus


async def test_a_stalled_read_is_restarted() -> None:
    """Not ready meanwhile, logged and counted; then the rest is read, and the process is ready."""
    place, service = Place(), Reader()
    bus = await mute(place, 1)
    with structlog.testing.capture_logs() as lines:
        async with running(place, service, bus=bus, limits=IMPATIENT) as runner:
            await until(lambda: "stalled" in (runner.readiness.conditions.get("fold JOB") or ""))
            assert not runner.readiness.is_ready
            await until(lambda: runner.readiness.is_ready)
            assert runner.metrics.loop_restarts.labels("stalled")._value.get() == 1
    assert list(service.view.state.jobs) == ["a"]
    (line,) = [line for line in lines if line["event"] == "loop interrupted, restart scheduled"]
    assert line["error"].startswith("read of stream JOB stalled at sequence 0")


async def test_a_permanently_stalled_read_ends_the_process() -> None:
    """Its supervisor starts another one, instead of a process that never recovers."""
    place, service = Place(), Reader()
    bus = await mute(place, 1_000)
    runner = Runner(service, bus, view=service.view, clock=Clock(), instance="test", limits=IMPATIENT)
    with pytest.raises(ExceptionGroup) as group:
        await asyncio.wait_for(runner.run(), 60)
    assert group.group_contains(LoopUnrecoverable, match="read of stream JOB stalled .* after 3 restarts")


def test_a_busy_process_is_not_a_stalled_read() -> None:
    """A decision of minutes delays everything; only the read's progress afterwards counts."""
    detector = StallDetector("POD", seconds_max=30.0, step_seconds_max=5.0)
    detector.start()
    for number in range(6):
        detector.check(number * 100.0, sequence=7, lag_count=3)
    with pytest.raises(LoopStalled):
        detector.check(605.0, sequence=7, lag_count=3)


def test_any_message_clears_the_stall() -> None:
    """Slow is not stalled: a read with occasional messages runs without an end."""
    detector = StallDetector("POD", seconds_max=10.0, step_seconds_max=5.0)
    now = 0.0
    for sequence in range(2 * RESTARTS_COUNT_MAX):
        detector.check(now, sequence=sequence, lag_count=100)
        assert not detector.is_stalled
        detector.check(now + 5.0, sequence=sequence, lag_count=100)
        with pytest.raises(LoopStalled):
            detector.check(now + 10.0, sequence=sequence, lag_count=100)
        now += 15.0
        assert detector.is_stalled
