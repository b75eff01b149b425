"""A disk of a few megabytes under a server's store, to be filled and freed.

A small separate file system if this machine may mount one; else a size limit on the server's files, which causes the
same errors in the same calls.
"""

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from gpu_autoscaler.bus.server import NatsServer

DISK_BYTES = 48 * 1024 * 1024


class Disk(Protocol):
    """Where the store is."""

    store: Path
    kind: str

    def fill(self, server: NatsServer) -> None:
        """From here on nothing more can be written."""

    def free(self, server: NatsServer) -> None:
        """There is room again."""


class SmallFileSystem:
    """A tmpfs, filled by somebody else's file."""

    kind = "tmpfs"

    def __init__(self, folder: Path) -> None:
        self.store = folder / "nats"
        self._filler = folder / "filler"

    def fill(self, server: NatsServer) -> None:  # noqa: ARG002 - as the other kind
        """Somebody writes until nothing is left."""
        with self._filler.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            for size in (1024 * 1024, 4096, 1):
                with contextlib.suppress(OSError):
                    while filler.write(b"x" * size) == size:
                        pass

    def free(self, server: NatsServer) -> None:  # noqa: ARG002
        """Remove the file."""
        self._filler.unlink()


class GrowthLimit:
    """No file of the server's may grow beyond what it has now."""

    kind = "growth limit"

    def __init__(self, folder: Path) -> None:
        self.store = folder / "nats"

    def fill(self, server: NatsServer) -> None:
        """Writes beyond the limit fail with EFBIG."""
        assert server.pid is not None
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, hard))

    def free(self, server: NatsServer) -> None:
        """As it was."""
        assert server.pid is not None
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """A small file system in `folder`, or the limit."""
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    folder.mkdir(parents=True)
    is_mounted = (
        os.geteuid() == 0
        and mount is not None
        and unmount is not None
        and subprocess.run(
            [mount, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
        == 0
    )
    if not is_mounted:
        yield GrowthLimit(folder)
        return
    try:
        yield SmallFileSystem(folder)
    finally:
        assert unmount is not None
        subprocess.run([unmount, "-l", str(folder)], check=True)
