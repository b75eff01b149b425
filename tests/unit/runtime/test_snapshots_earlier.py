"""A snapshot that the last release saved is used by this version, which then reads no history."""

import base64
from datetime import timedelta
from pathlib import Path

import msgspec
from tests.e2e.test_upgrade_left import exported
from tests.support.memory_bus import MemoryBus
from tests.upgrade import RECORDED, unpacked
from tests.upgrade.record import About

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.digests import core_digest
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.snapshot_codec import Label, decode_label
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.scaler.service import Scaler

_AFTER = timedelta(seconds=1)


async def left(folder: Path, store: Store) -> tuple[Label, MemoryBus]:
    """The label of the last release's snapshot, and its streams with their sequences and ages."""
    label = decode_label((await store.snapshots())[0].label)
    assert isinstance(label, Label)
    marks = {mark.stream: mark for mark in label.marks}
    broker, now = MemoryBroker(), max(mark.created_at for mark in label.marks) + timedelta(hours=1)
    kept = [line for line in exported(folder).lines if line.stream in marks]
    for spec in streams():
        broker.make_stream(spec, marks[spec.name].created_at if spec.name in marks else now)
    for line in kept:
        stream, mark = broker.stream(line.stream), marks[line.stream]
        while stream.last_sequence < line.sequence - 1:  # raw samples were not recorded
            filler = f"filler-{stream.last_sequence}"
            stream.store(Publication(subject="gpu.node_sampled.n", payload=b"", message_id=filler), mark.created_at)
        payload, message_id = base64.b64decode(line.payload), line.headers["Nats-Msg-Id"]
        stream.store(Publication(subject=line.subject, payload=payload, message_id=message_id), mark.stored_at or now)
    return label, MemoryBus(broker, BusDeclaration(streams=streams()), now=lambda: now)


async def folded(history: History, *, behind: StateView | None = None) -> ClusterState:
    """The state of the whole streams, or of what follows the view."""
    state = EMPTY_STATE if behind is None else behind.state
    for stream in sorted({fact.stream() for fact in Scaler.folds}):
        facts: list[type[Fact]] = [fact for fact in Scaler.folds if fact.stream() == stream]
        after = 0 if behind is None else behind.last_sequence(stream)
        async for batch in history.read(stream, facts, after=after):
            state = fold(state, [stored.recorded for stored in batch])
    return state


async def test_this_version_continues_from_a_snapshot_of_the_last_release(tmp_path: Path) -> None:
    """Its core is another one; state and streams together are what the whole streams are."""
    folder = unpacked(tmp_path, RECORDED)
    store = await SqliteStore.open(folder / "store.db", is_migrating=True)
    label, bus = await left(folder, store)
    clock = Clock.from_text(msgspec.json.decode((folder / "about.json").read_bytes(), type=About).clock, "about.json")
    view, history, metrics = StateView(), History(bus, clock), Metrics("scaler")
    snapshots = Snapshots(Scaler, view, store, history, clock=clock, metrics=metrics, core_digest=core_digest())

    await snapshots.resume()

    assert label.core_digest != core_digest()
    assert metrics.snapshots.labels("restored")._value.get() == 1
    assert (view.cut.base, view.cut.last_sequences) == (
        label.checksum,
        tuple((mark.stream, mark.last_sequence) for mark in label.marks),
    )
    assert view.state.jobs
    states = [await folded(history, behind=view), await folded(history)]
    # GPU time and run times count from the update on: the snapshot of the last release has none.
    without = [msgspec.structs.replace(state, gpu_time={}, durations={}) for state in states]
    assert without[0] == without[1]
    await store.close()
