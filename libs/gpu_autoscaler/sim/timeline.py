"""Virtual time: an event loop that never waits. When nothing is ready it jumps to the next timer.

Doors run as they do live (`gather`, `timeout`, semaphores); what happens at one instant happens in the order in which
it was asked for, so that equal seeds are equal runs.
"""

import asyncio
import heapq
import selectors
from collections.abc import Callable, Mapping
from contextvars import Context
from datetime import UTC, datetime, timedelta
from typing import Any

from gpu_autoscaler.runtime.clock import Clock

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


class _Timer(asyncio.TimerHandle):
    """Of two timers at one instant, the one that was set first goes first; asyncio's own heap promises nothing."""

    __slots__ = ("number", "seconds")
    number: int
    seconds: float

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Timer)  # noqa: S101 - this loop makes no others
        if self.seconds == other.seconds:
            return self.number < other.number
        return self.seconds < other.seconds


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in which an hour takes as long as what happens in it."""

    def __init__(self, origin: datetime = ORIGIN) -> None:
        """`origin`: the instant at which it begins."""
        self._origin = origin
        self._jump = _Jump()
        super().__init__(self._jump)
        self._scheduled: list[asyncio.TimerHandle]
        self._timers_count = 0
        self._clock_resolution = 1e-9  # the machine's own would differ from machine to machine
        # What was killed stays as it was until the end: a collected coroutine would run its `finally` at any time.
        self.graveyard: list[object] = []

    def call_at(  # type: ignore[override]  # typed by position in typeshed, which a plain signature cannot say again
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401 - whatever the callback takes
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's, with an order among equals."""
        timer = _Timer(when, callback, args, self, context)
        self._timers_count += 1
        timer.number, timer.seconds = self._timers_count, when
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]  # noqa: SLF001 - as asyncio's own `call_at` does
        return timer

    def time(self) -> float:
        """Seconds since the run began."""
        return self._jump.passed_seconds

    def now(self) -> datetime:
        """The instant, by the world's own clock."""
        return self._origin + timedelta(seconds=self._jump.passed_seconds)


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
