"""Computes when the next tick is due. Used by the tick loop and the simulator on their own clocks; reads none itself.

A lone urgent fact is decided on at once. A second one opens a batch window, so that a burst leads to one purchase. The
window ends as soon as no urgent fact arrives for a moment, and at the latest after a share of the duration of the last
tick. An endless sequence of facts is so decided on repeatedly, each delayed by at most that share.
"""

import msgspec


class BatchWindow(msgspec.Struct, frozen=True, kw_only=True):
    """How long to collect a burst of urgent facts. Seconds are wall time. Source: our own (`make bench CASE=V1`)."""

    gap_seconds: float = 0.002  # the burst is over after this long without an urgent fact
    seconds_min: float = 0.005  # the longest window when ticks take no time
    seconds_max: float = 0.1  # the longest window of all
    tick_ratio: float = 0.5  # of the duration of the last tick


class Urgency:
    """Urgent facts since the start of the last tick."""

    def __init__(self, window: BatchWindow) -> None:
        self._window = window
        self._started_at = 0.0
        self._ended_at = 0.0
        self._count = 0
        self._first_at = 0.0
        self._last_at = 0.0

    def start_tick(self, at: float) -> None:
        """Start a tick: it decides on all facts until now."""
        self._started_at = at
        self._count = 0

    def end_tick(self, at: float) -> None:
        """End a tick: facts since its start wait for the next one."""
        self._ended_at = at

    def record(self, count: int, at: float) -> None:
        """Record `count` urgent facts that were folded together."""
        if self._count == 0:
            self._first_at = at
        self._count += count
        self._last_at = at

    @property
    def due_at(self) -> float | None:
        """When to tick, possibly in the past; None without urgent facts. Read between two ticks."""
        if self._count == 0:
            return None
        opened_at = max(self._first_at, self._ended_at)
        if self._count == 1:
            return opened_at
        window = self._window
        part = window.tick_ratio * (self._ended_at - self._started_at)
        limit = min(max(part, window.seconds_min), window.seconds_max)
        return max(opened_at, min(self._last_at + window.gap_seconds, opened_at + limit))

    @property
    def waited_seconds(self) -> float:
        """How long the batch window was open before the tick that starts now, at `due_at`."""
        due_at = self.due_at
        return 0.0 if due_at is None else due_at - max(self._first_at, self._ended_at)
