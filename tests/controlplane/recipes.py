"""Programs for tests that no package index has, built from their Go modules once per version of the pins.

`go.mod` and `go.sum` pin the versions. Programs are kept in a cache outside of the repository and reused.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gpu-autoscaler"
_BUILD_SECONDS_MAX = 3600.0
_GO_MINOR_MIN = 21  # from here on Go fetches the version that a module asks for (go.dev/doc/toolchain, read 2026-11-21)
# A module that could not be fetched is asked for again (Go gives up at a handshake's time-out); what was built stays.
_TRIES_MAX = 4
_PAUSE_SECONDS = 5.0
_PINS = ("go.mod", "go.sum")


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What is built, from which pins, and its name in messages."""

    name: str  # the folder in the cache begins with it
    words: str
    module: Path  # folder of go.mod and go.sum
    programs: Mapping[str, str]  # name -> package
    link_flags: Callable[[], str] = lambda: "-s -w"
    tags: str = ""  # build tags
    # Files out of a module that is required and not built: name -> (module, path in it).
    files: Mapping[str, tuple[str, str]] = {}

    def folder(self) -> Path:
        """Return the folder of the programs of these pins."""
        digest = hashlib.sha256(b"".join((self.module / name).read_bytes() for name in _PINS)).hexdigest()[:16]
        return CACHE / f"{self.name}-{digest}"

    def missing(self) -> str | None:
        """Return why it cannot be built, with the next step; None if it can be or is built."""
        if self.folder().is_dir():
            return None
        if not shutil.which("go"):
            return f"no Go (1.26 or newer) on the PATH, so {self.words} is not built; see go.dev/dl"
        said = subprocess.run(["go", "version"], capture_output=True, text=True, timeout=60, check=True).stdout
        found = re.search(r"go1\.(\d+)", said)
        if found and int(found[1]) < _GO_MINOR_MIN:
            return f"{said.strip()} is too old to build {self.words}; 1.26 or newer is in go.dev/dl"
        return None

    def build(self) -> Path:
        """Build if necessary and return the folder. It is created atomically, also by concurrent builds."""
        target = self.folder()
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir():
                return target
            parts = target.with_suffix(".part")
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir()
            for name, package in self.programs.items():
                print(f"building {name} ({package})", file=sys.stderr, flush=True)  # noqa: T201 - a command's progress
                command = [
                    "go",
                    "build",
                    "-buildvcs=false",
                    "-trimpath",
                    "-tags",
                    self.tags,
                    "-ldflags",
                    self.link_flags(),
                ]
                self._go(*command, "-o", str(parts / name), package)
            for name, (module, path) in self.files.items():
                where = self._go("go", "list", "-m", "-f", "{{.Dir}}", module).strip()
                if not where:  # known by its checksum, and not fetched yet
                    self._go("go", "mod", "download", module)
                    where = self._go("go", "list", "-m", "-f", "{{.Dir}}", module).strip()
                shutil.copyfile(Path(where) / path, parts / name)
            parts.rename(target)
        return target

    def _go(self, *command: str) -> str:
        for _ in range(_TRIES_MAX - 1):
            try:
                return self._tried(command)
            except subprocess.CalledProcessError:
                time.sleep(_PAUSE_SECONDS)
        return self._tried(command)

    def _tried(self, command: tuple[str, ...]) -> str:
        return subprocess.run(
            command,
            cwd=self.module,
            check=True,
            timeout=_BUILD_SECONDS_MAX,
            env={**os.environ, "CGO_ENABLED": "0"},
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
