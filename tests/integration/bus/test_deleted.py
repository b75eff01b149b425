"""A consumer or stream is deleted while in use: recreated in place, or the process exits to be restarted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
import structlog
from tests.support.ender import AT, Ender, cancel, declared, envelope_of
from tests.support.enders import Enders
from tests.support.nats import nats_store, server
from tests.support.working import until, working

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import ApiError
from gpu_autoscaler.bus.nats.projection import NatsProjection
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.process import EXIT_FAILED
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.service import Outputs

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

COUNT = 200
Connect = Callable[[str], Awaitable[NatsBus]]


@pytest.fixture
async def connect(server: NatsServer) -> AsyncIterator[Connect]:
    """Connections to it, closed afterwards."""
    buses: list[NatsBus] = []

    async def connected(name: str) -> NatsBus:
        # Nothing is killed here: a process that a busy machine stops for a second keeps what it was given.
        bus = await NatsBus.connect(server.url, name=name, declared=declared(ack_wait_seconds=30.0))
        await bus.ensure()
        buses.append(bus)
        return bus

    yield connected
    for bus in buses:
        await bus.close()


async def ask(bus: NatsBus, numbers: range) -> None:
    """Somebody wants these jobs to end."""
    for number in numbers:
        await bus.publish(*envelope_of(cancel(number)), message_id=str(number))


async def until_settled(bus: NatsBus, load: NatsBus) -> None:
    """Wait until all messages are acknowledged, and the broker has confirmed that to the service."""
    (consumer,) = (one for one in bus._consumers if one._spec.durable == "ender-job-act")
    async with asyncio.timeout(60):
        while (told := await load._link.call("CONSUMER.INFO.JOB.ender-job-act"))["num_ack_pending"]:
            await asyncio.sleep(0.05)
        while consumer._position.acknowledged_sequence < told["ack_floor"]["stream_seq"]:
            await asyncio.sleep(0.05)


async def test_a_deleted_consumer_is_made_again_where_it_was(connect: Connect) -> None:
    """Finished work is not repeated, pending work is done; the log reports an error, the metric counts it."""
    bus, load = await connect("ender"), await connect("load")
    service = Ender()
    with structlog.testing.capture_logs() as lines:
        async with working(bus, service) as runner:
            await ask(load, range(COUNT))
            await until(lambda: len(service.handled) == COUNT, "all done")
            await until_settled(bus, load)
            await load._link.call("CONSUMER.DELETE.JOB.ender-job-act")
            await ask(load, range(COUNT, 2 * COUNT))
            await until(lambda: len(set(service.handled)) == 2 * COUNT, "the rest is done")
            await until(lambda: runner.readiness.is_ready, "ready again")
            counted = runner.metrics.loop_restarts.labels("interrupted")._value.get()
    assert len(service.handled) == 2 * COUNT, "nothing came a second time"
    assert counted == 1
    (line,) = [line for line in lines if line["event"].startswith("deleted consumer recreated")]
    assert (line["durable"], line["log_level"], line["after_sequence"] >= COUNT) == ("ender-job-act", "error", True)

    await bus.ensure()  # it is as declared, also for the next start


async def test_a_deleted_consumer_is_made_again_if_the_broker_answers_late(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader gives up on the first attempt; the next reader of the process knows the position too."""
    bus, load = await connect("ender"), await connect("load")
    service = Ender()
    call, late = bus._link.call, {"CONSUMER.INFO.JOB.ender-job-act", "CONSUMER.CREATE.JOB.ender-job-act"}

    async def call_late(operation: str, *arguments: Any, **named: Any) -> dict[str, Any]:  # noqa: ANN401 - as the link
        is_late = operation in late
        try:
            if not (is_late and operation.startswith("CONSUMER.CREATE")):
                return await call(operation, *arguments, **named)
        except ApiError:  # the first report that there is no consumer
            if not is_late:
                raise
        late.discard(operation)
        raise TransientError("broker did not answer in time")

    monkeypatch.setattr(bus._link, "call", call_late)
    async with working(bus, service) as runner:
        await ask(load, range(COUNT))
        await until(lambda: len(service.handled) == COUNT, "all done")
        await until_settled(bus, load)
        await load._link.call("CONSUMER.DELETE.JOB.ender-job-act")
        await ask(load, range(COUNT, 2 * COUNT))
        await until(lambda: len(set(service.handled)) == 2 * COUNT, "the rest is done")
        await until(lambda: runner.readiness.is_ready, "ready again")
    assert not late
    assert len(service.handled) == 2 * COUNT, "nothing came a second time"


