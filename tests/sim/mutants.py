"""`make sim-mutants`: plants each bug of `planted.py` in a copy of the code and lets the simulator look for it.

A bug is found when a promise breaks or the end is not settled; an exception in the code does not count. How it is
hunted stands in `hunting.py`; where each was found, in `found_by.json`, which `--learn` writes after each bug together
with docs/mutants.md, so that a hunt that was stopped goes on where it ended. The runs that found something are done
without any bug as well, where all promises must hold. Writes out/mutants.json; ends with 1 where a bug was not found or
the code as it is broke a promise.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import msgspec
from rich.console import Console
from rich.table import Table
from tests.sim.hunting import (
    NOTHING_KNOWN,
    ROOT,
    SECONDS,
    SEEDS_COUNT,
    CodeCopy,
    Found,
    Hunt,
    code_copy,
    hunt,
    known_finds,
    learn,
    places_of,
)
from tests.sim.mutants_page import page
from tests.sim.planted import PLANTED
from tests.sim.planting import Planted
from tests.sim.searching import Place

OUT = Path("out/mutants.json")
FOUND_BY = Path(__file__).parent / "found_by.json"
PAGE = ROOT / "docs" / "mutants.md"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of all, as out/mutants.json has it."""

    planted: int
    found: int
    found_by_world: int
    seconds: float
    bugs: tuple[Hunt, ...]
    places_without_bug: tuple[Place, ...]  # all that found something
    broken_without_bug: tuple[str, ...]


def hunt_all(
    bugs: Sequence[Planted],
    seeds: Sequence[int],
    *,
    known: Mapping[str, Found],
    hours: float | None,
    seconds: float,
    processes_count: int,
    console: Console,
    keep: Path | None = None,
) -> list[Hunt]:
    """Look for all bugs, so many at a time, each first where it is known to show; in the order of `bugs`.

    `keep`: a file that learns of each find as soon as there is one.
    """
    planted = {bug.name: bug for bug in PLANTED}
    found: dict[str, Hunt] = {}
    free: SimpleQueue[CodeCopy] = SimpleQueue()

    def look(bug: Planted) -> Hunt:
        within = free.get()
        try:
            places = places_of(bug, seeds, hours)
            return hunt(bug, places, within, known=known.get(bug.name, NOTHING_KNOWN), seconds=seconds)
        finally:
            free.put(within)

    with ExitStack() as stack:
        for _ in range(processes_count):
            free.put(stack.enter_context(code_copy()))
        pool = stack.enter_context(ThreadPoolExecutor(processes_count))
        for done in as_completed([pool.submit(look, bug) for bug in bugs]):
            one = done.result()
            found[one.name] = one
            if keep is not None:
                learn(keep, [one], planted)
                PAGE.write_text(page(PLANTED, known_finds(keep)), encoding="utf-8")
            _say(one, f"{len(found)}/{len(bugs)}", console)
    return [found[bug.name] for bug in bugs]


def _say(one: Hunt, count: str, console: Console) -> None:
    find = one.found.by_all
    alone = "" if one.found.by_world else ", by the second opinion alone"
    seen = f"seed {find.place.seed}{alone}, {one.what}" if find else f"NOT FOUND {one.exception}"
    console.print(f"{count} {one.name} ({one.runs} runs, {one.seconds:.0f} s): {seen}", highlight=False, soft_wrap=True)


def control(hunts: Sequence[Hunt]) -> tuple[tuple[Place, ...], tuple[str, ...]]:
    """Run every place that found something without a bug: what they are, and what broke there."""
    finds = [find for one in hunts for find in (one.found.by_all, one.found.by_world) if find is not None]
    places = tuple(dict.fromkeys(find.place for find in finds))
    with code_copy() as within:
        looked = within.search((), places, found_count=len(places) + 1) if places else []
    broken = (f"{one.place} without a bug: {one.what or one.error}" for one in looked if one.what or one.error)
    return places, tuple(broken)


def tell(report: Report, console: Console) -> None:
    """Print the table."""
    columns = ("planted", "attacks", "found by", "by the world alone", "world", "seed", "hours", "runs", "s")
    table = Table(*columns)
    for one in report.bugs:
        find = one.found.by_all
        seen = [each.promise if each else "NOT FOUND" for each in (find, one.found.by_world)]
        place = (find.place.profile, str(find.place.seed), f"{find.place.hours:g}") if find else ("-",) * 3
        table.add_row(one.name, str(one.promise_attacked), *seen, *place, str(one.runs), f"{one.seconds:.0f}")
    console.print(table)
    console.print(
        f"found: {report.found} of {report.planted}, {report.found_by_world} by the world alone, "
        f"in {report.seconds / 60.0:.1f} minutes",
        highlight=False,
    )
    kept = f"the {len(report.places_without_bug)} runs that found something keep every promise without a bug"
    console.print("\n".join(report.broken_without_bug) or kept, highlight=False, soft_wrap=True)


def main() -> int:
    """Look for every bug, or for those whose name has the words given."""
    parser = argparse.ArgumentParser(prog="make sim-mutants", description=__doc__)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS_COUNT, help="try so many seeds at most")
    parser.add_argument("--hours", type=float, help="cluster time of each run before it settles; short and long ones")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no run for a bug after so long")
    parser.add_argument("--only", default="", help="words in the name of a bug; `|` between several")
    parser.add_argument("--new", action="store_true", help="only bugs that were never found")
    parser.add_argument("--again", action="store_true", help="forget where they were found")
    parser.add_argument("--learn", action="store_true", help="keep where each bug was found, and write the page")
    parser.add_argument("--processes", type=int, default=1, help="so many bugs at a time")
    asked = parser.parse_args()
    console, began_at = Console(), time.monotonic()
    known = known_finds(FOUND_BY)
    bugs = [
        bug
        for bug in PLANTED
        if any(words in bug.name for words in asked.only.split("|")) and not (asked.new and bug.name in known)
    ]
    console.print(f"{len(bugs)} bugs, {sum(bug.name in known for bug in bugs)} of them found before")
    hunts = hunt_all(
        bugs,
        range(asked.first, asked.first + asked.seeds),
        known={} if asked.again else known,
        hours=asked.hours,
        seconds=asked.seconds,
        processes_count=asked.processes,
        console=console,
        keep=FOUND_BY if asked.learn else None,
    )
    places, broken = control(hunts)
    report = Report(
        planted=len(bugs),
        found=sum(one.found.by_all is not None for one in hunts),
        found_by_world=sum(one.found.by_world is not None for one in hunts),
        seconds=round(time.monotonic() - began_at, 1),
        bugs=tuple(hunts),
        places_without_bug=places,
        broken_without_bug=broken,
    )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    tell(report, console)
    return 1 if report.found < report.planted or report.broken_without_bug else 0


if __name__ == "__main__":
    sys.exit(main())
