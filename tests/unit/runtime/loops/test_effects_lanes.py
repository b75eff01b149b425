"""Lanes: facts of one service that do not wait for each other."""

import asyncio
from datetime import timedelta
from typing import ClassVar

import pytest
from tests.support.runners import QUICK, Place, Probe, running, until
from tests.unit.runtime.loops.test_effects import cancel, finished

from gpu_autoscaler.bus.streams import Lane, consumers_for
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobQueued
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.providers.throttling import while_waiting
from gpu_autoscaler.runtime.service import Outcome, Outputs

WAITING_COUNT = 300  # more than a consumer without lanes may have in hand


class WithLanes(Probe):
    """A service with two lanes."""

    name: ClassVar[str] = "split"
    consumes: ClassVar[tuple[type[Fact], ...]] = (JobCancelRequested, JobFinished)
    lanes: ClassVar[tuple[Lane, ...]] = (
        Lane(name="asks", facts=(JobCancelRequested,), concurrency_max=4, max_ack_pending=1000),
        Lane(name="ends", facts=(JobFinished,), concurrency_max=2, max_ack_pending=4),
    )


def test_lanes_share_the_facts_of_a_domain() -> None:
    """Each has a consumer of its own, split from the one that an earlier release used."""
    specs = consumers_for("split", WithLanes.consumes, WithLanes.lanes)
    assert [(spec.durable, spec.subjects, spec.max_ack_pending, spec.split_from, spec.lanes) for spec in specs] == [
        (
            "split-job-act", ("job.cancel_requested", "job.finished"), 256, None,
            ("split-job-asks-act", "split-job-ends-act"),
        ),
        ("split-job-asks-act", ("job.cancel_requested",), 1000, "split-job-act", ()),
        ("split-job-ends-act", ("job.finished",), 4, "split-job-act", ()),
    ]  # fmt: skip


def test_a_fact_without_a_lane_is_a_bug() -> None:
    """Where a domain has lanes, each of its facts is in exactly one."""
    with pytest.raises(AssertionError, match="exactly one lane"):
        consumers_for("split", (*WithLanes.consumes, JobQueued), WithLanes.lanes)


async def test_a_lane_that_hangs_does_not_delay_another() -> None:
    """All slots of one lane are taken for good, and the other's facts are handled."""

    async def hang(recorded: Recorded) -> Outputs:
        if isinstance(recorded.fact, JobCancelRequested):
            await asyncio.Event().wait()
        return ()

    place, service = Place(), WithLanes(hang)
    quick_end = QUICK.__class__(shutdown_seconds_max=0.01, fetch_seconds_max=0.1)
    for number in range(20):
        await place.say(cancel(str(number)))
    async with running(place, service, limits=quick_end):
        await until(lambda: len(service.given) == 4)
        await place.say(finished())
        await until(lambda: isinstance(service.given[-1].fact, JobFinished), 2.0)


async def test_effects_that_wait_are_counted_by_lane() -> None:
    """Those without a slot, and those that gave theirs back to wait for a rate limit; not those that are handled."""
    is_limited = asyncio.Event()

    async def hang(recorded: Recorded) -> Outputs:
        if recorded.fact.entity() == "job/limited":
            async with while_waiting.get()():
                is_limited.set()
                await asyncio.Event().wait()
        await asyncio.Event().wait()
        return ()

    place, service = Place(), WithLanes(hang)
    quick_end = QUICK.__class__(shutdown_seconds_max=0.01, fetch_seconds_max=0.1, heartbeat_seconds=0.05)
    await place.say(cancel("limited"))
    async with running(place, service, limits=quick_end) as runner:

        def waiting(lane: str) -> float:
            return float(runner.metrics.effects_waiting.labels(lane)._value.get())

        await until(is_limited.is_set)
        await until(lambda: waiting("asks") == 1)
        for number in range(20):
            await place.say(cancel(str(number)))
        await until(lambda: waiting("asks") == 1 + 20 - 4)
        assert waiting("ends") == 0


async def test_facts_that_wait_do_not_delay_later_ones_of_their_lane() -> None:
    """Three hundred come again every few seconds, and the next one is handled at its first delivery."""
    last = "the last"

    async def wait(recorded: Recorded) -> Outputs:
        assert isinstance(recorded.fact, JobCancelRequested)
        return () if recorded.fact.job_id == JobId(last) else Outcome(redeliver_after_seconds=5.0)

    place, service = Place(), WithLanes(wait)
    for number in range(WAITING_COUNT):
        await place.say(cancel(str(number)))
    async with running(place, service):
        await until(lambda: len({recorded.sequence for recorded in service.given}) == WAITING_COUNT)
        await place.say(cancel(last))
        await until(lambda: any(recorded.fact.entity() == f"job/{last}" for recorded in service.given), 15.0)


async def test_at_the_limit_later_facts_of_a_lane_wait() -> None:
    """A lane takes no more than it declares, until one of them is finished."""
    is_over = False

    async def wait(_: Recorded) -> Outputs:
        return () if is_over else Outcome(redeliver_after_seconds=0.05)

    place, service = Place(), WithLanes(wait)
    for number in range(6):
        await place.say(finished(str(number)))
    async with running(place, service):
        await until(lambda: len({recorded.sequence for recorded in service.given}) == 4)
        await asyncio.sleep(0.2)
        assert len({recorded.sequence for recorded in service.given}) == 4
        is_over = True
        await until(lambda: len({recorded.sequence for recorded in service.given}) == 6)


async def test_a_suspect_is_alone_in_its_lane_and_delays_no_other() -> None:
    """A message that was in hand when two processes died is handled alone, while the other lane goes on."""
    may_end = asyncio.Event()

    async def hang(recorded: Recorded) -> Outputs:
        if isinstance(recorded.fact, JobCancelRequested):
            await may_end.wait()
        return ()

    quick_end = QUICK.__class__(shutdown_seconds_max=0.01, fetch_seconds_max=0.1)
    place = Place()
    await place.say(cancel("suspect"))
    for _ in range(2):  # the second attempt is recorded
        service = WithLanes(hang)
        async with running(place, service, limits=quick_end):
            await until(lambda: len(service.given) == 1)  # noqa: B023 - awaited within the loop
        place.passed += timedelta(seconds=31)  # the broker's ack_wait
    third = WithLanes(hang)
    async with running(place, third, limits=quick_end):
        await until(lambda: len(third.given) == 1)
        await place.say(cancel("later"))
        await place.say(finished())
        await until(lambda: any(isinstance(recorded.fact, JobFinished) for recorded in third.given), 2.0)
        assert [recorded.fact.entity() for recorded in third.given].count("job/later") == 0
        may_end.set()
        await until(lambda: any(recorded.fact.entity() == "job/later" for recorded in third.given))
