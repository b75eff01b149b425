"""Measures memory, processor time and disk of the processes under soak. Source: Linux `proc(5)`."""

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.soak.judge import Level

_CLOCK_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
MEBIBYTE = 1024 * 1024
SAMPLES_COUNT_MIN = 6


class Measurements:
    """Samples of each process, by name."""

    def __init__(self) -> None:
        self.cpu_seconds: defaultdict[str, float] = defaultdict(float)  # over all lives of the process
        self.disk_mib: list[tuple[float, float]] = []  # seconds, MiB
        self.fill_max: dict[str, float] = {}  # by stream: bytes stored, of those allowed
        self._rss: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._cpu: dict[tuple[str, int], float] = {}

    def sample(self, seconds: float, pids: Mapping[str, int | None]) -> None:
        """Take a sample of each living process."""
        for name, pid in pids.items():
            if pid is None:
                continue
            try:
                rss, cpu = _resident_mib(pid), _processor_seconds(pid)
            except (OSError, ValueError, IndexError, StopIteration):
                continue  # it has just ended
            self._rss[name].append((seconds, rss))
            self.cpu_seconds[name] += max(0.0, cpu - self._cpu.get((name, pid), 0.0))
            self._cpu[name, pid] = cpu

    def samples(self) -> dict[str, list[tuple[float, float]]]:
        """Return all samples: seconds and MiB of each process, and of the disk."""
        return {**self._rss, "disk": self.disk_mib}

    def rss_mib(self, from_seconds: float) -> dict[str, Level]:
        """Return the level of the memory of each process, where enough samples were taken."""
        levels = {name: _level(samples, from_seconds) for name, samples in sorted(self._rss.items())}
        return {name: level for name, level in levels.items() if level is not None}

    def disk_level(self, from_seconds: float) -> Level:
        """Return the level of the disk."""
        return _level(self.disk_mib, from_seconds) or Level(start=0.0, end=0.0)


def _level(samples: Sequence[tuple[float, float]], from_seconds: float) -> Level | None:
    """Return the highest of the first half, and the median of the last third: a process that has just started, and
    one that has just released memory, has less than it needs."""
    measured = [mib for seconds, mib in samples if seconds >= from_seconds]
    if len(measured) < SAMPLES_COUNT_MIN:
        return None
    start, end = measured[: len(measured) // 2], measured[-(len(measured) // 3) :]
    return Level(start=max(start), end=statistics.median(end))


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_SECOND


def folder_mib(folder: Path, without: str = "") -> float:
    """Return the size of all files below the folder; without those below a folder of this name."""
    total = 0
    for place, folders, files in os.walk(folder, onerror=None):
        folders[:] = [name for name in folders if name != without]
        for name in files:
            try:
                total += (Path(place) / name).stat().st_size
            except OSError:
                continue  # removed meanwhile
    return total / MEBIBYTE
