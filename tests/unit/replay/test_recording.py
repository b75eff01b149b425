"""A history travels as a file, or is read from the running system; what is missing is said."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.replay.histories_data import DAYS, history_of

from gpu_autoscaler.bus.memory import MemoryBus
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
from gpu_autoscaler.runtime.snapshot_codec import Label, StreamMark, fact_types, encode_snapshot
from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


class Wall:
    """The broker's clock: each fact is stored when it was."""

    now = BEGINNING


@pytest.fixture
def quiet() -> Recording:
    """A recorded day."""
    return load(history_of("quiet"))


@pytest.fixture
async def bus(quiet: Recording) -> AsyncIterator[MemoryBus]:
    """A broker with the day in it. Where raw samples stood in the stream of telemetry there are other messages."""
    wall = Wall()
    opened = MemoryBus(MemoryBroker(), BusDeclaration(streams=streams()), now=lambda: wall.now)
    await opened.ensure()
    for each in quiet.facts:
        wall.now = each.at
        recorded = each.recorded
        while await opened.last_sequence(recorded.stream) < recorded.sequence - 1:
            filler = await opened.last_sequence(recorded.stream)
            await opened.publish("gpu.node_sampled.none", b"", message_id=f"filler-{filler}")
        publication = Publication(
            subject=recorded.fact.subject(), payload=encode(recorded.envelope), message_id=recorded.envelope.id
        )
        await opened.publish_many([publication])
    yield opened
    await opened.close()


def test_a_history_comes_back_as_it_was(quiet: Recording, tmp_path: Path) -> None:
    """Compressed or not."""
    for name in ("a.jsonl", "a.jsonl.xz"):
        save(quiet, tmp_path / name)
        assert load(tmp_path / name) == quiet
    assert (tmp_path / "a.jsonl").stat().st_size > 5 * (tmp_path / "a.jsonl.xz").stat().st_size


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no history"),
        (b"# Readme\n", "line 1 is no head"),
        (b'{"format_version": 1}\n', "line 1 is no head"),
    ],
)
def test_what_is_no_history_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """With the line that is wrong."""
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_a_line_that_is_no_fact_is_named(quiet: Recording, tmp_path: Path) -> None:
    """Half a history would be replayed as another one."""
    path = tmp_path / "some.jsonl"
    save(quiet, path)
    path.write_bytes(path.read_bytes() + b'{"at": "2026-01-05T00:00:00Z"}\n')
    with pytest.raises(ConfigError, match=f"line {len(quiet.facts) + 2} "):
        load(path)


async def test_the_running_system_is_read_as_its_file(bus: MemoryBus, quiet: Recording) -> None:
    """Same plans, same state, same answer."""
    head = quiet.head
    read = await collect(bus, None, Clock(), head.policy, from_at=head.from_at, to_at=head.to_at)

    assert isinstance(read, Recording)
    assert len(read.facts) == len(quiet.facts)
    assert retrace(read).found == retrace(quiet).found
    assert retrace(read).plans_count == retrace(quiet).plans_count


async def test_a_later_time_begins_with_the_nearest_snapshot(bus: MemoryBus, quiet: Recording) -> None:
    """What came before need not be read, nor be there any more: from there on, it is as in the whole day."""
    head, store = quiet.head, MemoryStore(Tables())
    middle = head.from_at + timedelta(minutes=30)
    cut = await _keep_snapshot(bus, store, quiet, middle)

    read = await collect(bus, store, Clock(), head.policy, from_at=middle, to_at=head.to_at)

    assert isinstance(read, Recording)
    assert read.head.sequences == dict(cut.last_sequences)
    assert all(one.recorded.sequence > read.head.sequences[one.recorded.stream] for one in read.facts)
    found, whole = retrace(read), retrace(quiet)
    assert 0 < found.plans_count < whole.plans_count
    assert _differences(found, middle) == _differences(whole, middle)


async def test_a_time_without_plans_is_said(bus: MemoryBus, quiet: Recording) -> None:
    """And is told from one whose facts have aged out."""
    read = await collect(bus, None, Clock(), quiet.head.policy, from_at=BEGINNING, to_at=BEGINNING)

    assert isinstance(read, Missing)
    assert not read.is_aged_out


def test_each_day_has_its_files() -> None:
    """What is not there is not replayed."""
    assert set(DAYS) == {"quiet", "burst", "storm", "outage"}
    assert all(history_of(name).exists() for name in DAYS)


def _differences(walked: RetraceResult, since: datetime) -> set[tuple[str, str, str, str, datetime]]:
    """What is decided otherwise then or later, and until when; sentences would have the figures of its beginning."""
    told = [(one.difference, one.until) for one in walked.found if one.until >= since]
    return {(each.subject, each.name, each.made.reason, each.other.reason, until) for each, until in told}


async def _keep_snapshot(bus: MemoryBus, store: MemoryStore, quiet: Recording, at: datetime) -> Cut:
    """Keep the state of the last plan before this instant."""
    fact = [one for one in quiet.plans() if one.at < at][-1].recorded.fact
    last = dict(getattr(fact, "cut").last_sequences)  # noqa: B009 - a plan, as `plans` says
    folded = [one.recorded for one in quiet.facts if one.recorded.sequence <= last.get(one.recorded.stream, 0)]
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
    await store.save_snapshot(label=sealed, body=body, kept_at=at)
    return label.cut
