"""Ends what a launcher started when the launcher itself is killed: nothing is left that nobody looks after.

The launcher's children share a process group that one small process leads: the guard. It reads a pipe whose other end
only the launcher has; the pipe's end means that the launcher is gone, however that came. Unlike a list of process ids,
a group has no gap between starting a child and knowing of it, and its number is not given away while it has members.
"""

import os
import signal
import subprocess
import sys
import time

STOP_SECONDS_MAX = 5.0  # after this SIGTERM becomes SIGKILL


class Guard:
    """The launcher's hold on its guard."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_group(self) -> int:
        """The group that children are to be started in."""
        assert self._process is not None, "asked before the guard was started"  # noqa: S101 - a bug of the launcher
        return self._process.pid

    def start(self) -> int:
        """Start the guard; returns the group."""
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        return self._process.pid

    def stop(self) -> None:
        """End the guard, and whatever is still in its group; children are stopped in order before."""
        process, self._process = self._process, None
        if process is None:
            return
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None, "started with a pipe"  # noqa: S101 - see start
        process.stdin.close()


def main() -> None:
    """Wait for the launcher's end, then end its group: by SIGTERM first, by force after STOP_SECONDS_MAX."""
    if os.getpgrp() != os.getpid():
        sys.exit("the guard is started by the launcher, as the leader of a process group of its own")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    time.sleep(STOP_SECONDS_MAX)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
