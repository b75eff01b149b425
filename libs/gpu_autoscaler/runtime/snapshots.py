"""Snapshots of the folded state: one process writes them, every process whose service says so starts from the last.

A snapshot never knows more than the streams did. It is used only where the streams go on exactly where it ends; else
it is refused with a reason, told and counted, and the whole streams are read as if there were none.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Protocol

import structlog

from gpu_autoscaler.bus.protocol import Message, StreamSpan
from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.retry import pause
from gpu_autoscaler.runtime.service import FoldInput, Service
from gpu_autoscaler.runtime.snapshot_codec import (
    Label,
    Refusal,
    StreamMark,
    fact_types,
    part_of,
    decode_label,
    seal,
    decode_snapshot,
)
from gpu_autoscaler.store.protocol import SnapshotRow, Store

log = structlog.get_logger()

TRIED_COUNT_MAX = 3  # of the newest; where these are of no use, older ones rarely are
KEEP_SECONDS_MAX = 5.0  # wall time; a process that stops does not wait longer for its last snapshot
# All of the last hour are kept, then one an hour: a plan of last week is recomputed from an hour of facts at most.
DENSE_AGE = timedelta(hours=1)
AGE_MAX = timedelta(days=7)
ROWS_COUNT_MAX = 500
_OF_OTHER_STREAMS = frozenset({"stream_changed", "ahead", "gap"})


class Streams(Protocol):
    """What is asked of a bus."""

    async def span(self, stream: str) -> StreamSpan:
        """See Bus."""
        ...

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        """See Bus."""
        ...


class Snapshots:
    """Snapshots for one service in one process: the state in `view`, as of the streams on `bus`."""

    def __init__(
        self,
        service: type[Service],
        view: StateView,
        store: Store,
        bus: Streams,
        *,
        clock: Clock,
        metrics: Metrics,
        core_digest: str,
    ) -> None:
        assert getattr(service, "starts_from_snapshot", False), f"{service.name} reads from the beginning"  # noqa: S101
        assert not issubclass(service, FoldInput), f"{service.name} wants to see every fact"  # noqa: S101
        self._service = service
        self._view = view
        self._store = store
        self._bus = bus
        self._clock = clock
        self._metrics = metrics
        self._core_digest = core_digest
        self._spans: dict[str, StreamSpan] = {}  # as they were at the start: what is folded is folded from these
        self._kept: ClusterState = EMPTY_STATE
        self.seed = EMPTY_STATE  # after `resume`: the last state that was kept of other streams than these

    async def resume(self) -> None:
        """Put the latest state that can be used into the view, before anything is folded; else leave it empty.

        Where the streams are others than those that it was folded from, it is the `seed`: no state of these streams,
        but a word about what the store of record does not have.

        Raises TransientError while store or broker are away.
        """
        streams = sorted({fact.stream() for fact in self._service.folds})
        self._spans = {stream: await self._bus.span(stream) for stream in streams}
        for row in (await self._store.snapshots())[:TRIED_COUNT_MAX]:
            found = await self._usable(row)
            if isinstance(found, Refusal):
                log.warning(
                    "snapshot not used; an older one or the whole streams are",
                    snapshot=row.number, kept_at=row.kept_at.isoformat(), reason=found.reason, error=found.detail,
                )  # fmt: skip
                self._metrics.snapshots_refused.labels(found.reason).inc()
                if found.reason in _OF_OTHER_STREAMS and self.seed is EMPTY_STATE:
                    self.seed = await self._seed(row)
                continue
            self._kept, cut = found
            self.seed = EMPTY_STATE
            self._view.advance(self._kept, dict(cut.last_sequences), cut.set_aside)
            self._metrics.snapshots.labels("used").inc()
            log.info("started from a snapshot", snapshot=row.number, cut=dict(cut.last_sequences))
            return
        log.info("started without a snapshot; reading whole streams")

    async def _usable(self, row: SnapshotRow) -> tuple[ClusterState, Cut] | Refusal:
        label = decode_label(row.label)
        if isinstance(label, Refusal):
            return label
        refusal = refused(label, self._core_digest, self._service.folds, self._spans)
        if refusal is not None:
            return refusal
        marks = tuple(mark for mark in label.marks if mark.stream in self._spans)
        if (refusal := await rewritten(self._bus, marks)) is not None:
            return refusal
        state = await state_of(self._store, row, label)
        if isinstance(state, Refusal):
            return state
        cut = Cut(
            last_sequences=tuple((mark.stream, mark.last_sequence) for mark in marks),
            set_aside=tuple(entry for entry in label.set_aside if entry[0] in self._spans),
        )
        return part_of(state, self._spans), cut

    async def _seed(self, row: SnapshotRow) -> ClusterState:
        label = decode_label(row.label)
        state = label if isinstance(label, Refusal) else await state_of(self._store, row, label)
        return EMPTY_STATE if isinstance(state, Refusal) else part_of(state, self._spans)

    async def keep(self) -> None:
        """Keep the state as it is now, unless it is the one that was kept last. A failure is told; the next one comes.

        Also forgets what is old. Never raises for a store or broker that is away.
        """
        state, cut = self._view.state, self._view.cut
        if state is self._kept:
            return
        try:
            async with asyncio.timeout(KEEP_SECONDS_MAX):
                label = await self._label(cut)
                sealed, body = await asyncio.to_thread(seal, label, state)
                now = self._clock.wall_now()
                await self._store.save_snapshot(label=sealed, body=body, kept_at=now)
                await self._store.delete_snapshots(outdated(await self._store.snapshots(), now))
        except (TransientError, PermanentError, TimeoutError) as exc:
            self._metrics.snapshots.labels("not_saved").inc()
            log.warning("snapshot not kept; starts read more of the streams until one is", error=str(exc) or repr(exc))
            return
        self._kept = state
        self._metrics.snapshots.labels("kept").inc()
        log.debug("snapshot kept", body_bytes=len(body), cut=dict(cut.last_sequences))

    async def _label(self, cut: Cut) -> Label:
        last = dict(cut.last_sequences)
        marks = []
        for stream, span in self._spans.items():
            message = await self._bus.message_at(stream, last[stream]) if last.get(stream) else None
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
        )


@asynccontextmanager
async def keeping(snapshots: Snapshots, every_seconds: float) -> AsyncIterator[None]:
    """Keep a snapshot every so many seconds of wall time while the block lasts, and a last one when it ends.

    Only in one process: the others read.
    """
    stop = asyncio.Event()

    async def keep() -> None:
        try:
            await snapshots.keep()
        except Exception:
            # A bug of ours costs a snapshot; it must not cost the decisions, nor hide why the process ends.
            log.exception("snapshot failed; starts read more of the streams until one is kept")

    async def keep_on() -> None:
        while not await pause(stop, every_seconds):
            await keep()

    task = asyncio.create_task(keep_on())
    try:
        yield
    finally:
        stop.set()
        await task
        await keep()


def refused(
    label: Label, core_digest: str, folds: Sequence[type[Fact]], spans: Mapping[str, StreamSpan]
) -> Refusal | None:
    """Return why a state of this label cannot be gone on with on these streams; None: nothing speaks against it."""
    if label.core_digest != core_digest:
        return Refusal(
            reason="core_changed", detail=f"it was folded by core {label.core_digest}, this one is {core_digest}"
        )
    same_streams = {name for name in label.fact_types if name.partition(".")[0].upper() in spans}
    if different := same_streams.symmetric_difference(fact_types(folds)):
        return Refusal(
            reason="fact_types_changed", detail=f"either it or this service folds no {', '.join(sorted(different))}"
        )
    marks = {mark.stream: mark for mark in label.marks}
    for stream, span in spans.items():
        refusal = _refused_by(stream, marks.get(stream), span)
        if refusal is not None:
            return refusal
    return None


def _refused_by(stream: str, mark: StreamMark | None, span: StreamSpan) -> Refusal | None:
    if mark is None:
        return Refusal(reason="corrupt", detail=f"it does not say how far {stream} was read")
    if mark.created_at != span.created_at:
        detail = f"{stream} was made at {span.created_at.isoformat()}, it knows one of {mark.created_at.isoformat()}"
        return Refusal(reason="stream_changed", detail=detail)
    if mark.last_sequence > span.last_sequence:
        detail = f"{stream} ends at {span.last_sequence}, it goes up to {mark.last_sequence}"
        return Refusal(reason="ahead", detail=detail)
    if span.first_sequence > mark.last_sequence + 1:
        detail = f"{stream} begins at {span.first_sequence} by now, it goes up to {mark.last_sequence}"
        return Refusal(reason="gap", detail=detail)
    return None


async def rewritten(bus: Streams, marks: Sequence[StreamMark]) -> Refusal | None:
    """Return a refusal where the last message of a mark is not the one it was; None: all are, or have aged out."""
    for mark in marks:
        if mark.stored_at is None:
            continue
        message = await bus.message_at(mark.stream, mark.last_sequence)
        if message is not None and message.stored_at != mark.stored_at:
            detail = f"{mark.stream} #{mark.last_sequence} is another message than it was"
            return Refusal(reason="stream_changed", detail=detail)
    return None


async def state_of(store: Store, row: SnapshotRow, label: Label) -> ClusterState | Refusal:
    """Return the state that was kept, read and decoded beside the loop. Raises TransientError."""
    body = await store.snapshot_body(row.number)
    if body is None:
        return Refusal(reason="corrupt", detail="its body is gone")
    return await asyncio.to_thread(decode_snapshot, label, body)


def outdated(rows: Sequence[SnapshotRow], now: datetime) -> list[int]:
    """Return the numbers of snapshots to forget; `rows` are newest first. The first of each hour stays for its week."""
    kept: set[int] = set()
    first_of_hour: dict[datetime, int] = {}
    for row in rows:
        age = now - row.kept_at
        if age < DENSE_AGE:
            kept.add(row.number)
        elif age < AGE_MAX:
            first_of_hour[row.kept_at.replace(minute=0, second=0, microsecond=0)] = row.number
    kept.update(first_of_hour.values())
    kept = set(sorted(kept, reverse=True)[:ROWS_COUNT_MAX])
    return [row.number for row in rows if row.number not in kept]
