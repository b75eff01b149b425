"""Streams recreated under a running process: it exits, so that its next start publishes everything again."""

import asyncio
from datetime import timedelta
from typing import ClassVar

import pytest
from tests.support.runners import QUICK, Place, Probe, running, until

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.streams import streams
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.runner import Runner


class Speaker(Probe):
    """Says things and reads nothing, as the pod watcher does: no reader of its own would notice."""

    name: ClassVar[str] = "speaker"
    publishes: ClassVar[tuple[type[Fact], ...]] = (JobFinished,)


async def lose(place: Place, *, is_recreated: bool) -> None:
    """Run a process whose streams are lost after a while, until it ends."""
    speaker = Speaker()
    bus = await place.bus(Speaker)
    runner = Runner(speaker, bus, view=speaker.view, clock=Clock(), instance="test", limits=QUICK)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(runner.run())
        await until(lambda: runner.readiness.is_ready)
        await asyncio.sleep(0.1)
        place.broker.streams.clear()
        if is_recreated:
            for spec in streams():
                place.broker.make_stream(spec, place.now() + timedelta(seconds=1))


async def losing(place: Place, *, is_recreated: bool) -> str:
    """The mistake that ends the process."""
    with pytest.raises(ExceptionGroup) as ended:
        await lose(place, is_recreated=is_recreated)
    mistake: BaseException = ended.value
    while isinstance(mistake, ExceptionGroup):
        (mistake,) = mistake.exceptions
    assert isinstance(mistake, ConfigError)
    return str(mistake)


async def test_a_process_ends_when_its_streams_were_recreated() -> None:
    """Another process made them; what this one had said is not in them."""
    assert "was recreated" in await losing(Place(), is_recreated=True)


async def test_a_process_ends_when_its_streams_were_deleted() -> None:
    """Its next start makes them."""
    assert "was deleted" in await losing(Place(), is_recreated=False)


async def test_a_process_on_the_same_streams_goes_on() -> None:
    """A broker that comes back with its files is the same one."""
    place = Place()
    assert isinstance(place.broker, MemoryBroker)
    async with running(place, Speaker()) as runner:
        await asyncio.sleep(0.6)
        assert runner.readiness.is_ready
