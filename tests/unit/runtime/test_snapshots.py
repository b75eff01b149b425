"""A process that starts again reads what came since the last snapshot; a doubtful snapshot is not used."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import msgspec
import pytest
import structlog
from tests.support.runners import Place, Probe, running, until

from gpu_autoscaler.bus.protocol import StreamSpan
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.snapshot_codec import Label, StreamMark, decode_label, decode_snapshot, encode_snapshot
from gpu_autoscaler.runtime.snapshots import Snapshots, outdated, refused, saving_periodically
from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables
from gpu_autoscaler.store.protocol import SnapshotRow

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class Folder(Probe):
    """Folds jobs that are to be cancelled."""

    name: ClassVar[str] = "folder"
    folds: ClassVar[tuple[type[Fact], ...]] = (JobCancelRequested,)


class LaterFolder(Folder):
    """A later version, which folds one fact type more."""

    folds: ClassVar[tuple[type[Fact], ...]] = (JobCancelRequested, JobFinished)


class FullStore(MemoryStore):
    """A store that may have no room."""

    is_full = False

    async def _reached(self) -> None:
        if self.is_full:
            raise TransientError("the disk is full")


class Desk:
    """A broker and a store, and processes that come and go."""

    def __init__(self) -> None:
        self.place = Place()
        self.tables = Tables()
        self.metrics = Metrics("folder")

    async def snapshots(self, service: Folder, *, core_digest: str = "core") -> Snapshots:
        """As the wiring makes them, not resumed yet."""
        return Snapshots(
            type(service),
            service.view,
            FullStore(self.tables),
            History(await self.place.bus(Folder), Clock()),
            clock=Clock(),
            metrics=self.metrics,
            core_digest=core_digest,
        )

    async def live(
        self, *said: str, core_digest: str = "core", service_type: type[Folder] | None = None
    ) -> tuple[ClusterState, int]:
        """A process that starts, reads, hears these cancels, keeps a snapshot and ends: its state, and facts folded."""
        service = (service_type or Folder)()
        snapshots = await self.snapshots(service, core_digest=core_digest)
        await snapshots.resume()
        async with running(self.place, service) as runner:
            await until(lambda: runner.readiness.is_ready)
            for name in said:
                await self.place.say(JobCancelRequested(job_id=JobId(name)))
            last = await (await self.place.bus()).last_sequence("JOB")
            await until(lambda: service.view.last_sequence("JOB") == last)
        await snapshots.save()
        return service.view.state, int(runner.metrics.facts_folded.labels("job")._value.get())

    def change(self, *, label: tuple[bytes, bytes] | None = None, body: bytes | None = None) -> None:
        """Change the last snapshot on disk."""
        number, (row, known) = list(self.tables.snapshots.items())[-1]
        if label is not None:
            assert label[0] in row.label
            row = msgspec.structs.replace(row, label=row.label.replace(*label))
        self.tables.snapshots[number] = (row, known if body is None else body)

    def refusals(self, reason: str) -> float:
        """How often a start refused a snapshot for this reason."""
        return float(self.metrics.snapshots_refused.labels(reason)._value.get())


async def test_a_start_reads_only_what_came_since() -> None:
    """The state is that of all facts, most of which nobody read again."""
    desk = Desk()
    await desk.live(*"abcdefgh")

    state, folded_count = await desk.live("i", "j")

    assert sorted(state.jobs) == list("abcdefghij")
    assert folded_count == 2


async def test_without_a_snapshot_everything_is_read() -> None:
    """The very first start; and one whose store was lost."""
    desk = Desk()
    await desk.live("a", "b")
    desk.tables.snapshots.clear()

    state, folded_count = await desk.live("c")

    assert (sorted(state.jobs), folded_count) == (["a", "b", "c"], 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"body": b"not what was kept"}, "corrupt"),
        ({"label": (b'"set_aside":[]', b'"set_aside":[["JOB",1]]')}, "corrupt"),
        ({"label": (b'"format_version":1', b'"format_version":7')}, "format_changed"),
        ({"label": (b"job.cancel_requested.v1", b"job.queued.v1")}, "fact_types_changed"),
    ],
)
async def test_an_untrusted_snapshot_is_reported_and_not_used(change: dict[str, Any], reason: str) -> None:
    """The whole stream is read instead, and the state is equal."""
    desk = Desk()
    await desk.live("a", "b")
    desk.change(**change)

    with structlog.testing.capture_logs() as lines:
        state, folded_count = await desk.live("c")

    assert (sorted(state.jobs), folded_count) == (["a", "b", "c"], 3)
    assert [line["reason"] for line in lines if line["event"] == "snapshot refused"] == [reason]
    assert desk.refusals(reason) == 1


async def test_another_version_continues_from_a_snapshot() -> None:
    """A changed core reads no history, and its cut names the snapshot that it continues; so do the snapshots that it
    saves, until another version continues one of them."""
    desk = Desk()
    await desk.live(*"abcdefgh", core_digest="older")
    first = _last_label(desk)

    state, folded_count = await desk.live(core_digest="newer")
    assert (sorted(state.jobs), folded_count) == (list("abcdefgh"), 0)

    _, folded_count = await desk.live("i", core_digest="newer")
    assert (folded_count, _last_label(desk).base, first.base) == (1, first.checksum, "")
    state, folded_count = await desk.live("j", core_digest="newer")
    assert (folded_count, _last_label(desk).base) == (1, first.checksum)

    newer = _last_label(desk)
    await desk.live("k", core_digest="newest")
    assert _last_label(desk).base == newer.checksum
    assert desk.metrics.snapshots.labels("restored")._value.get() == 4


async def test_a_later_version_reads_the_facts_of_added_types_alone() -> None:
    """They may have been published while the earlier version ran; it could not fold them."""
    desk = Desk()
    await desk.live(*"abc", core_digest="older")
    await desk.place.say(JobFinished(job_id=JobId("a"), outcome="completed", finished_at=Clock().now()))
    await desk.live("d", core_digest="older")

    state, folded_count = await desk.live("e", core_digest="newer", service_type=LaterFolder)

    assert sorted(state.jobs) == list("abcde")
    assert (state.jobs[JobId("a")].finished is not None, folded_count) == (True, 1)
    assert _last_label(desk).base


async def test_a_fact_that_the_earlier_version_set_aside_is_folded() -> None:
    """An earlier version makes a dead letter of a type that it does not know, and its cut says so."""
    desk = Desk()
    await desk.place.say(JobFinished(job_id=JobId("a"), outcome="completed", finished_at=Clock().now()))
    service = Folder()
    snapshots = await desk.snapshots(service, core_digest="older")
    await snapshots.resume()
    service.view.advance(msgspec.structs.replace(EMPTY_STATE, last_plan_sequence=1), {"JOB": 1}, [("JOB", 1)])
    await snapshots.save()

    state, folded_count = await desk.live("b", core_digest="newer", service_type=LaterFolder)

    assert (sorted(state.jobs), folded_count) == (["a", "b"], 1)
    assert _last_label(desk).set_aside == ()
    assert await desk.place.dead_letters() == []


async def test_an_earlier_version_continues_from_a_later_one() -> None:
    """After a step back: a fact type that this version does not know was folded, which does no harm."""
    desk = Desk()
    await desk.live("a", "b", core_digest="newer")
    row, body = list(desk.tables.snapshots.values())[-1]
    label = decode_label(row.label)
    assert isinstance(label, Label)
    unknown = msgspec.structs.replace(label, fact_types=(*label.fact_types, "job.teleported.v1"), checksum="")
    state = decode_snapshot(row.label, body)
    assert isinstance(state, ClusterState)
    sealed, body = encode_snapshot(unknown, state)
    desk.tables.snapshots[row.number] = (msgspec.structs.replace(row, label=sealed), body)

    state, folded_count = await desk.live("c", core_digest="older")

    assert (sorted(state.jobs), folded_count) == (["a", "b", "c"], 1)


def _last_label(desk: Desk) -> Label:
    label = decode_label(list(desk.tables.snapshots.values())[-1][0].label)
    assert isinstance(label, Label)
    return label


async def test_an_older_snapshot_is_better_than_none() -> None:
    """Of the newest is one broken, the one before it still saves most of the reading."""
    desk = Desk()
    await desk.live("a", "b", "c")
    await desk.live("d")
    desk.change(body=b"torn")

    state, folded_count = await desk.live("e")

    assert (sorted(state.jobs), folded_count) == (["a", "b", "c", "d", "e"], 2)


async def test_a_recreated_stream_is_a_different_stream() -> None:
    """Also when it has come further than the snapshot by now: no job of the old one lives on."""
    desk = Desk()
    await desk.live("a", "b")
    desk.place = Place()
    for name in "vwxyz":
        await desk.place.say(JobCancelRequested(job_id=JobId(name)))

    state, _ = await desk.live()

    assert sorted(state.jobs) == list("vwxyz")
    assert desk.refusals("stream_changed") == 1


async def test_a_broker_that_lost_its_last_messages_is_found_out() -> None:
    """It gave their numbers to others: the count agrees, the message is another one."""
    desk = Desk()
    await desk.live("a", "b")
    stream = desk.place.broker.streams["JOB"]
    lost = await (await desk.place.bus()).message_at("JOB", 2)
    assert lost is not None
    stream._drop(2)
    stream.last_sequence = 1
    desk.place.passed = timedelta(minutes=10)
    await desk.place.say(JobCancelRequested(job_id=JobId("x")))

    state, _ = await desk.live()

    assert sorted(state.jobs) == ["a", "x"]
    assert desk.refusals("stream_changed") == 1


SPAN = StreamSpan(created_at=NOON, first_sequence=5, last_sequence=20)
MARK = StreamMark(stream="JOB", created_at=NOON, last_sequence=10)


@pytest.mark.parametrize(
    ("mark", "span", "reason"),
    [
        ({}, {}, None),
        ({"last_sequence": 20}, {}, None),
        ({"last_sequence": 21}, {}, "ahead"),
        ({"last_sequence": 4}, {}, None),  # 5 is the next one
        ({"last_sequence": 3}, {}, "gap"),
        ({"last_sequence": 20}, {"first_sequence": 21}, None),  # all of it has aged out, and all of it is known
        ({"last_sequence": 0}, {"first_sequence": 1, "last_sequence": 0}, None),
        ({"created_at": NOON - timedelta(seconds=1)}, {}, "stream_changed"),
        ({"stream": "POD"}, {}, "corrupt"),
    ],
)
def test_the_stream_must_go_on_where_the_snapshot_ends(
    mark: dict[str, Any], span: dict[str, Any], reason: str | None
) -> None:
    """Neither before it, nor after a gap; and it must be the very stream."""
    label = Label(
        core_digest="core", fact_types=(JobCancelRequested.type_name(),), marks=(msgspec.structs.replace(MARK, **mark),)
    )

    refusal = refused(label, (JobCancelRequested,), {"JOB": msgspec.structs.replace(SPAN, **span)})

    assert (None if refusal is None else refusal.reason) == reason


async def test_nothing_new_is_not_kept_again() -> None:
    """Neither an empty state, nor the one that the process started with."""
    desk = Desk()
    await desk.live()
    assert desk.tables.snapshots_count == 0
    await desk.live("a")
    await desk.live()
    assert desk.tables.snapshots_count == 1


async def test_one_thread_encodes_every_snapshot() -> None:
    """Each thread that ever encoded one would keep memory for a whole state: five times 20 MiB at 1,000 nodes."""
    desk, service = Desk(), Folder()
    snapshots = await desk.snapshots(service)
    before = set(threading.enumerate())
    for number in range(4):
        service.view.advance(ClusterState(last_plan_sequence=number + 1), {})
        await snapshots.save()

    assert desk.tables.snapshots_count == 4
    encoding = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("snapshot")]
    assert len(encoding) == 1


async def test_a_full_store_costs_a_snapshot_and_no_more() -> None:
    """The failure is logged and counted; the next snapshot is saved."""
    desk, service = Desk(), Folder()
    store = FullStore(desk.tables)
    streams = History(await desk.place.bus(Folder), Clock())
    snapshots = Snapshots(Folder, service.view, store, streams, clock=Clock(), metrics=desk.metrics, core_digest="core")
    await snapshots.resume()
    async with running(desk.place, service):
        await desk.place.say(JobCancelRequested(job_id=JobId("a")))
        await until(lambda: service.view.last_sequence("JOB") == 1)
        store.is_full = True
        await snapshots.save()
        assert desk.metrics.snapshots.labels("not_saved")._value.get() == 1
        store.is_full = False
        await snapshots.save()
        assert desk.metrics.snapshots.labels("saved")._value.get() == 1


async def test_snapshots_are_kept_while_a_process_runs_and_when_it_ends() -> None:
    """Changes are saved periodically, and the final state at a clean exit."""
    desk, service = Desk(), Folder()
    snapshots = await desk.snapshots(service)
    await snapshots.resume()
    async with saving_periodically(snapshots, 0.05), running(desk.place, service):
        await desk.place.say(JobCancelRequested(job_id=JobId("a")))
        await until(lambda: desk.tables.snapshots_count == 1)
        await asyncio.sleep(0.2)
        assert desk.tables.snapshots_count == 1
    async with saving_periodically(snapshots, 3600), running(desk.place, service):
        await desk.place.say(JobCancelRequested(job_id=JobId("b")))
        await until(lambda: service.view.last_sequence("JOB") == 2)
    assert desk.tables.snapshots_count == 2


async def test_a_bug_in_saving_is_logged_and_affects_nothing_else() -> None:
    """Logged with its traceback each time; the process continues."""

    class Broken(Snapshots):
        async def save(self) -> None:
            raise KeyError("what the author forgot")

    desk, service = Desk(), Folder()
    broken = Broken(
        Folder,
        service.view,
        MemoryStore(desk.tables),
        History(await desk.place.bus(Folder), Clock()),
        clock=Clock(),
        metrics=desk.metrics,
        core_digest="core",
    )

    async def end() -> None:
        async with saving_periodically(broken, 0.02):
            await until(lambda: len(lines) >= 2)
            raise RuntimeError("its own reason")

    with structlog.testing.capture_logs() as lines, pytest.raises(RuntimeError, match="its own reason"):
        await end()
    assert {line["event"].partition(",")[0] for line in lines} == {"snapshot failed"}


@pytest.mark.parametrize(("minutes", "last_sequence"), [(0, 2), (5, 1), (60, 2)])
async def test_a_service_may_start_from_an_older_snapshot(minutes: int, last_sequence: int) -> None:
    """One that must see the facts of the last minutes; the newest if none is that old."""
    desk = Desk()
    await desk.live("a")
    await desk.live("b")
    first, body = desk.tables.snapshots[1]
    desk.tables.snapshots[1] = (msgspec.structs.replace(first, saved_at=first.saved_at - timedelta(minutes=10)), body)
    service = Folder()
    snapshots = await desk.snapshots(service)
    snapshots.age_min = timedelta(minutes=minutes)

    await snapshots.resume()

    assert service.view.last_sequence("JOB") == last_sequence


async def test_a_message_set_aside_just_before_still_gets_its_letter() -> None:
    """The process that came upon it died before the dead letter was stored; its snapshot is past the message."""
    desk = Desk()
    await desk.place.send(JobCancelRequested.subject_root(), b"no json", "broken")
    service = Folder()
    snapshots = await desk.snapshots(service)
    await snapshots.resume()
    service.view.advance(msgspec.structs.replace(EMPTY_STATE, last_plan_sequence=1), {"JOB": 1}, [("JOB", 1)])
    await snapshots.save()
    assert await desk.place.dead_letters() == []

    await desk.live()

    await until(_has_letters(desk))
    assert service.view.cut.set_aside == (("JOB", 1),)


def _has_letters(desk: Desk) -> Any:  # noqa: ANN401 - an async condition
    async def look() -> bool:
        return len(await desk.place.dead_letters()) == 1

    return look


def test_a_service_that_sees_every_fact_cannot_start_from_a_snapshot() -> None:
    """Its memory would lack what the snapshot was folded from, unless it needs only the last fact of some types."""

    class Rememberer(Folder):
        def on_folded(self, recorded: object) -> None: ...

    with pytest.raises(AssertionError):
        Snapshots(Rememberer, None, None, None, clock=None, metrics=None, core_digest="")  # type: ignore[arg-type]

    class LastRememberer(Rememberer):
        remembers: ClassVar[tuple[type[Fact], ...]] = (JobCancelRequested,)

    Snapshots(LastRememberer, None, None, None, clock=None, metrics=None, core_digest="")  # type: ignore[arg-type]


def _kept(*minutes_ago: int) -> list[SnapshotRow]:
    rows = [SnapshotRow(number=-each, saved_at=NOON - timedelta(minutes=each), label=b"") for each in minutes_ago]
    return sorted(rows, key=lambda row: row.number, reverse=True)


def test_old_snapshots_thin_out() -> None:
    """All of the last hour, the first of each hour of a week, none that is older."""
    rows = _kept(0, 3, 59, 61, 90, 119, 121, 10_000, 10_081)

    assert [-number for number in outdated(rows, NOON)] == [61, 90, 10_081]


def test_what_another_version_continued_is_kept() -> None:
    """Plans are recomputed from it until that version has saved one of its own; for as long as snapshots are kept."""
    first = _sealed(StreamMark(stream="JOB", created_at=NOON, last_sequence=1))
    second = _sealed(StreamMark(stream="JOB", created_at=NOON, last_sequence=2), base=_label_of(first).checksum)
    third = _sealed(StreamMark(stream="JOB", created_at=NOON, last_sequence=3), base=_label_of(second).checksum)
    labels = {0: third, -61: second, -70: first}
    rows = [msgspec.structs.replace(row, label=labels.get(row.number, b"")) for row in _kept(0, 61, 70, 80, 90)]

    assert [-number for number in outdated(rows, NOON)] == [80]
    assert [-number for number in outdated(rows, NOON, timedelta(minutes=65))] == [70, 80, 90]


def _sealed(mark: StreamMark, base: str = "") -> bytes:
    return encode_snapshot(Label(core_digest="core", fact_types=(), marks=(mark,), base=base), EMPTY_STATE)[0]


def _label_of(sealed: bytes) -> Label:
    label = decode_label(sealed)
    assert isinstance(label, Label)
    return label


def test_a_week_of_snapshots_has_its_limit() -> None:
    """Thinned out whenever one is kept, a week at one every three minutes leaves fewer than two hundred."""
    rows: list[SnapshotRow] = []
    for number in range(8 * 24 * 20):
        now = NOON + timedelta(minutes=3 * number)
        rows.insert(0, SnapshotRow(number=number, saved_at=now, label=b""))
        gone = set(outdated(rows, now))
        rows = [row for row in rows if row.number not in gone]

    assert 180 <= len(rows) <= 195
    assert {row.saved_at.minute for row in rows[22:]} == {0}


async def test_a_snapshot_of_other_streams_is_a_seed_and_no_state() -> None:
    """The streams were recreated: the state is not resumed, but its contents are available."""
    desk = Desk()
    state, _ = await desk.live("a", "b")
    desk.place = Place()
    desk.place.passed = timedelta(seconds=5)
    service = Folder()
    snapshots = await desk.snapshots(service)
    await snapshots.resume()
    assert service.view.state is EMPTY_STATE
    assert snapshots.lost_state == state != EMPTY_STATE
