"""Detects a stalled read: more to read, and no progress. It is restarted, at last by a new process.

No known cause stalls a read; an unknown one must not go unnoticed.
"""

from gpu_autoscaler.model.errors import TransientError

RESTARTS_COUNT_MAX = 3  # without one message in between; after that only a new process can help


class LoopStalled(TransientError):
    """There is more to read, and no message arrived within the limit: restart the loop."""


class LoopUnrecoverable(Exception):
    """Restarting the loop did not help: the process must end."""


class StallDetector:
    """Follows the progress of one stream's read across restarts."""

    def __init__(self, stream: str, *, seconds_max: float, step_seconds_max: float) -> None:
        """`step_seconds_max` caps the time counted between two checks: a busy process reads nothing meanwhile."""
        self._stream = stream
        self._seconds_max = seconds_max
        self._step_seconds_max = step_seconds_max
        self._checked_at: float | None = None
        self._stalled_seconds = 0.0
        self._sequence = -1
        self._restarts_count = 0

    @property
    def is_stalled(self) -> bool:
        """True after a stall, until the next message."""
        return self._restarts_count > 0

    def start(self) -> None:
        """Record that the read was started or restarted."""
        self._checked_at, self._stalled_seconds = None, 0.0

    def check(self, now_seconds: float, *, sequence: int, lag_count: int) -> None:
        """Record that the read has reached `sequence`, with `lag_count` messages left.

        Raises LoopStalled when the read is to be restarted, LoopUnrecoverable after RESTARTS_COUNT_MAX restarts.
        """
        step_seconds = 0.0 if self._checked_at is None else min(now_seconds - self._checked_at, self._step_seconds_max)
        self._checked_at = now_seconds
        if lag_count == 0 or sequence != self._sequence:
            self._sequence, self._stalled_seconds, self._restarts_count = sequence, 0.0, 0
            return
        self._stalled_seconds += step_seconds
        if self._stalled_seconds < self._seconds_max:
            return
        stall = (
            f"read of stream {self._stream} stalled at sequence {sequence} for {self._stalled_seconds:.0f} s "
            f"with {lag_count} messages left"
        )
        if self._restarts_count == RESTARTS_COUNT_MAX:
            raise LoopUnrecoverable(f"{stall} after {self._restarts_count} restarts of the loop; restart the process")
        self._restarts_count += 1
        raise LoopStalled(stall)
