"""Whether a read gets on: one that stands still with more to read is begun again, at last by a new process.

Nothing that we know of makes a read stand still; what we do not know of must not do it without a word.
"""

from gpu_autoscaler.model.errors import TransientError

RESTARTS_COUNT_MAX = 3  # without a single message in between; then only a new process is left to try


class LoopStalled(TransientError):
    """There is more to read, and nothing came for too long."""


class LoopUnrecoverable(Exception):
    """Beginning again did not help: this process ends."""


class StallDetector:
    """Looks at one stream's read, over all the times that it is begun."""

    def __init__(self, stream: str, *, seconds_max: float, step_seconds_max: float) -> None:
        """`step_seconds_max`: of the time between two looks no more counts, as a process that was busy read nothing."""
        self._stream = stream
        self._seconds_max = seconds_max
        self._step_seconds_max = step_seconds_max
        self._looked_at: float | None = None
        self._still_seconds = 0.0
        self._sequence = -1
        self._begun_again_count = 0

    @property
    def is_doubtful(self) -> bool:
        """True when it stood still and nothing has come since."""
        return self._begun_again_count > 0

    def begin(self) -> None:
        """It is begun, first or again."""
        self._looked_at, self._still_seconds = None, 0.0

    def look(self, now_seconds: float, *, sequence: int, lag_count: int) -> None:
        """Judge a read that has given up to `sequence`, with so much more to come.

        Raises LoopStalled when it is to begin again, LoopUnrecoverable when that was tried often enough.
        """
        step_seconds = 0.0 if self._looked_at is None else min(now_seconds - self._looked_at, self._step_seconds_max)
        self._looked_at = now_seconds
        if lag_count == 0 or sequence != self._sequence:
            self._sequence, self._still_seconds, self._begun_again_count = sequence, 0.0, 0
            return
        self._still_seconds += step_seconds
        if self._still_seconds < self._seconds_max:
            return
        words = (
            f"the read of {self._stream} stands still at sequence {sequence} with {lag_count} to come "
            f"for {self._still_seconds:.0f} s"
        )
        if self._begun_again_count == RESTARTS_COUNT_MAX:
            raise LoopUnrecoverable(f"{words}, begun again {self._begun_again_count} times; the process ends, start another")
        self._begun_again_count += 1
        raise LoopStalled(words)
