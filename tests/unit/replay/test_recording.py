"""A history is a file or is read from the running system; missing facts are reported."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.replay.histories_data import DAYS, history_of
from tests.support.memory_bus import MemoryBus

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.events.envelope import encode
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.replay.recompute import folded_facts
from gpu_autoscaler.replay.recording import STREAMS, Missing, Recording, collect, load, save
from gpu_autoscaler.replay.retrace import RetraceResult, retrace
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.snapshot_codec import Label, StreamMark, encode_snapshot, fact_types
from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


class Wall:
    """The broker's clock: each fact is stored at its recorded time."""

    now = BEGINNING


@pytest.fixture
def quiet() -> Recording:
    """A recorded day."""
    return load(history_of("quiet"))


@pytest.fixture
async def bus(quiet: Recording) -> AsyncIterator[MemoryBus]:
    """A broker with the history in it. Filler messages replace raw telemetry samples."""
    wall = Wall()
    opened = MemoryBus(MemoryBroker(), BusDeclaration(streams=streams()), now=lambda: wall.now)
    await opened.ensure()
    for stored in quiet.facts:
        wall.now = stored.at
        recorded = stored.recorded
        while await opened.last_sequence(recorded.stream) < recorded.sequence - 1:
            filler = await opened.last_sequence(recorded.stream)
            await opened.publish("gpu.node_sampled.none", b"", message_id=f"filler-{filler}")
        publication = Publication(
            subject=recorded.fact.subject(), payload=encode(recorded.envelope), message_id=recorded.envelope.id
        )
        await opened.publish_many([publication])
    yield opened
    await opened.close()


def test_a_saved_history_loads_unchanged(quiet: Recording, tmp_path: Path) -> None:
    """Compressed or not."""
    for name in ("a.jsonl", "a.jsonl.xz"):
        save(quiet, tmp_path / name)
        assert load(tmp_path / name) == quiet
    assert (tmp_path / "a.jsonl").stat().st_size > 5 * (tmp_path / "a.jsonl.xz").stat().st_size


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (b"", "is not a history"),
        (b"# Readme\n", "line 1 is not the head"),
        (b'{"format_version": 1}\n', "line 1 is not the head"),
    ],
)
def test_an_invalid_history_is_refused(tmp_path: Path, content: bytes, phrase: str) -> None:
    """The error names the invalid line."""
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=phrase):
        load(path)


def test_an_invalid_line_is_named(quiet: Recording, tmp_path: Path) -> None:
    """A truncated history would replay as a different one."""
    path = tmp_path / "some.jsonl"
    save(quiet, path)
    path.write_bytes(path.read_bytes() + b'{"at": "2026-01-05T00:00:00Z"}\n')
    with pytest.raises(ConfigError, match=f"line {len(quiet.facts) + 2} "):
        load(path)


async def test_the_running_system_is_read_like_a_file(bus: MemoryBus, quiet: Recording) -> None:
    """Same plans, same state, same differences."""
    head = quiet.head
    read = await collect(bus, None, Clock(), head.policy, from_at=head.from_at, to_at=head.to_at)

    assert isinstance(read, Recording)
    assert len(read.facts) == len(quiet.facts)
    assert retrace(read).deviations == retrace(quiet).deviations
    assert retrace(read).plans_count == retrace(quiet).plans_count


async def test_a_later_interval_starts_at_the_nearest_snapshot(bus: MemoryBus, quiet: Recording) -> None:
    """Earlier facts are not read and may have expired; the differences equal those of the whole history."""
    head, store = quiet.head, MemoryStore(Tables())
    middle = head.from_at + timedelta(minutes=30)
    cut = await _keep_snapshot(bus, store, quiet, middle)

    read = await collect(bus, store, Clock(), head.policy, from_at=middle, to_at=head.to_at)

    assert isinstance(read, Recording)
    assert read.head.sequences == dict(cut.last_sequences)
    assert all(stored.recorded.sequence > read.head.sequences[stored.recorded.stream] for stored in read.facts)
    found, whole = retrace(read), retrace(quiet)
    assert 0 < found.plans_count < whole.plans_count
    first = read.plans()[0].at  # what differed only at ticks before it is not seen from here
    assert _differences(found, first) == _differences(whole, first)


async def test_an_interval_without_plans_is_reported(bus: MemoryBus, quiet: Recording) -> None:
    """It is distinguished from expired facts."""
    read = await collect(bus, None, Clock(), quiet.head.policy, from_at=BEGINNING, to_at=BEGINNING)

    assert isinstance(read, Missing)
    assert not read.is_expired


def test_each_day_has_its_history() -> None:
    """All kinds of day are recorded."""
    assert set(DAYS) == {"quiet", "burst", "storm", "outage"}
    assert all(history_of(name).exists() for name in DAYS)


def _differences(result: RetraceResult, since: datetime) -> set[tuple[str, str, str, str, datetime]]:
    """Return the differences since then with their end, without sentences, whose figures depend on the start."""
    return {
        (
            found.difference.subject,
            found.difference.name,
            found.difference.made.reason,
            found.difference.other.reason,
            found.until,
        )
        for found in result.deviations
        if found.until >= since
    }


async def _keep_snapshot(bus: MemoryBus, store: MemoryStore, quiet: Recording, at: datetime) -> Cut:
    """Save the state of the last plan before this instant as a snapshot."""
    fact = [stored for stored in quiet.plans() if stored.at < at][-1].recorded.fact
    last = dict(getattr(fact, "cut").last_sequences)  # noqa: B009 - a plan, as `plans` says
    folded = [
        stored.recorded for stored in quiet.facts if stored.recorded.sequence <= last.get(stored.recorded.stream, 0)
    ]
    marks = []
    for stream in STREAMS:
        message = await bus.message_at(stream, last.get(stream, 0)) if last.get(stream) else None
        marks.append(
            StreamMark(
                stream=stream,
                created_at=(await bus.span(stream)).created_at,
                last_sequence=last.get(stream, 0),
                stored_at=None if message is None else message.stored_at,
            )
        )
    label = Label(
        core_digest="another core",
        fact_types=fact_types([fact for stream in STREAMS for fact in folded_facts(stream)]),
        marks=tuple(marks),
    )
    sealed, body = encode_snapshot(label, fold(quiet.head.state, folded))
    await store.save_snapshot(label=sealed, body=body, saved_at=at)
    return label.cut
