"""Karpenter's own scheduler, built from its Go module and asked about a case.

`make peers` builds it, into a cache outside of the repository.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from tests.bench.peers.case import CACHE

MODULE = Path(__file__).parent / "karpenter"
_BUILD_SECONDS_MAX = 3600.0
_DECIDE_SECONDS_MAX = 1800.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What it decided, and at what cost."""

    seconds: float
    cpu_seconds: float  # of all cores
    usd_per_hour: float
    nodes_count: int
    unplaced_count: int
    on_existing_count: int
    scheduler: str


def missing() -> str | None:
    """Return what it cannot be built without and is not here; None: all is here."""
    return None if shutil.which("go") else "no Go (1.26 or newer) on the PATH, so Karpenter's scheduler is not built"


def built() -> Path:
    """Return the program; it is built once for each state of its sources, outside of the repository."""
    sources = sorted(path for path in MODULE.iterdir() if path.suffix in {".go", ".mod", ".sum"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    program = CACHE / f"karpenter-{digest}"
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", str(program), "."]
        subprocess.run(command, cwd=MODULE, check=True, timeout=_BUILD_SECONDS_MAX)
    return program


def decide(case: dict[str, Any]) -> Answer:
    """Let it decide on the case, on every core there is: minutes of processor time.

    The answer is kept beside the program, for this program and case, until its file is deleted.
    """
    program, asked = built(), json.dumps(case).encode()
    kept = program.with_name(f"{program.name}-{hashlib.sha256(asked).hexdigest()[:16]}.json")
    if not kept.exists():
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(asked)
            file.flush()
            command = [str(program), file.name]
            answered = subprocess.run(command, check=True, capture_output=True, timeout=_DECIDE_SECONDS_MAX)
        answer = msgspec.json.decode(answered.stdout, type=Answer)
        kept.write_bytes(msgspec.json.encode(answer))
    return msgspec.json.decode(kept.read_bytes(), type=Answer)


if __name__ == "__main__":
    reason = missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{built()}\n")
