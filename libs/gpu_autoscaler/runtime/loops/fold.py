"""Folds streams into the StateView, strictly in order and without effects. One loop per stream."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta

import structlog

from gpu_autoscaler.bus.protocol import Message, Projection
from gpu_autoscaler.bus.streams import subject_filter
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import InvalidFact, TransientError
from gpu_autoscaler.runtime.loop_context import READERS, LoopContext
from gpu_autoscaler.runtime.retry import pause
from gpu_autoscaler.runtime.service import FoldInput, MemoryInput
from gpu_autoscaler.runtime.stall_detector import StallDetector

log = structlog.get_logger()

CATCH_UP_POLL_SECONDS = 0.05
SLICE_COUNT_MAX = 4000  # facts folded before other tasks run; each slice copies the parts of the state that it changes
FRESH = timedelta(seconds=240)  # less than the streams' duplicate window
# Dead letters are stored beside the fold, which never waits for them; the next start stores those beyond this count.
DEAD_LETTERS_WAITING_COUNT_MAX = 100_000


class FoldingLoop:
    """Folds one stream into the state."""

    def __init__(
        self,
        context: LoopContext,
        service: FoldInput | None,
        stream: str,
        folds: Sequence[type[Fact]],
        is_urgent: Callable[[Fact], bool],
    ) -> None:
        self._context = context
        self._view = context.view
        self._service = service
        self._stream = stream
        self._folds = frozenset(folds)
        # Folding all facts of a stream means reading all of it, including messages on subjects of no known fact.
        is_whole = frozenset(folds) == frozenset(fact for fact in FACTS if fact.stream() == stream)
        self._subjects = () if is_whole else tuple(sorted({subject_filter(fact) for fact in folds}))
        self._covers_others = bool(self._subjects) and isinstance(service, MemoryInput)
        self._is_urgent = is_urgent
        self._is_caught_up = False
        self._is_folding = False  # a batch was received and is not yet in the state
        limits = context.limits
        self._stall_detector = StallDetector(
            stream, seconds_max=limits.stall_seconds_max, step_seconds_max=limits.lag_seconds
        )
        self._unreadable: asyncio.Queue[int] = asyncio.Queue(DEAD_LETTERS_WAITING_COUNT_MAX)  # sequences
        self._stored_letters: frozenset[tuple[str, int]] | None = None  # as of the first time they were needed

    async def run(self) -> None:
        """Fold until `stop`.

        Raises TransientError when the stream cannot be opened or its read stalls, LoopUnrecoverable for the last time.
        """
        self._stall_detector.start()
        self._is_folding = False
        for stream, sequence in self._view.cut.set_aside:  # the last process may have ended before storing the letter
            if stream == self._stream:
                self._queue_letter(sequence)
        projection = await self._context.bus.projection(
            self._stream, subjects=self._subjects, after_sequence=self._view.last_sequence(self._stream)
        )
        reading = asyncio.create_task(self._read(projection))
        watchers = [
            asyncio.create_task(self._watch_lag(projection)),
            asyncio.create_task(self._store_letters()),
            asyncio.create_task(self._context.stop.wait()),
        ]
        try:
            done, _ = await asyncio.wait((reading, *watchers), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not self._context.stop.is_set():
                raise TransientError(f"projection of stream {self._stream} ended; it is reopened")
        finally:
            for task in (reading, *watchers):
                task.cancel()
            await asyncio.gather(reading, *watchers, return_exceptions=True)
            await projection.close()

    async def _read(self, projection: Projection) -> None:
        async for batch in projection:
            self._is_folding = True
            for start in range(0, len(batch), SLICE_COUNT_MAX):
                self._fold(batch[start : start + SLICE_COUNT_MAX])
                await asyncio.sleep(0)
            self._is_folding = False

    def _fold(self, messages: Sequence[Message]) -> None:
        """Fold one slice. A message that is no valid fact is set aside and never delays the others."""
        recorded: list[Recorded] = []
        aside: list[tuple[str, int]] = []
        for message in messages:
            try:
                item = self._context.decode(message)
            except InvalidFact as exc:
                aside.append((message.stream, message.sequence))
                log.warning(
                    "message set aside; see `gpu-autoscaler dead-letters`",
                    subject=message.subject, sequence=message.sequence, error=str(exc),
                )  # fmt: skip
                self._queue_letter(message.sequence)
                continue
            if item.ahead_seconds:
                self._context.report_clock_ahead(item)
            if type(item.fact) in self._folds:
                recorded.append(item)
        before = self._view.state
        after = fold(before, recorded) if recorded else before
        if messages:
            self._view.advance(after, {self._stream: messages[-1].sequence}, aside)
        self._context.metrics.facts_folded.labels(self._stream.lower()).inc(len(recorded))
        if recorded and self._service is not None:
            self._service.on_folded(recorded)
        self._context.fold_progress.mark_advanced()
        if self._is_caught_up:  # history was counted and acted upon when it was new
            self._context.observer.folded(before, recorded)
            if count := sum(self._is_urgent(item.fact) for item in recorded):
                self._context.record_urgent(count)

    def _queue_letter(self, sequence: int) -> None:
        if not self._unreadable.full():
            self._unreadable.put_nowait(sequence)

    async def _store_letters(self) -> None:
        """Store dead letters one after the other, retrying without a limit."""
        while True:
            sequence = await self._unreadable.get()
            tries = 0
            while True:
                try:
                    await self._store_letter(sequence)
                    break
                except TransientError as exc:
                    tries += 1
                    await asyncio.sleep(self._context.limits.backoff.wait_seconds(tries, exc))

    async def _store_letter(self, sequence: int) -> None:
        """Store the dead letter of one message, unless it exists. Raises TransientError."""
        if self._stored_letters is not None and (self._stream, sequence) in self._stored_letters:
            return
        message = await self._context.bus.message_at(self._stream, sequence)
        if message is None:
            return  # aged out of the stream
        try:
            self._context.decode(message)
        except InvalidFact as exc:
            # The broker's duplicate window rejects a repeat of a recent message; for an older one, look for its letter.
            if self._context.clock.wall_now() - message.stored_at > FRESH and self._stored_letters is None:
                self._stored_letters = await self._context.dead_letters.positions(READERS)
                if (self._stream, sequence) in self._stored_letters:
                    return
            await self._context.set_aside(message, exc, delivered_count=1)

    async def _watch_lag(self, projection: Projection) -> None:
        """Record when the stream is caught up, then its lag. Raises as `run` does when the read stalls."""
        context, condition = self._context, f"fold {self._stream}"
        now = context.clock.monotonic_seconds
        known_at = now()
        while True:
            try:
                # Of a stream that is read in part, messages of other types follow the last folded one. A snapshot
                # covers them: otherwise it would end long before the stream, and be refused when they age out.
                last = await context.bus.last_sequence(self._stream) if self._covers_others else 0
                lag = await projection.lag_count()
            except TransientError as exc:
                if now() - known_at > context.limits.stall_seconds_max:
                    context.readiness.block(condition, f"lag unknown: {exc}")
                await asyncio.sleep(CATCH_UP_POLL_SECONDS)
                continue
            known_at = now()
            if last and lag == 0 and not self._is_folding:
                self._view.advance(self._view.state, {self._stream: last})
            context.metrics.consumer_lag.labels(self._stream.lower()).set(lag)
            self._stall_detector.check(known_at, sequence=self._view.last_sequence(self._stream), lag_count=lag)
            if not self._stall_detector.is_stalled:
                context.readiness.clear(condition)
            if lag == 0 and not self._is_folding and not self._is_caught_up:
                self._is_caught_up = True
                context.fold_progress.mark_caught_up(self._stream)
            wait = context.limits.lag_seconds if self._is_caught_up else CATCH_UP_POLL_SECONDS
            if await pause(context.stop, wait):
                return
