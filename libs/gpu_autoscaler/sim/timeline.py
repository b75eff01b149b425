"""Virtual time: an event loop that never waits. When nothing is ready it jumps to the next timer.

Doors run as they do live (`gather`, `timeout`, semaphores); what happens at one instant happens in the order in which
it was asked for, so that equal seeds are equal runs.
"""

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from gpu_autoscaler.runtime.clock import Clock

SAME_INSTANT_SECONDS = 1e-9  # the machine's own resolution would differ from machine to machine
T = TypeVar("T")
ORIGIN = datetime(2026, 1, 5, tzinfo=UTC)  # a Monday; every run begins here


class _Jump(selectors.BaseSelector):
    """Instead of waiting for a socket, moves the loop's time on."""

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
            raise RuntimeError("the simulation waits for something that nothing will bring about")
        if timeout > 0:
            self.passed_seconds += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in which an hour takes as long as what happens in it."""

    def __init__(self, origin: datetime = ORIGIN) -> None:
        """`origin`: the instant at which it begins."""
        self._jump = _Jump()
        super().__init__(self._jump)
        self._ready: deque[asyncio.Handle]
        self._stopping: bool
        self._origin = origin
        # Of two timers at one instant, the one that was set first goes first; asyncio's own heap promises nothing.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_count = 0
        self._now = (0.0, origin)  # the instant that was asked for last
        # What was killed stays as it was until the end: a collected coroutine would run its `finally` at any time.
        self.graveyard: list[object] = []

    def _make_self_pipe(self) -> None:
        """No thread ever wakes it, so it needs no sockets; one that is only set up leaves nothing behind unclosed."""
        self._ssock = self._csock = None

    def _close_self_pipe(self) -> None:
        """There is none."""

    def __del__(self) -> None:
        """Nothing is held that would have to be given back."""

    def call_at(  # type: ignore[override]  # typed by position in typeshed, which a plain signature cannot say again
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401 - whatever the callback takes
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's, with an order among equals."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_count += 1
        heapq.heappush(self._timers, (when, self._timers_count, timer))
        return timer

    def _run_once(self) -> None:
        """One turn, as asyncio's own, but for waiting: where nothing is ready, time is what the next timer says.

        Everything that is due at this instant comes after what was ready already.
        """
        ready, timers = self._ready, self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise RuntimeError("the simulation waits for something that nothing will bring about")
            self._jump.passed_seconds = max(self._jump.passed_seconds, timers[0][0])
        due = self._jump.passed_seconds + SAME_INSTANT_SECONDS
        while timers and timers[0][0] < due:
            timer = heapq.heappop(timers)[2]
            if not timer.cancelled():
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 - as asyncio's own `_run_once` does

    def run_in_executor(  # type: ignore[override]  # typed by position in typeshed
        self,
        executor: object,  # noqa: ARG002 - as asyncio has it
        func: Callable[..., T],
        *args: Any,  # noqa: ANN401 - whatever it takes
    ) -> asyncio.Future[T]:
        """Do it at once: work that live services give to a thread takes no time here."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001 - raised where it is awaited
            done.set_exception(exc)
        return done

    def time(self) -> float:
        """Seconds since the run began."""
        return self._jump.passed_seconds

    def now(self) -> datetime:
        """The instant, by the world's own clock."""
        seconds = self._jump.passed_seconds
        if self._now[0] != seconds:
            self._now = (seconds, self._origin + timedelta(seconds=seconds))
        return self._now[1]


class VirtualClock(Clock):
    """A process' clock; it may go wrong by `skew_seconds`."""

    def __init__(self, loop: VirtualLoop, skew_seconds: float = 0.0) -> None:
        self._loop = loop
        self._skew = timedelta(seconds=skew_seconds)
        super().__init__(1.0, ORIGIN)

    def wall_now(self) -> datetime:  # type: ignore[override]  # there is no wall here
        """The instant as this process believes it to be."""
        return self._loop.now() + self._skew

    def monotonic_seconds(self) -> float:  # type: ignore[override]  # as above
        """Seconds since the run began."""
        return self._loop.time()
