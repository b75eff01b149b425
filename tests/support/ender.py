"""A service that ends every job that somebody wants to end, slowly; also as a process that tests may kill."""

import asyncio
import os
import signal
import sys
from datetime import UTC, datetime
from typing import ClassVar

import msgspec

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import BusDeclaration, ConsumerSpec, consumers_of_process, streams
from gpu_autoscaler.events.envelope import Envelope, Recorded, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished
from gpu_autoscaler.model.ids import FactId, JobId
from gpu_autoscaler.runtime.config import load_settings
from gpu_autoscaler.runtime.process import ProcessContext, run_process
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outputs, Service

POISON = "whoever handles this dies"
AT = datetime(2026, 11, 21, 12, tzinfo=UTC)


class Ender:
    """Ends jobs, one every few milliseconds, or as fast as it can."""

    name: ClassVar[str] = "ender"
    consumes: ClassVar[tuple[type[Fact], ...]] = (JobCancelRequested,)
    folds: ClassVar[tuple[type[Fact], ...]] = (JobCancelRequested,)
    publishes: ClassVar[tuple[type[Fact], ...]] = (JobFinished,)
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = None

    def __init__(self, view: StateView | None = None, *, job_seconds: float = 0.01) -> None:
        self.view = view or StateView()
        self._job_seconds = job_seconds
        self.handled: list[JobId] = []

    async def on_fact(self, recorded: Recorded) -> Outputs:
        """End the job."""
        assert isinstance(recorded.fact, JobCancelRequested)
        if recorded.fact.note == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(self._job_seconds)
        self.handled.append(recorded.fact.job_id)
        return [JobFinished(job_id=recorded.fact.job_id, outcome="cancelled", finished_at=AT)]


def cancel(number: int) -> JobCancelRequested:
    """Somebody wants job `number` to end."""
    return JobCancelRequested(job_id=JobId(f"job-{number}"))


def envelope_of(fact: JobCancelRequested) -> tuple[str, bytes]:
    """Return subject and payload, as somebody else would publish them."""
    return fact.subject(), encode(Envelope(id=FactId(f"cancel/{fact.job_id}"), source="/tests", time=AT, fact=fact))


def declared(replicas_count: int = 1, ack_wait_seconds: float = 1.0) -> BusDeclaration:
    """What the ender expects on the broker."""
    return BusDeclaration(streams=streams(replicas_count=replicas_count), consumers=consumers(ack_wait_seconds))


def consumers(ack_wait_seconds: float = 1.0) -> tuple[ConsumerSpec, ...]:
    """The ender's consumers; what a killed process held comes again after `ack_wait_seconds`."""
    specs = consumers_of_process(Ender.name, Ender.consumes)
    return tuple(msgspec.structs.replace(spec, ack_wait_seconds=ack_wait_seconds) for spec in specs)


async def compose(place: ProcessContext) -> tuple[Service, Bus]:
    """The ender on the broker that the environment names."""
    nats = place.settings.nats
    bus = await NatsBus.connect(
        nats.url.split(","), name=Ender.name, declared=declared(nats.replicas_count), on_closed=place.lost.set
    )
    place.closing.push_async_callback(bus.close)
    await bus.ensure()
    return Ender(place.view), bus


if __name__ == "__main__":
    sys.exit(run_process(Ender.name, load_settings(None, os.environ), compose))