async def test_what_a_deleted_consumer_had_in_hand_is_done_once_in_effect(connect: Connect) -> None:
    """Deleted in the middle of the work: some of it comes again, and the stream has each end once."""
    bus, load = await connect("ender"), await connect("load")
    service = Ender()
    async with working(bus, service):
        await ask(load, range(COUNT))
        await until(lambda: len(service.handled) > COUNT // 3, "at work")
        await load._link.call("CONSUMER.DELETE.JOB.ender-job-act")
        await until(lambda: len(set(service.handled)) == COUNT, "all done")
        await asyncio.sleep(0.5)
    assert await load.last_sequence("JOB") == 2 * COUNT


async def test_a_deleted_stream_ends_the_process_and_the_next_makes_it_again(
    server: NatsServer, connect: Connect, tmp_path: Path
) -> None:
    """Exit 1 with the reason; started again, it works with what is declared."""
    load, enders = await connect("load"), Enders(server.url, tmp_path)
    try:
        first = await enders.start()
        await ask(load, range(10))
        await until_stored(load, 20)
        await load._link.call("STREAM.DELETE.JOB")
        assert await first.ended() == EXIT_FAILED, first.said
        assert "was deleted" in first.said or "stream JOB does not exist" in first.said
        assert "streams changed while running; restart the process" in first.said

        second = await enders.start()
        async with asyncio.timeout(60):
            while not await has_stream(load):
                await asyncio.sleep(0.1)
        await ask(load, range(10, 20))
        await until_stored(load, 20)
        assert await second.stop() == 0, second.said
    finally:
        await enders.close()


async def has_stream(bus: NatsBus) -> bool:
    """True when there is a JOB stream; false while the broker does not answer in time, as on a busy machine."""
    with contextlib.suppress(TransientError):
        return bool((await bus._link.call("STREAM.NAMES", {"subject": "job.finished"})).get("streams"))
    return False


async def until_stored(bus: NatsBus, count: int) -> None:
    """Wait until the stream has `count` messages, also while the broker does not answer in time."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(TransientError):
                if await bus.last_sequence("JOB") >= count:
                    return
            await asyncio.sleep(0.05)


class Spring:
    """A source of ends of jobs, which it reads nowhere."""

    name: ClassVar[str] = "spring"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = ()
    publishes: ClassVar[tuple[type[Fact], ...]] = (JobFinished,)
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = 0.05

    def __init__(self) -> None:
        self.view = StateView()
        self.pulled = 0

    def sources(self) -> Sequence[AsyncIterator[int]]:
        """One source."""
        return (self._numbers(),)

    async def _numbers(self) -> AsyncIterator[int]:
        while True:
            self.pulled += 1
            yield self.pulled
            await asyncio.sleep(0.02)

    async def on_item(self, item: int) -> Outputs:
        """Each number is the end of a job."""
        return [end_of(item)]

    async def on_tick(self, now: datetime) -> Outputs:
        """A tick publishes a fact too."""
        return [end_of(-now.microsecond)]


def end_of(number: int) -> JobFinished:
    """The job ended."""
    return JobFinished(job_id=cancel(number).job_id, outcome="completed", finished_at=AT)


async def test_who_only_publishes_finds_out_as_well(connect: Connect) -> None:
    """Nothing is set aside as if it were at fault, and the run ends with the reason."""
    bus, load = await connect("spring"), await connect("load")
    service = Spring()
    runner = Runner(service, bus, view=service.view, clock=Clock())
    with structlog.testing.capture_logs() as lines:
        run = asyncio.create_task(runner.run())
        await until(lambda: service.pulled > 5, "at work")
        await load._link.call("STREAM.DELETE.JOB")
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(run, 60)
    assert ended.group_contains(ConfigError, match="stream JOB (was deleted|is gone)")
    assert [line for line in lines if "set aside" in line["event"]] == []


async def test_a_recreated_stream_is_not_taken_for_the_old_one(connect: Connect) -> None:
    """Also when it has grown longer than what was read of the old one before anybody looked."""
    reader, load = await connect("reader"), await connect("load")
    await ask(load, range(3))
    projection = NatsProjection(reader._link, "JOB", (), 3)
    await projection.open()
    await load._link.call("STREAM.DELETE.JOB")
    await load.ensure()
    await ask(load, range(10, 20))

    with pytest.raises(ConfigError, match="was recreated or lost messages; restart the process"):
        await projection.open()
    await projection.close()
