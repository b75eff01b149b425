"""Virtual time: an event loop that never waits. When nothing is ready it jumps to the next timer.

Services run unchanged (`gather`, `timeout`, semaphores). Callbacks of one instant run in the order in which they were
scheduled, so equal seeds give equal runs. An error that asyncio would log ends the run: without the task that failed,
what follows says nothing about the services.
"""

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context, copy_context
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from gpu_autoscaler.runtime.clock import Clock

SAME_INSTANT_SECONDS = 1e-9  # the clock resolution differs between machines
T = TypeVar("T")
ORIGIN = datetime(2026, 1, 5, tzinfo=UTC)  # a Monday; every run starts here


class _Jump(selectors.BaseSelector):
    """A selector that advances the loop's time instead of waiting for sockets."""

    def __init__(self) -> None:
        self.passed_seconds = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:  # noqa: ANN401 - as inherited
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:  # noqa: ANN401 - as inherited
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: the simulation waits, but no timer is set")
        if timeout > 0:
            self.passed_seconds += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class _Handle(asyncio.TimerHandle):
    """A handle that does not ask the loop for its debug mode, as asyncio's do at each step."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: "VirtualLoop",
        context: Context | None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None
        self._when = when

    def cancel(self) -> None:
        """Never run the callback, and release what it holds."""
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]  # as asyncio does


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose hours take only as long as the work in them."""

    def __init__(self, origin: datetime = ORIGIN) -> None:
        """`origin`: the instant at which time starts."""
        self._jump = _Jump()
        super().__init__(self._jump)
        self._ready: deque[asyncio.Handle]
        self._stopping: bool
        self._origin = origin
        # Timers of the same instant fire in the order in which they were set; asyncio's own heap does not guarantee an
        # order.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_count = 0
        self._now = (0.0, origin)  # cache of the last result of now()
        self._error: BaseException | None = None  # the first one that nothing handles
        self._is_ending = False
        # Killed processes are retained until the end: a collected coroutine would run its `finally` at any time.
        self.graveyard: list[object] = []

    def _make_self_pipe(self) -> None:
        """Skip the sockets: no thread wakes this loop, and sockets would have to be closed."""
        self._ssock = self._csock = None

    def _close_self_pipe(self) -> None:
        """Nothing to close."""

    def __del__(self) -> None:
        """Nothing to release."""

    def call_at(  # type: ignore[override]  # typed by position in typeshed, which a plain signature cannot repeat
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401 - arguments of the callback
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule like asyncio, with a defined order of equal instants."""
        timer = _Handle(when, callback, args, self, context)
        self._timers_count += 1
        heapq.heappush(self._timers, (when, self._timers_count, timer))
        return timer

    def call_later(  # type: ignore[override]  # as `call_at`
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401 - arguments of the callback
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule like asyncio, without its debug mode."""
        return self.call_at(self._jump.passed_seconds + delay, callback, *args, context=context)

    def call_soon(  # type: ignore[override]  # as `call_at`
        self,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401 - arguments of the callback
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Schedule like asyncio, without its debug mode."""
        handle = _Handle(self._jump.passed_seconds, callback, args, self, context)
        self._ready.append(handle)
        return handle

    def get_debug(self) -> bool:
        """Return False: every handle asks."""
        return False

    def _run_once(self) -> None:
        """Run one iteration like asyncio. Where nothing is ready, jump to the next timer instead of waiting.

        Timers that are due now run after the callbacks that were ready before.
        """
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:  # noqa: SLF001 - as asyncio's own loop reads it
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise RuntimeError("deadlock: the simulation waits, but no timer is set")
            self._jump.passed_seconds = max(self._jump.passed_seconds, timers[0][0])
        due = self._jump.passed_seconds + SAME_INSTANT_SECONDS
        while timers and timers[0][0] < due:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:  # noqa: SLF001 - as above
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:  # noqa: SLF001 - as above
                handle._run()  # noqa: SLF001 - as above

    def run_in_executor(  # type: ignore[override]  # typed by position in typeshed
        self,
        executor: object,  # noqa: ARG002 - as in asyncio
        func: Callable[..., T],
        *args: Any,  # noqa: ANN401 - arguments of func
    ) -> asyncio.Future[T]:
        """Run the function at once: work that live services hand to a thread takes no time here."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001 - raised where it is awaited
            done.set_exception(exc)
        return done

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task that nothing awaits. Its error ends the run, also the error of a time limit."""
        task = self.create_task(work)
        task.add_done_callback(self._note_error_of)
        return task

    def _note_error_of(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.call_exception_handler({"exception": error})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run by an error that nothing handles, of a callback or a task."""
        error = context.get("exception")
        if error is not None and not self._is_ending:
            self._error = self._error or error
            self.stop()

    def run_forever(self) -> None:
        """Run until `stop`. Raises the first error that nothing handles."""
        super().run_forever()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def end(self) -> None:
        """Let callbacks that are ready run once more, without reporting errors; then close the loop."""
        self._is_ending = True
        self.call_later(0.0, self.stop)
        self.run_forever()
        self.close()
        asyncio.set_event_loop(None)

    def time(self) -> float:
        """Seconds since the run began."""
        return self._jump.passed_seconds

    def skip(self, passed: timedelta) -> None:
        """Let cluster time pass at once; timers keep their distance, as if everything had slept."""
        self._origin += passed
        self._now = (self._now[0], self._now[1] + passed)

    def now(self) -> datetime:
        seconds = self._jump.passed_seconds
        if self._now[0] != seconds:
            self._now = (seconds, self._origin + timedelta(seconds=seconds))
        return self._now[1]


class VirtualClock(Clock):
    """The clock of one process, off by `skew_seconds`."""

    def __init__(self, loop: VirtualLoop, skew_seconds: float = 0.0) -> None:
        self._loop = loop
        self._skew = timedelta(seconds=skew_seconds)
        super().__init__(1.0, ORIGIN)

    def wall_now(self) -> datetime:  # type: ignore[override]  # virtual time
        return self._loop.now() + self._skew

    def monotonic_seconds(self) -> float:  # type: ignore[override]  # like wall_now
        return self._loop.time()
