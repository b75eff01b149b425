"""When the next tick is due. Used by the tick loop and by the simulator, on their own clocks; reads none itself.

A lone urgent fact is decided on at once. A second one opens a quiet window, so that a burst is bought for once: it ends
as soon as nothing urgent came for a moment, and at the latest after a part of what a decision takes anyway. Facts that
keep coming without end are so decided on again and again, never later than by that part.
"""

import msgspec


class BatchWindow(msgspec.Struct, frozen=True, kw_only=True):
    """How long a burst is listened to. Seconds are wall time. Source: our own (`make bench CASE=V1`)."""

    gap_seconds: float = 0.002  # nothing urgent for so long: the burst is over
    seconds_min: float = 0.005  # the longest window where decisions take no time
    seconds_max: float = 0.1  # the longest of all
    tick_ratio: float = 0.5  # of what the last tick took


class Urgency:
    """Urgent facts since the last tick began."""

    def __init__(self, window: BatchWindow) -> None:
        self._window = window
        self._began_at = 0.0
        self._ended_at = 0.0
        self._count = 0
        self._first_at = 0.0
        self._last_at = 0.0

    def start_tick(self, at: float) -> None:
        """What came until now is in the state that the tick decides on."""
        self._began_at = at
        self._count = 0

    def end_tick(self, at: float) -> None:
        """What came since it began waits for the next one."""
        self._ended_at = at

    def record(self, count: int, at: float) -> None:
        """So many urgent facts went into the state together."""
        if self._count == 0:
            self._first_at = at
        self._count += count
        self._last_at = at

    @property
    def due_at(self) -> float | None:
        """When to tick, which may be past; None while nothing is urgent. Asked between two ticks."""
        if self._count == 0:
            return None
        opened_at = max(self._first_at, self._ended_at)
        if self._count == 1:
            return opened_at
        window = self._window
        part = window.tick_ratio * (self._ended_at - self._began_at)
        limit = min(max(part, window.seconds_min), window.seconds_max)
        return max(opened_at, min(self._last_at + window.gap_seconds, opened_at + limit))

    @property
    def waited_seconds(self) -> float:
        """How long the quiet window was open before the tick that begins when this is asked at `due_at`."""
        due_at = self.due_at
        return 0.0 if due_at is None else due_at - max(self._first_at, self._ended_at)
