"""WEEK: how long each service takes until it is ready after its core was changed, over a week of history.

The streams have what seven days at 1,000 nodes with 8 GPUs each and 10,000 pods publish (`stream_load.py`), as long as
each fact is kept: a day of telemetry summaries, an hour of samples. The last snapshots know the living cluster and the
pods that are gone since six hours; the facts of a few minutes came after them.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop
from tests.bench.folding import history
from tests.bench.line import Line
from tests.bench.readiness import TAIL_COUNT, UPGRADE_SECONDS_MAX, UPGRADED, Start, again, change_core, start_service
from tests.bench.scaler_process import NODES_COUNT, Ground, cluster, envelopes, ground
from tests.bench.starting import PUBLISHED_AT_ONCE, publish_all
from tests.bench.stream_load import Flow, flows, pods_per_day
from tests.bench.stream_objects import CLOUDS

from gpu_autoscaler.bus.nats.link import Timeouts
from gpu_autoscaler.bus.nats.open import open_link
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.streams import DAY_SECONDS, STREAMS
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.retention import TOMBSTONE_HOURS
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.envelope import Envelope, Recorded, encode
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import Settings
from gpu_autoscaler.runtime.digests import core_digest
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import MemoryInput, Service
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.cost_tracker.service import CostTracker
from gpu_autoscaler_services.migration import declaration
from gpu_autoscaler_services.scaler.service import Scaler

DAYS = 7.0
_MARK = "week/00/00000000"  # the id of a copy: numbers of flow and copy


def measure() -> list[Line]:
    """Each service once, as `UPGRADE` does."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stored, starts = runner.run(_measure(Path(folder)))
    return [
        Line(
            case=f"WEEK {name}",
            value=start.seconds,
            unit="s",
            against=f"{start.folded_count:,.0f} of {stored} facts read; {start.processor_seconds:.1f} s of processor",
            target=f"<= {UPGRADE_SECONDS_MAX:g}",
            met=start.seconds <= UPGRADE_SECONDS_MAX,
        )
        for name, start in starts.items()
    ]


async def _measure(folder: Path) -> tuple[str, dict[str, Start]]:
    async with ground(folder) as here:
        await here.install()
        offers = await here.offers()
        now = datetime.now(UTC)
        for number, flow in enumerate(flows(CLOUDS[0])):
            await _publish(here, flow, number, now)
        living = envelopes(cluster(offers, now, sized=offers[0]))
        await publish_all(here.bus, living)
        await _save_snapshots(here, living, now)
        await _acknowledge_week(here)
        nodes = [one.fact for one in living if isinstance(one.fact, NodeObserved)]
        await publish_all(here.bus, again(nodes * (TAIL_COUNT // NODES_COUNT), 1, now))
        spans = [await here.bus.span(spec.name) for spec in STREAMS]
        stored_count = sum(span.last_sequence - span.first_sequence + 1 for span in spans)
        stored = f"{stored_count:,} ({sum(span.bytes_count for span in spans) / 2**30:.1f} GiB)"
        change_core(here)
        await here.install()
        starts = {f"{name} {role or ''}".rstrip(): await start_service(here, name, role) for name, role in UPGRADED}
        return stored, starts


async def _publish(here: Ground, flow: Flow, flow_number: int, now: datetime) -> None:
    """Store what the stream keeps of `DAYS`: the same few facts again and again, each with an id of its own."""
    spec = next(spec for spec in STREAMS if spec.name == flow.stream)
    kept_seconds = spec.ttl_seconds(flow.name) or spec.max_age_seconds
    count = round(flow.per_day * min(DAYS, kept_seconds / DAY_SECONDS))
    copies = _copies(flow, flow_number, count, now)
    while batch := [publication for _, publication in zip(range(PUBLISHED_AT_ONCE), copies, strict=False)]:
        await here.bus.publish_many(batch)


def _copies(flow: Flow, flow_number: int, count: int, now: datetime) -> Iterator[Publication]:
    encoded = [
        (fact.subject(), encode(Envelope(id=FactId(_MARK), source="/bench", time=now, fact=fact)))
        for fact in flow.facts
    ]
    for number in range(count):
        subject, payload = encoded[number % len(encoded)]
        message_id = f"week/{flow_number:02d}/{number:08d}"
        yield Publication(
            subject=subject, payload=payload.replace(_MARK.encode(), message_id.encode(), 1), message_id=message_id
        )


async def _acknowledge_week(here: Ground) -> None:
    """Create each service's consumer where it has handled the week, as one has that ran all the time.

    From the oldest message on, the cost tracker would confirm a million spans while it starts.
    """
    link = await open_link([here.server.url], name="bench", timeouts=Timeouts())
    try:
        for spec in declaration(Settings()).consumers:
            config = spec.config_from(await here.bus.last_sequence(spec.stream))
            body = {"stream_name": spec.stream, "action": "create", "config": config}
            await link.call(f"CONSUMER.CREATE.{spec.stream}.{spec.durable}", body)
    finally:
        await link.close()


async def _save_snapshots(here: Ground, living: list[Envelope], now: datetime) -> None:
    """Save what the scaler and the cost tracker know at the end of the week, by the runtime's own code.

    They would know the same had they read the week, which takes as long as the week's facts take to be read.
    """
    gone = [
        msgspec.structs.replace(envelope, time=now)
        for envelope in history(round(pods_per_day() * TOMBSTONE_HOURS / 24))
    ]
    recorded = [
        Recorded(envelope=envelope, stream=envelope.fact.stream(), sequence=number)
        for number, envelope in enumerate((*gone, *living), 1)
    ]
    store = await SqliteStore.open(here.folder / "store.db")
    metrics, clock = Metrics("bench"), Clock()
    try:
        # The last published span tells the cost tracker that the ledger is whole: it would read all spans otherwise.
        last = await History(here.bus, clock).last(CostAccrued)
        span = None if last is None else last.fact
        assert isinstance(span, CostAccrued), "the week has spans"
        await store.charge([span])
        tracker_view = StateView()
        tracker = CostTracker(tracker_view, store, instances_without_price=metrics.instances_without_price)
        keepers: list[tuple[type[Service], StateView, MemoryInput | None]] = [
            (Scaler, StateView(), None), (CostTracker, tracker_view, tracker),
        ]  # fmt: skip
        for service, view, memory in keepers:
            folded = [item for item in recorded if type(item.fact) in service.folds]
            snapshots = Snapshots(
                service, view, store, History(here.bus, clock), clock=clock, metrics=metrics,
                core_digest=core_digest(), memory=memory,
            )  # fmt: skip
            await snapshots.resume()
            streams = {fact.stream() for fact in service.folds}
            ends = {stream: await here.bus.last_sequence(stream) for stream in streams}
            view.restore(fold(EMPTY_STATE, folded), Cut(last_sequences=tuple(sorted(ends.items()))))
            if memory is not None:
                memory.on_folded(folded)
            await snapshots.save()
            assert await store.snapshots(service.name if memory else ""), f"{service.name} has a snapshot"
    finally:
        await store.close()
