"""A consumer is split into lanes, the release is taken back, and installed again: each fact has its effect once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import pytest
from tests.support.ender import AT
from tests.support.nats import nats_store, server
from tests.support.runners import QUICK, Probe, until

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, Lane, streams
from gpu_autoscaler.events.envelope import Envelope, Recorded, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished
from gpu_autoscaler.model.ids import FactId, JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.service import Outcome, Outputs, consumers_of

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

LONG = JobId("long")  # its effect takes as long as the test wants


class Whole(Probe):
    """The earlier release: one consumer for both facts."""

    name: ClassVar[str] = "hand"
    consumes: ClassVar[tuple[type[Fact], ...]] = (JobCancelRequested, JobFinished)
    concurrency_max: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self.done: list[JobId] = []
        self.is_long_over = False

    async def on_fact(self, recorded: Recorded) -> Outputs:
        """Record the job."""
        fact = recorded.fact
        assert isinstance(fact, JobCancelRequested | JobFinished)
        self.given.append(recorded)
        if fact.job_id == LONG and not self.is_long_over:
            return Outcome(redeliver_after_seconds=0.1)
        self.done.append(fact.job_id)
        return ()


class WithLanes(Whole):
    """The later release: a lane for each."""

    lanes: ClassVar[tuple[Lane, ...]] = (
        Lane(name="asks", facts=(JobCancelRequested,), concurrency_max=2, max_ack_pending=16),
        Lane(name="ends", facts=(JobFinished,), concurrency_max=2, max_ack_pending=16),
    )


class Place:
    """A broker, and a release at work on it."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server

    async def bus(self, kind: type[Whole]) -> NatsBus:
        """A connection of this release, which creates what is missing and refuses what differs."""
        declared = BusDeclaration(streams=streams(), consumers=consumers_of(kind))
        bus = await NatsBus.connect(self._server.url, name="hand", declared=declared)
        await bus.ensure()
        return bus

    @contextlib.asynccontextmanager
    async def running(self, kind: type[Whole]) -> AsyncIterator[Whole]:
        """Run this release."""
        service, bus = kind(), await self.bus(kind)
        runner = Runner(service, bus, view=service.view, clock=Clock(), limits=QUICK)
        run = asyncio.create_task(runner.run())
        try:
            yield service
        finally:
            runner.stop()
            await run
            await bus.close()

    async def publish(self, names: Sequence[str]) -> list[JobId]:
        """Publish a fact for each job, of one type and the other in turns."""
        bus = await self.bus(Whole)
        for number, name in enumerate(names):
            job_id = JobId(name)
            fact: Fact = JobCancelRequested(job_id=job_id)
            if number % 2:
                fact = JobFinished(job_id=job_id, outcome="cancelled", finished_at=AT)
            envelope = Envelope(id=FactId(name), source="/tests", time=AT, fact=fact)
            await bus.publish(fact.subject(), encode(envelope), message_id=name)
        await bus.close()
        return [JobId(name) for name in names]

    async def origin_sequence(self) -> int:
        """Where the consumer of the earlier release has arrived."""
        bus = await self.bus(Whole)
        try:
            return await (await bus.effect_consumer("hand-job-act")).acknowledged_sequence()
        finally:
            await bus.close()


def numbered(word: str, count: int = 20) -> list[str]:
    """Return names of jobs."""
    return [f"{word}-{number}" for number in range(count)]


async def test_a_split_a_step_back_and_the_split_again(server: NatsServer) -> None:
    """Nothing is lost, and only what one fact in hand had kept from being confirmed is handled again."""
    place = Place(server)
    first = await place.publish(numbered("first"))
    held = await place.publish([LONG, *numbered("held", 3)])
    async with place.running(Whole) as before:
        await until(lambda: set(before.done) == {*first, *held} - {LONG})

    async with place.running(WithLanes) as after:
        await until(lambda: set(after.done) == set(held) - {LONG})
        after.is_long_over = True
        await until(lambda: LONG in after.done)
        second = await place.publish(numbered("second"))
        await until(lambda: set(after.done) == {*held, *second})
        assert len(after.done) == len(set(after.done)), "each once, in one of the lanes"

        async def has_followed() -> bool:
            return await place.origin_sequence() == len(first) + len(held) + len(second)

        await until(has_followed)

    third = await place.publish(numbered("third"))
    async with place.running(Whole) as back:
        await until(lambda: len(back.done) >= len(third))
        await asyncio.sleep(0.5)
        assert sorted(back.done) == sorted(third), "what the lanes have handled is not repeated"

    fourth = await place.publish(numbered("fourth"))
    async with place.running(WithLanes) as again:
        await until(lambda: len(again.done) >= len(fourth))
        await asyncio.sleep(0.5)
        assert sorted(again.done) == sorted(fourth), "what the earlier release has handled is not repeated"


async def test_a_fact_in_hand_at_the_step_back_is_handed_over(server: NatsServer) -> None:
    """The earlier release continues with what a lane had not finished."""
    place = Place(server)
    names = await place.publish(["a", LONG, "b", "c"])
    async with place.running(WithLanes) as split:
        await until(lambda: set(split.done) == set(names) - {LONG})
    async with place.running(Whole) as back:
        back.is_long_over = True
        await until(lambda: LONG in back.done)
