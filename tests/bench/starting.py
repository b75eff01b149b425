"""How long a start takes until the state is up to date: over whole streams, and from a snapshot with a tail."""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar

from tests.bench.folding import history
from tests.bench.line import Line

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.store.sqlite import SqliteStore

TAIL_RATIO = 0.1  # of all facts came after the snapshot: a million with a tail of 100,000, on a smaller scale
PUBLISHED_AT_ONCE = 5_000
RATIO_MIN = 3.0  # our own aim; ten times less to read, and the state itself to decode


class Pods:
    """A service that only knows."""

    name: ClassVar[str] = "bench"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = tuple(fact for fact in FACTS if fact.domain() == "pod")
    publishes: ClassVar[tuple[type[Fact], ...]] = ()
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = None


def measure() -> list[Line]:
    """One start of each kind, on one server with file-backed streams, in one run."""
    with tempfile.TemporaryDirectory() as folder:
        facts_count, whole_seconds, resumed_seconds, save_seconds = asyncio.run(_measure(Path(folder)))
    against = f"reading all {facts_count:,} facts; the snapshot has {1 - TAIL_RATIO:.0%} of them"
    ratio = whole_seconds / resumed_seconds
    return [
        Line(case="SNAPSHOT whole", value=whole_seconds, unit="s", against="without a snapshot"),
        Line(case="SNAPSHOT resumed", value=resumed_seconds, unit="s", against="with a snapshot and its tail"),
        Line(case="SNAPSHOT keep", value=save_seconds, unit="s", against="beside the loop"),
        Line(
            case="SNAPSHOT", value=ratio, unit="x", against=against, target=f">= {RATIO_MIN}", met=ratio >= RATIO_MIN
        ),
    ]  # fmt: skip


async def _measure(folder: Path) -> tuple[int, float, float, float]:
    (folder / "nats").mkdir()
    envelopes = history()
    tail = int(len(envelopes) * TAIL_RATIO)
    async with AsyncExitStack() as closing:
        server = NatsServer(folder / "nats")
        await server.start()
        closing.push_async_callback(server.stop)
        bus = await NatsBus.connect(server.url, name="bench", declared=BusDeclaration(streams=streams()))
        closing.push_async_callback(bus.close)
        await bus.ensure()
        store = await SqliteStore.open(folder / "store.db")
        closing.push_async_callback(store.close)
        await publish_all(bus, envelopes[:-tail])
        snapshots, _ = await _start(bus, store, len(envelopes) - tail)
        began = time.perf_counter()
        await snapshots.save()
        save_seconds = time.perf_counter() - began
        await publish_all(bus, envelopes[-tail:])
        _, resumed_seconds = await _start(bus, store, len(envelopes))
        await store.delete_snapshots([row.number for row in await store.snapshots()])
        _, whole_seconds = await _start(bus, store, len(envelopes))
    return len(envelopes), whole_seconds, resumed_seconds, save_seconds


async def publish_all(bus: NatsBus, envelopes: list[Envelope]) -> None:
    """Store them in their order."""
    for start in range(0, len(envelopes), PUBLISHED_AT_ONCE):
        await bus.publish_many(
            [
                Publication(subject=envelope.fact.subject(), payload=encode(envelope), message_id=envelope.id)
                for envelope in envelopes[start : start + PUBLISHED_AT_ONCE]
            ]
        )


async def _start(bus: NatsBus, store: SqliteStore, last: int) -> tuple[Snapshots, float]:
    """Start the service and let it read up to this sequence; it is ended again. Seconds it took."""
    view, metrics, clock = StateView(), Metrics(Pods.name), Clock()
    snapshots = Snapshots(Pods, view, store, History(bus, clock), clock=clock, metrics=metrics, core_digest="bench")
    began = time.perf_counter()
    await snapshots.resume()
    runner = Runner(Pods(), bus, view=view, clock=clock, metrics=metrics)
    running = asyncio.create_task(runner.run())
    while view.last_sequence("POD") < last:
        await asyncio.sleep(0.005)
    seconds = time.perf_counter() - began
    runner.stop()
    await running
    return snapshots, seconds
