"""Folds streams into the StateView, strictly in order, without effects. One loop a stream."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta

import structlog

from gpu_autoscaler.bus.protocol import Message, Projection
from gpu_autoscaler.bus.streams import subject_filter
from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import InvalidFact, TransientError
from gpu_autoscaler.runtime.headway import StallDetector
from gpu_autoscaler.runtime.plumbing import READERS, LoopContext
from gpu_autoscaler.runtime.retry import pause
from gpu_autoscaler.runtime.service import FoldInput

log = structlog.get_logger()

CATCH_UP_POLL_SECONDS = 0.05
SLICE_COUNT_MAX = 4000  # facts folded before the loop lets others run; each slice copies what it touches of the state
FRESH = timedelta(seconds=240)  # less than the streams' duplicate window
# Dead letters are stored beside the fold, which waits for nothing; of more than these the next start makes letters.
DEAD_LETTERS_WAITING_COUNT_MAX = 100_000


class FoldingLoop:
    """One stream on its way into the state."""

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
        # Who folds all facts of a stream reads all of it, and comes upon what was published on a subject of no fact.
        is_whole = frozenset(folds) == frozenset(fact for fact in FACTS if fact.stream() == stream)
        self._subjects = () if is_whole else tuple(sorted({subject_filter(fact) for fact in folds}))
        self._is_urgent = is_urgent
        self._is_caught_up = False
        self._is_folding = False  # a batch was given and is not in the state yet
        limits = context.limits
        self._stall_detector = StallDetector(stream, seconds_max=limits.stall_seconds_max, step_seconds_max=limits.lag_seconds)
        self._broken: asyncio.Queue[int] = asyncio.Queue(DEAD_LETTERS_WAITING_COUNT_MAX)  # sequences
        self._has_letter: frozenset[tuple[str, int]] | None = None  # as of the first time that we had to know

    async def run(self) -> None:
        """Fold until it is time to stop.

        Raises TransientError when the stream cannot be opened or its read stands still, LoopUnrecoverable for the last time.
        """
        self._stall_detector.begin()
        self._is_folding = False
        for stream, sequence in self._view.cut.set_aside:  # its letter may not have been stored before the last end
            if stream == self._stream:
                self._wants_letter(sequence)
        projection = await self._context.bus.projection(
            self._stream, subjects=self._subjects, after_sequence=self._view.last_sequence(self._stream)
        )
        reading = asyncio.create_task(self._read(projection))
        others = [
            asyncio.create_task(self._watch_lag(projection)),
            asyncio.create_task(self._store_broken()),
            asyncio.create_task(self._context.stop.wait()),
        ]
        try:
            done, _ = await asyncio.wait((reading, *others), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not self._context.stop.is_set():
                raise TransientError(f"the projection of {self._stream} ended; opening it again")
        finally:
            for task in (reading, *others):
                task.cancel()
            await asyncio.gather(reading, *others, return_exceptions=True)
            await projection.close()

    async def _read(self, projection: Projection) -> None:
        async for batch in projection:
            self._is_folding = True
            for start in range(0, len(batch), SLICE_COUNT_MAX):
                self._fold(batch[start : start + SLICE_COUNT_MAX])
                await asyncio.sleep(0)
            self._is_folding = False

    def _fold(self, messages: Sequence[Message]) -> None:
        """Fold one slice; what is no valid fact goes aside and never holds the rest up."""
        recorded: list[Recorded] = []
        aside: list[tuple[str, int]] = []
        for message in messages:
            try:
                item = self._context.decode(message)
            except InvalidFact as exc:
                aside.append((message.stream, message.sequence))
                self._remember(message, exc)
                continue
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
        if self._is_caught_up:  # history is no news: it was observed and acted upon when it came
            self._context.observer.folded(before, recorded)
            if count := sum(self._is_urgent(item.fact) for item in recorded):
                self._context.record_urgent(count)

    def _remember(self, message: Message, error: InvalidFact) -> None:
        log.warning(
            "message set aside; see `gpu-autoscaler dead-letters`",
            subject=message.subject,
            sequence=message.sequence,
            error=str(error),
        )
        self._wants_letter(message.sequence)

    def _wants_letter(self, sequence: int) -> None:
        if not self._broken.full():
            self._broken.put_nowait(sequence)

    async def _store_broken(self) -> None:
        """Store dead letters one after the other, as long as it takes."""
        while True:
            sequence = await self._broken.get()
            tries = 0
            while True:
                try:
                    await self._store_letter(sequence)
                    break
                except TransientError as exc:
                    tries += 1
                    await asyncio.sleep(self._context.limits.backoff.wait_seconds(tries, exc))

    async def _store_letter(self, sequence: int) -> None:
        """Set one message aside, unless that was done. Raises TransientError."""
        if self._has_letter is not None and (self._stream, sequence) in self._has_letter:
            return
        message = await self._context.bus.message_at(self._stream, sequence)
        if message is None:
            return  # aged out before anybody could keep it
        try:
            self._context.decode(message)
        except InvalidFact as exc:
            # The broker's memory of ids keeps a repeat out while the message is young; later we look for its letter.
            if self._context.clock.wall_now() - message.stored_at > FRESH and self._has_letter is None:
                self._has_letter = await self._context.dead_letters.places(READERS)
                if (self._stream, sequence) in self._has_letter:
                    return
            await self._context.set_aside(message, exc, delivered_count=1)

    async def _watch_lag(self, projection: Projection) -> None:
        """Say when the stream is caught up, then how far behind it is. Raises as `run` does where it stands still."""
        context, condition = self._context, f"fold {self._stream}"
        now = context.clock.monotonic_seconds
        known_at = now()
        while True:
            try:
                lag = await projection.lag_count()
            except TransientError as exc:
                if now() - known_at > context.limits.stall_seconds_max:
                    context.readiness.block(condition, f"nobody knows how far behind it is: {exc}")
                await asyncio.sleep(CATCH_UP_POLL_SECONDS)
                continue
            known_at = now()
            context.metrics.consumer_lag.labels(self._stream.lower()).set(lag)
            self._stall_detector.look(known_at, sequence=self._view.last_sequence(self._stream), lag_count=lag)
            if not self._stall_detector.is_doubtful:
                context.readiness.clear(condition)
            if lag == 0 and not self._is_folding and not self._is_caught_up:
                self._is_caught_up = True
                context.fold_progress.mark_caught_up(self._stream)
            wait = context.limits.lag_seconds if self._is_caught_up else CATCH_UP_POLL_SECONDS
            if await pause(context.stop, wait):
                return
