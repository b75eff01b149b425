"""Snapshots of the folded state: one process saves them; every service that folds starts from the latest.
A service with a memory of its own (`MemoryInput`) saves and reads its own snapshots.

A snapshot is used only if the streams continue exactly where it ends. Otherwise it is refused with a reason, which is
logged and counted, and the whole streams are read. One that another version saved is used, too: cut and later snapshots
name it as their base, so that plans can be recomputed from it. Of fact types that this version has added, the facts up
to the snapshot are read and folded.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Protocol

import structlog

from gpu_autoscaler.bus.protocol import Message, StreamSpan
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.retry import pause
from gpu_autoscaler.runtime.service import FoldInput, MemoryInput, Service
from gpu_autoscaler.runtime.snapshot_codec import (
    Label,
    Refusal,
    StreamMark,
    decode_label,
    decode_memory,
    decode_snapshot,
    encode_snapshot,
    fact_types,
    restrict_to_streams,
)
from gpu_autoscaler.store.protocol import SnapshotRow, Store

log = structlog.get_logger()

TRIED_COUNT_MAX = 3  # of the newest; if these are unusable, older ones rarely help
SAVE_SECONDS_MAX = 5.0  # wall time; a stopping process does not wait longer for its last snapshot
# All snapshots of the last hour are kept, then one per hour: recomputing an older plan folds at most an hour of facts.
DENSE_AGE = timedelta(hours=1)
AGE_MAX = timedelta(days=7)
ROWS_COUNT_MAX = 500
_LOST_STREAM_REASONS = frozenset({"stream_changed", "ahead", "gap"})
_KNOWN_TYPES = frozenset(fact.type_name() for fact in FACTS)


class Streams(Protocol):
    """What snapshots need of the streams."""

    async def span(self, stream: str) -> StreamSpan:
        """See Bus."""

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        """See Bus."""

    async def facts(self, stream: str, facts: Sequence[type[Fact]], last: int) -> list[Recorded]:
        """Return the stored facts of these types up to this sequence."""


class Snapshots:
    """Snapshots for one service in one process: the state in `view`, as of the streams."""

    def __init__(
        self,
        service: type[Service],
        view: StateView,
        store: Store,
        streams: Streams,
        *,
        clock: Clock,
        metrics: Metrics,
        core_digest: str,
        memory: MemoryInput | None = None,
    ) -> None:
        """`memory`: the service itself, if it has snapshots of its own, which contain its memory."""
        is_aware = memory or hasattr(service, "remembers") or not issubclass(service, FoldInput)
        assert is_aware, f"{service.name} must see every fact"  # noqa: S101
        self._service = service
        self._memory = memory
        self.age_max = AGE_MAX  # of the snapshots that are kept
        self.age_min = timedelta()  # of the one that is used, if one is that old: later facts are folded one by one
        self._keeper = service.name if memory else ""
        self._view = view
        self._store = store
        self._streams = streams
        self._clock = clock
        self._metrics = metrics
        self._core_digest = core_digest
        # A thread of its own: each of the pool's threads would keep the memory of an encoded state for its next call.
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._spans: dict[str, StreamSpan] = {}  # at the start: the streams that are folded
        self._saved: ClusterState = EMPTY_STATE
        self.lost_state = EMPTY_STATE  # after `resume`: the last state that was saved from streams that are lost

    async def resume(self) -> None:
        """Put the latest usable state into the view before anything is folded; without one the view stays empty.

        A state of streams that were lost since becomes `lost_state`: it is no state of the current streams, but holds
        data that the store of record does not have.

        Raises TransientError while store or broker are away.
        """
        streams = sorted({fact.stream() for fact in self._service.folds})
        self._spans = {stream: await self._streams.span(stream) for stream in streams}
        rows = await self._store.snapshots(self._keeper)
        if self.age_min:
            saved_max = self._clock.wall_now() - self.age_min
            rows = sorted(rows, key=lambda row: row.saved_at > saved_max)
        rows = rows[:TRIED_COUNT_MAX]
        if self._memory is not None:
            await self._restore_memory(self._memory, rows)
        for row in rows:
            usable = await self._usable(row)
            if isinstance(usable, Refusal):
                log.warning(
                    "snapshot refused",
                    snapshot=row.number, saved_at=row.saved_at.isoformat(), reason=usable.reason, error=usable.detail,
                )  # fmt: skip
                self._metrics.snapshots_refused.labels(usable.reason).inc()
                if usable.reason in _LOST_STREAM_REASONS and self.lost_state is EMPTY_STATE:
                    self.lost_state = await self._lost_state(row)
                continue
            self._saved, cut = usable
            self.lost_state = EMPTY_STATE
            self._view.restore(self._saved, cut)
            self._metrics.snapshots.labels("restored").inc()
            log.info(
                "state restored from snapshot", snapshot=row.number, cut=dict(cut.last_sequences), base=cut.base or None
            )
            return
        log.info("no snapshot used, whole streams are read")

    async def _restore_memory(self, memory: MemoryInput, rows: Sequence[SnapshotRow]) -> None:
        """Restore the latest readable memory. It is valid with a state that is refused, too: what it has seen happened,
        and facts that are folded again change nothing in it."""
        for row in rows:
            body = await self._store.snapshot_body(row.number)
            if (
                body
                and not isinstance(decode_label(row.label), Refusal)
                and (encoded := decode_memory(row.label, body))
            ):
                memory.restore_memory(encoded)
                return

    async def _usable(self, row: SnapshotRow) -> tuple[ClusterState, Cut] | Refusal:
        label = decode_label(row.label)
        if isinstance(label, Refusal):
            return label
        refusal = refused(label, self._service.folds, self._spans)
        if refusal is not None:
            return refusal
        marks = tuple(mark for mark in label.marks if mark.stream in self._spans)
        if (refusal := await rewritten(self._streams, marks)) is not None:
            return refusal
        state = await state_of(self._store, row)
        if isinstance(state, Refusal):
            return state
        missed = await added_facts(self._streams, label, self._service.folds)
        if missed and self._memory is not None:
            self._memory.on_folded(missed)
        folded = frozenset((item.stream, item.sequence) for item in missed)
        cut = Cut(
            last_sequences=tuple((mark.stream, mark.last_sequence) for mark in marks),
            set_aside=tuple(entry for entry in label.set_aside if entry[0] in self._spans and entry not in folded),
            base=label.base if label.core_digest == self._core_digest and not missed else label.checksum,
        )
        return fold(restrict_to_streams(state, self._spans), missed), cut

    async def _lost_state(self, row: SnapshotRow) -> ClusterState:
        label = decode_label(row.label)
        state = label if isinstance(label, Refusal) else await state_of(self._store, row)
        return EMPTY_STATE if isinstance(state, Refusal) else restrict_to_streams(state, self._spans)

    async def save(self) -> None:
        """Save the current state, unless it is the one saved last, and delete outdated snapshots.

        Never raises for a store or broker that is away: the failure is logged and counted.
        """
        state, cut = self._view.state, self._view.cut
        if state is self._saved:
            return
        memory = b"" if self._memory is None else self._memory.encode_memory()
        try:
            async with asyncio.timeout(SAVE_SECONDS_MAX):
                label = await self._label(cut)
                loop = asyncio.get_running_loop()
                encoded, body = await loop.run_in_executor(self._encoding, encode_snapshot, label, state, memory)
                now = self._clock.wall_now()
                await self._store.save_snapshot(label=encoded, body=body, saved_at=now, service=self._keeper)
                kept = await self._store.snapshots(self._keeper)
                old = (
                    [row.number for row in kept[TRIED_COUNT_MAX:]]
                    if self._keeper
                    else outdated(kept, now, self.age_max)
                )
                await self._store.delete_snapshots(old)
        except (TransientError, PermanentError, TimeoutError) as exc:
            self._metrics.snapshots.labels("not_saved").inc()
            log.warning("snapshot failed, starts take longer until one is saved", error=str(exc) or repr(exc))
            return
        self._saved = state
        self._metrics.snapshots.labels("saved").inc()
        log.debug("snapshot saved", body_bytes=len(body), cut=dict(cut.last_sequences))

    async def _label(self, cut: Cut) -> Label:
        last = dict(cut.last_sequences)
        marks = []
        for stream, span in self._spans.items():
            message = await self._streams.message_at(stream, last[stream]) if last.get(stream) else None
            mark = StreamMark(
                stream=stream,
                created_at=span.created_at,
                last_sequence=last.get(stream, 0),
                stored_at=None if message is None else message.stored_at,
            )
            marks.append(mark)
        return Label(
            core_digest=self._core_digest,
            fact_types=fact_types(self._service.folds),
            marks=tuple(marks),
            set_aside=cut.set_aside,
            base=cut.base,
        )


@asynccontextmanager
async def saving_periodically(snapshots: Snapshots, every_seconds: float) -> AsyncIterator[None]:
    """Save a snapshot every `every_seconds` of wall time during the block, and a last one at its end.

    Used in one process only: the others read.
    """
    stop = asyncio.Event()

    async def save() -> None:
        try:
            await snapshots.save()
        except Exception:
            # A bug may cost a snapshot, but neither the decisions nor the reason why the process ends.
            log.exception("snapshot failed, starts take longer until one is saved")

    async def save_repeatedly() -> None:
        while not await pause(stop, every_seconds):
            await save()

    task = asyncio.create_task(save_repeatedly())
    try:
        yield
    finally:
        stop.set()
        await task
        await save()


def refused(label: Label, folds: Sequence[type[Fact]], spans: Mapping[str, StreamSpan]) -> Refusal | None:
    """Return why folding cannot continue from this label on these streams; None: it can.

    Fact types may have been added since (`added_facts`), and a later version may have folded types unknown to this one.
    """
    streams = {name: _stream_of(name) for name in label.fact_types}
    foreign = {name for name, stream in streams.items() if stream in spans and name in _KNOWN_TYPES}
    if different := foreign.difference(fact_types(folds)):
        return Refusal(
            reason="fact_types_changed",
            detail=f"the snapshot has {', '.join(sorted(different))}, which the service does not fold",
        )
    marks = {mark.stream: mark for mark in label.marks}
    for stream, span in spans.items():
        if stream in marks or stream in streams.values():
            refusal = _refused_by(stream, marks.get(stream), span)
            if refusal is not None:
                return refusal
    return None


async def added_facts(streams: Streams, label: Label, folds: Sequence[type[Fact]]) -> list[Recorded]:
    """Return the facts up to the marks of the label whose types its writer did not fold. Raises TransientError."""
    known = frozenset(label.fact_types)
    added = [fact for fact in folds if fact.type_name() not in known]
    missed: list[Recorded] = []
    for mark in label.marks:
        if of_stream := [fact for fact in added if fact.stream() == mark.stream]:
            missed += await streams.facts(mark.stream, of_stream, mark.last_sequence)
    return missed


def _stream_of(type_name: str) -> str:
    return type_name.partition(".")[0].upper()


def _refused_by(stream: str, mark: StreamMark | None, span: StreamSpan) -> Refusal | None:
    if mark is None:
        return Refusal(reason="corrupt", detail=f"no mark of stream {stream}")
    if mark.created_at != span.created_at:
        detail = f"stream {stream} was created at {span.created_at.isoformat()}, not at {mark.created_at.isoformat()}"
        return Refusal(reason="stream_changed", detail=detail)
    if mark.last_sequence > span.last_sequence:
        detail = f"stream {stream} ends at {span.last_sequence}, before {mark.last_sequence} of the snapshot"
        return Refusal(reason="ahead", detail=detail)
    if span.first_sequence > mark.last_sequence + 1:
        detail = f"stream {stream} starts at {span.first_sequence}, after {mark.last_sequence} of the snapshot"
        return Refusal(reason="gap", detail=detail)
    return None


async def rewritten(streams: Streams, marks: Sequence[StreamMark]) -> Refusal | None:
    """Return a refusal when the last message of a mark was replaced; None: all are the same or have aged out."""
    for mark in marks:
        if mark.stored_at is None:
            continue
        message = await streams.message_at(mark.stream, mark.last_sequence)
        if message is not None and message.stored_at != mark.stored_at:
            detail = f"{mark.stream} #{mark.last_sequence} was replaced by another message"
            return Refusal(reason="stream_changed", detail=detail)
    return None


async def state_of(store: Store, row: SnapshotRow) -> ClusterState | Refusal:
    """Return the saved state, decoded in a thread. Raises TransientError."""
    body = await store.snapshot_body(row.number)
    if body is None:
        return Refusal(reason="corrupt", detail="body missing")
    return await asyncio.to_thread(decode_snapshot, row.label, body)


def outdated(rows: Sequence[SnapshotRow], now: datetime, age_max: timedelta = AGE_MAX) -> list[int]:
    """Return the numbers of snapshots to delete; `rows` are newest first. The first of each hour is kept for days, and
    what a kept one continues."""
    kept: set[int] = set()
    first_of_hour: dict[datetime, int] = {}
    for row in rows:
        age = now - row.saved_at
        if age < DENSE_AGE:
            kept.add(row.number)
        elif age < age_max:
            first_of_hour[row.saved_at.replace(minute=0, second=0, microsecond=0)] = row.number
    kept.update(first_of_hour.values())
    kept = set(sorted(kept, reverse=True)[:ROWS_COUNT_MAX])
    bases: set[str] = set()
    for row in rows:  # a base is older than what continues it
        label = decode_label(row.label)
        if isinstance(label, Refusal):
            continue
        if label.checksum in bases and now - row.saved_at < age_max:
            kept.add(row.number)
        if row.number in kept:
            bases.add(label.base)
    return [row.number for row in rows if row.number not in kept]
