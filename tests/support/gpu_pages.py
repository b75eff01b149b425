"""Pages and figures that were read from a real GPU (`tests/unit/dcgm/h200`)."""

import csv
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "unit/dcgm/h200"
PHASES = ("idle", "load", "half", "memory")
PAGE_SECONDS = 10


def pages(phase: str) -> list[str]:
    """The pages of a phase's minute."""
    return (FOLDER / f"{phase}.txt").read_text(encoding="utf-8").split("# EOF\n")[:-1]


def smi_rows(phase: str) -> list[dict[str, float]]:
    """What nvidia-smi answered right after each page."""
    with (FOLDER / "nvidia-smi.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("phase") == phase]
    return [{name: float(value) for name, value in row.items()} for row in rows]
