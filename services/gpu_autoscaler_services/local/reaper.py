"""Stops the launcher's children when the launcher itself is killed.

The reaper leads their process group and reads a pipe from the launcher; its end means that the launcher is gone.
"""

import os
import signal
import subprocess
import sys
import time

STOP_SECONDS_MAX = 5.0  # after this SIGTERM becomes SIGKILL


class Reaper:
    """The launcher's handle of its reaper process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_group(self) -> int:
        assert self._process is not None, "the reaper is not started"  # noqa: S101 - a bug of the launcher
        return self._process.pid

    def start(self) -> int:
        """Start the reaper; return the group."""
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0
        )
        return self._process.pid

    def stop(self) -> None:
        """Kill the reaper and whatever is left in its group; the children are stopped before, in order."""
        process, self._process = self._process, None
        if process is None:
            return
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None, "started with a pipe"  # noqa: S101 - see start
        process.stdin.close()


def main() -> None:
    """Wait for the launcher's end, then stop its group: SIGTERM, and SIGKILL after STOP_SECONDS_MAX."""
    if os.getpgrp() != os.getpid():
        sys.exit("the reaper must lead its own process group; it is started by the launcher")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    time.sleep(STOP_SECONDS_MAX)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
