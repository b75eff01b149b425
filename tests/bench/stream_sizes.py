"""STREAMS: bytes a day of each stream at 1,000 nodes and 10,000 pods, and how many days its declared size holds.

The facts of `stream_load.py` go through the publisher to a real server, whose streams count what a message takes.
"""

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from tests.bench.line import Line
from tests.bench.stream_load import NODES_COUNT, flows
from tests.bench.stream_objects import CLOUDS, Cloud
from tests.support.stories import T0

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import DAY_SECONDS, MEBIBYTE, STREAMS, BusDeclaration, StreamSpec, streams
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.examples import examples
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.publisher import Publisher

GIBIBYTE = 1024 * MEBIBYTE
TOTAL_BYTES_MAX = 16 * GIBIBYTE
# The plan behind an effect, which the request of a job led to.
CAUSE = Envelope(
    id=FactId(f"plan/{derive_id('plan')}"),
    source="/gpu-autoscaler/scaler/bench",
    time=T0,
    fact=next(examples()).fact,
    correlation_id=f"job_requested/job-{derive_id('job')[:12]}",
)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a fact type adds to its stream in a day."""

    stream: str
    subject: str
    message_bytes: float
    per_day: float

    @property
    def bytes_per_day(self) -> float:
        """Bytes a day."""
        return self.message_bytes * self.per_day


async def measured_on(server: NatsServer, cloud: Cloud) -> list[Load]:
    """Publish each flow on its own, on an empty server; return what its stream has grown by."""
    bus = await NatsBus.connect(server.url, name="load", declared=BusDeclaration(streams=streams()))
    await bus.ensure()
    publisher = Publisher(
        bus, Clock(), Metrics("load"), service="pod_watcher", instance="pod-watcher-7d9f8b6c5d-x7k2p", publishes=FACTS
    )
    loads = []
    for flow in flows(cloud):
        before = await bus.span(flow.stream)
        # Effects and answers carry the ids of their cause and of the first fact of the story.
        await publisher.publish(flow.facts, CAUSE if flow.stream in ("SCALING", "JOB") else None)
        after = await bus.span(flow.stream)
        stored_count = after.last_sequence - before.last_sequence
        assert stored_count, f"nothing of {flow.name} is stored"  # facts with equal ids are stored once
        size = (after.bytes_count - before.bytes_count) / stored_count
        loads.append(Load(stream=flow.stream, subject=flow.name, message_bytes=size, per_day=flow.per_day))
    await bus.close()
    return loads


def days_held(spec: StreamSpec, loads: Sequence[Load]) -> float:
    """Return how many days of these loads the stream's size holds; what expires sooner takes its share at any time."""
    expiring = sum(_kept(load, ttl) for load in loads if (ttl := spec.ttl_seconds(load.subject)) is not None)
    others = sum(load.bytes_per_day for load in loads if spec.ttl_seconds(load.subject) is None)
    return (spec.max_bytes - expiring) / others


def _kept(load: Load, seconds: int) -> float:
    return load.bytes_per_day * seconds / DAY_SECONDS


async def _on_new_server(cloud: Cloud) -> list[Load]:
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        await server.start()
        try:
            return await measured_on(server, cloud)
        finally:
            await server.stop()


def by_stream(loads: Sequence[Load]) -> Mapping[str, list[Load]]:
    """Return the loads of each stream."""
    streams_of = defaultdict[str, list[Load]](list)
    for load in loads:
        streams_of[load.stream].append(load)
    return streams_of


def measure() -> list[Line]:
    """Lines per cloud and stream, the largest facts, and the sum of all declared sizes."""
    total = sum(spec.max_bytes for spec in STREAMS)
    lines = []
    for cloud in CLOUDS:
        for stream, own in by_stream(asyncio.run(_on_new_server(cloud))).items():
            spec = next(spec for spec in STREAMS if spec.name == stream)
            promised, held = spec.max_age_seconds / DAY_SECONDS, days_held(spec, own)
            largest = sorted(own, key=lambda load: -load.bytes_per_day)[:3]
            told = ", ".join(f"{load.subject} {load.message_bytes:,.0f} B x {load.per_day:,.0f}" for load in largest)
            per_day = sum(load.bytes_per_day for load in own)
            lines.append(
                Line(
                    case=f"STREAMS {cloud.name} {stream}",
                    value=held,
                    unit="days",
                    against=f"{per_day / MEBIBYTE:,.0f} MiB a day ({told})",
                    target=f">= {promised:g}",
                    met=held >= promised,
                )
            )
    against = f"all declared sizes, {NODES_COUNT:,} nodes"
    return [
        *lines,
        Line(
            case="STREAMS total",
            value=total / GIBIBYTE,
            unit="GiB",
            against=against,
            target=f"<= {TOTAL_BYTES_MAX / GIBIBYTE:g}",
            met=total <= TOTAL_BYTES_MAX,
        ),
    ]
