"""`make sim-mutants`: plants each bug of `planted.py` in a copy of the code and lets the simulator look for it.

A bug is found when a promise breaks or the end is not settled; an exception in the code does not count. The seeds that
found something are run without any bug as well, where all promises must hold. Writes out/mutants.json; ends with 1
where a bug was not found or the code as it is broke a promise. The working tree is never touched.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from tests.sim.planted import PLANTED, Planted
from tests.sim.searching import Looked

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("out/mutants.json")
HOURS = 2.0
SEEDS_COUNT = 500
FOUND_COUNT = 3  # of one bug: then it is known well enough


class Hunt(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one bug."""

    name: str
    promise_attacked: int
    seeds_tried: int
    seeds_found: tuple[int, ...]
    promise: str  # the one that broke first; empty: none did
    what: str
    exceptions: int  # seeds in which the code fell over instead
    exception: str = ""  # the first of them


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of all, as out/mutants.json has it."""

    hours: float
    seeds_max: int
    planted: int
    found: int
    bugs: tuple[Hunt, ...]
    seeds_without_bug: tuple[int, ...]  # all that found something
    broken_without_bug: tuple[str, ...]


def plant(bug: Planted, root: Path) -> None:
    """Change the one place in this copy. Raises ValueError where the text is not there exactly once."""
    path = root / bug.path
    text = path.read_text(encoding="utf-8")
    if text.count(bug.right) != 1:
        raise ValueError(f"{bug.name!r}: {bug.path} has its text {text.count(bug.right)} times; plant it anew")
    path.write_text(text.replace(bug.right, bug.wrong), encoding="utf-8")


def search(bug: Planted | None, seeds: str, *, hours: float, found_count: int) -> list[Looked]:
    """Return what each seed showed in a copy of the code with this bug, or with none."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for part in ("libs", "services"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        if bug is not None:
            plant(bug, copy)
        paths = os.pathsep.join(map(str, (copy / "libs", copy / "services", ROOT)))
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim.searching", seeds, str(hours), str(found_count)],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=copy,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{bug.name if bug else 'no bug'}: {done.stderr[-2000:]}")
        return [msgspec.json.decode(line, type=Looked) for line in done.stdout.splitlines()]


def hunt(bug: Planted, seeds: str, *, hours: float, found_count: int) -> Hunt:
    """Look for one bug."""
    looked = search(bug, seeds, hours=hours, found_count=found_count)
    finds = [one for one in looked if one.is_found]
    errors = [one for one in looked if one.error]
    return Hunt(
        name=bug.name,
        promise_attacked=bug.promise,
        seeds_tried=len(looked),
        seeds_found=tuple(one.seed for one in finds),
        promise=finds[0].promise if finds else "",
        what=finds[0].what if finds else "",
        exceptions=len(errors),
        exception=errors[0].error if errors else "",
    )


def hunt_all(
    bugs: Sequence[Planted], seeds: str, *, hours: float, found_count: int, processes_count: int, console: Console
) -> list[Hunt]:
    """Look for all bugs, on so many cores; in the order of `bugs`."""
    found: dict[str, Hunt] = {}
    with ThreadPoolExecutor(processes_count) as pool:
        asked = [pool.submit(hunt, bug, seeds, hours=hours, found_count=found_count) for bug in bugs]
        for done in as_completed(asked):
            one = done.result()
            found[one.name] = one
            seen = f"seed {one.seeds_found[0]}, {one.what}" if one.seeds_found else "not found " + one.exception
            console.print(f"{len(found)}/{len(bugs)} {one.name}: {seen}", highlight=False, soft_wrap=True)
    return [found[bug.name] for bug in bugs]


def tell(report: Report, console: Console) -> None:
    """Print the table."""
    table = Table("planted", "attacks", "seeds", "found in", "first", "by the promise", "exceptions")
    for one in report.bugs:
        first = str(one.seeds_found[0]) if one.seeds_found else "-"
        counts = (str(one.seeds_tried), str(len(one.seeds_found)), first)
        table.add_row(one.name, str(one.promise_attacked), *counts, one.promise or "NOT FOUND", str(one.exceptions))
    console.print(table)
    console.print(f"found: {report.found} of {report.planted}", highlight=False)
    kept = f"the {len(report.seeds_without_bug)} seeds that found something keep every promise without a bug"
    console.print("\n".join(report.broken_without_bug) or kept, highlight=False)


def main() -> int:
    """Look for every bug, or for those whose name has the words given."""
    parser = argparse.ArgumentParser(prog="make sim-mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS_COUNT, help="try so many seeds at most, from 1 on")
    parser.add_argument("--hours", type=float, default=HOURS, help="cluster time of each run before it settles")
    parser.add_argument("--found", type=int, default=FOUND_COUNT, help="be content with so many finds of a bug")
    parser.add_argument("--only", default="", help="words in the name of a bug; `|` between several")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="all cores if not given")
    asked = parser.parse_args()
    console = Console()
    bugs = [bug for bug in PLANTED if any(words in bug.name for words in asked.only.split("|"))]
    hunts = hunt_all(
        bugs,
        f"1-{asked.seeds}",
        hours=asked.hours,
        found_count=asked.found,
        processes_count=asked.processes,
        console=console,
    )
    seeds = sorted({seed for one in hunts for seed in one.seeds_found})
    control = search(None, ",".join(map(str, seeds)), hours=asked.hours, found_count=len(seeds)) if seeds else []
    report = Report(
        hours=asked.hours,
        seeds_max=asked.seeds,
        planted=len(bugs),
        found=sum(bool(one.seeds_found) for one in hunts),
        bugs=tuple(hunts),
        seeds_without_bug=tuple(seeds),
        broken_without_bug=tuple(
            f"seed {one.seed} without a bug: {one.what or one.error}" for one in control if one.what or one.error
        ),
    )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    tell(report, console)
    return 1 if report.found < report.planted or report.broken_without_bug else 0


if __name__ == "__main__":
    sys.exit(main())
