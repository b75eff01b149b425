"""The lines of a log that is followed over several connections: none is lost and none repeated.

Every line comes with the time at which the container wrote it, in ascending order. A new connection asks for the lines
since the second of the last one (Kubernetes API reference, "Pod v1: read log", `sinceTime`, read 2026-11-27), and
leaves out those that it has.
"""

from collections.abc import Mapping

from gpu_manager_sdk.calls import Call, logs

CONNECTIONS_WITHOUT_LINES_MAX = 5  # in a row, of one log that is followed


class LogReader:
    """Turns what connections send into lines. `call` is that of the next connection."""

    def __init__(self, options: Mapping[str, object], *, is_stamped: bool) -> None:
        """`is_stamped`: each line keeps its time."""
        self._options = dict(options)
        self._is_stamped = is_stamped
        self._last = ""  # time of the last line
        self._last_count = 0  # lines with this time
        self._repeated_count = 0  # of them, left to come again
        self._idle_count = 0
        self._unfinished = b""  # a line whose end has not come

    @property
    def is_followed(self) -> bool:
        return bool(self._options.get("follow"))

    def call(self, job_id: str) -> Call[bytes]:
        """Return the call of the next connection."""
        options = self._options | ({"timestamps": True} if self.is_followed or self._is_stamped else {})
        if self._last:
            options |= {"since_time": f"{self._last[:19]}Z", "tail_lines": None}
        self._repeated_count, self._unfinished = self._last_count, b""
        return logs(job_id, options)

    def read(self, raw: bytes) -> str | None:
        """Return the line; None for one that an earlier connection has sent, and for one that is not complete."""
        if self.is_followed and not raw.endswith(b"\n"):
            self._unfinished = raw
            return None
        line = raw.decode(errors="replace").rstrip("\r\n")
        if not self.is_followed:
            return line
        written_at, _, text = line.partition(" ")
        if _is_before(written_at, self._last):
            return None
        if written_at == self._last:
            if self._repeated_count:
                self._repeated_count -= 1
                return None
            self._last_count += 1
        else:
            self._last, self._last_count, self._repeated_count = written_at, 1, 0
        self._idle_count = 0
        return line if self._is_stamped else text

    def rest(self) -> tuple[str, ...]:
        """Return the last line of a log that has ended, if it came without an end of line."""
        line = self.read(self._unfinished + b"\n") if self._unfinished else None
        return () if line is None else (line,)

    def is_resumable(self) -> bool:
        """Return whether a connection that broke is followed by another."""
        self._idle_count += 1
        return self.is_followed and self._idle_count <= CONNECTIONS_WITHOUT_LINES_MAX


def _is_before(left: str, right: str) -> bool:
    """Return whether a time is earlier. Kubernetes leaves out zeros at the end of the fraction (RFC3339Nano)."""
    return _sortable(left) < _sortable(right)


def _sortable(written_at: str) -> str:
    seconds, _, fraction = written_at.rstrip("Z").partition(".")
    return f"{seconds}.{fraction:0<9}" if seconds else ""
