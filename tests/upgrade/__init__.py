"""An earlier version: its code, and what it left behind in the middle of a story. See README.md."""

import tarfile
from pathlib import Path

EARLIER = Path(__file__).with_name("2026-11-23.tar.xz")
RECORDED = Path(__file__).with_name("2026-11-23-left.tar.xz")
# As a rollout would: what others wait for first.
PROCESSES = (
    "pod-watcher",
    "spot-watcher-offers",
    "spot-watcher-notices",
    "dcgm-ingest",
    "scheduler",
    "scaler",
    "cost-tracker",
    "gateway",
)


def unpacked(folder: Path, archive: Path = EARLIER) -> Path:
    """The earlier version's code, or what it left behind."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder
