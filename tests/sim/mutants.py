"""`make sim-mutants`: plants each bug of `planted.py` in a copy of the code and lets the simulator search for it.

A bug is found when an invariant is violated or the end is not quiescent; an exception does not count. `hunting.py`
describes the search. `--learn` saves where each bug was found in `found_by.json` and writes docs/mutants.md after each
bug, so that an interrupted hunt can be continued. The runs that found a bug are repeated without it, where all
invariants must hold. Writes out/mutants.json; exits with 1 if a bug was not found or the unchanged code violated an
invariant.
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
    """Results of all bugs, written to out/mutants.json."""

    planted: int
    found: int
    found_by_world: int
    seconds: float
    bugs: tuple[Hunt, ...]
    places_without_bug: tuple[Place, ...]  # all places that found a bug
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
    """Hunt all bugs in parallel, each at its known place first; return the results in the order of `bugs`.

    `keep`: a file that is updated after each find.
    """
    planted = {bug.name: bug for bug in PLANTED}
    hunted: dict[str, Hunt] = {}
    free: SimpleQueue[CodeCopy] = SimpleQueue()

    def hunt_next(bug: Planted) -> Hunt:
        copy = free.get()
        try:
            places = places_of(bug, seeds, hours)
            return hunt(bug, places, copy, known=known.get(bug.name, NOTHING_KNOWN), seconds=seconds)
        finally:
            free.put(copy)

    with ExitStack() as stack:
        for _ in range(processes_count):
            free.put(stack.enter_context(code_copy()))
        pool = stack.enter_context(ThreadPoolExecutor(processes_count))
        for future in as_completed([pool.submit(hunt_next, bug) for bug in bugs]):
            hunt_result = future.result()
            hunted[hunt_result.name] = hunt_result
            if keep is not None:
                learn(keep, [hunt_result], planted)
                PAGE.write_text(page(PLANTED, known_finds(keep)), encoding="utf-8")
            _print_result(hunt_result, f"{len(hunted)}/{len(bugs)}", console)
    return [hunted[bug.name] for bug in bugs]


def _print_result(hunt_result: Hunt, count: str, console: Console) -> None:
    find = hunt_result.found.by_all
    alone = "" if hunt_result.found.by_monitor else ", by the plan check alone"
    shown = f"seed {find.place.seed}{alone}, {hunt_result.what}" if find else f"NOT FOUND {hunt_result.exception}"
    console.print(
        f"{count} {hunt_result.name} ({hunt_result.runs} runs, {hunt_result.seconds:.0f} s): {shown}",
        highlight=False,
        soft_wrap=True,
    )


def control(hunts: Sequence[Hunt]) -> tuple[tuple[Place, ...], tuple[str, ...]]:
    """Run every place that found a bug without the bug; return the places and their violations."""
    finds = [
        find
        for hunt_result in hunts
        for find in (hunt_result.found.by_all, hunt_result.found.by_monitor)
        if find is not None
    ]
    places = tuple(dict.fromkeys(find.place for find in finds))
    with code_copy() as copy:
        results = copy.search((), places, found_count=len(places) + 1) if places else []
    broken = (
        f"{hunt_result.place} without a bug: {hunt_result.what or hunt_result.error}"
        for hunt_result in results
        if hunt_result.what or hunt_result.error
    )
    return places, tuple(broken)


def print_report(report: Report, console: Console) -> None:
    """Print the table."""
    columns = ("planted", "attacks", "found by", "by the monitor alone", "profile", "seed", "hours", "runs", "s")
    table = Table(*columns)
    for hunt_result in report.bugs:
        find = hunt_result.found.by_all
        shown = [entry.promise if entry else "NOT FOUND" for entry in (find, hunt_result.found.by_monitor)]
        place = (find.place.profile, str(find.place.seed), f"{find.place.hours:g}") if find else ("-",) * 3
        table.add_row(
            hunt_result.name,
            str(hunt_result.promise_attacked),
            *shown,
            *place,
            str(hunt_result.runs),
            f"{hunt_result.seconds:.0f}",
        )
    console.print(table)
    console.print(
        f"found: {report.found} of {report.planted}, {report.found_by_world} by the monitor alone, "
        f"in {report.seconds / 60.0:.1f} minutes",
        highlight=False,
    )
    summary = f"the {len(report.places_without_bug)} runs that found a bug violate nothing without it"
    console.print("\n".join(report.broken_without_bug) or summary, highlight=False, soft_wrap=True)


def main() -> int:
    """Hunt every bug, or those whose name contains the given words."""
    parser = argparse.ArgumentParser(prog="make sim-mutants", description=__doc__)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS_COUNT, help="number of seeds to try at most")
    parser.add_argument("--hours", type=float, help="hours with faults of each run (default: short and long runs)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="start no run for a bug after this time")
    parser.add_argument("--only", default="", help="only bugs whose name contains these words, separated by `|`")
    parser.add_argument("--new", action="store_true", help="only bugs that were never found")
    parser.add_argument("--again", action="store_true", help="ignore the known places")
    parser.add_argument("--learn", action="store_true", help="save where each bug was found, and write the page")
    parser.add_argument("--processes", type=int, default=1, help="bugs hunted in parallel")
    arguments = parser.parse_args()
    console, began_at = Console(), time.monotonic()
    known = known_finds(FOUND_BY)
    bugs = [
        bug
        for bug in PLANTED
        if any(words in bug.name for words in arguments.only.split("|")) and not (arguments.new and bug.name in known)
    ]
    console.print(f"{len(bugs)} bugs, {sum(bug.name in known for bug in bugs)} of them found before")
    hunts = hunt_all(
        bugs,
        range(arguments.first, arguments.first + arguments.seeds),
        known={} if arguments.again else known,
        hours=arguments.hours,
        seconds=arguments.seconds,
        processes_count=arguments.processes,
        console=console,
        keep=FOUND_BY if arguments.learn else None,
    )
    places, broken = control(hunts)
    report = Report(
        planted=len(bugs),
        found=sum(hunt_result.found.by_all is not None for hunt_result in hunts),
        found_by_world=sum(hunt_result.found.by_monitor is not None for hunt_result in hunts),
        seconds=round(time.monotonic() - began_at, 1),
        bugs=tuple(hunts),
        places_without_bug=places,
        broken_without_bug=broken,
    )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    print_report(report, console)
    return 1 if report.found < report.planted or report.broken_without_bug else 0


if __name__ == "__main__":
    sys.exit(main())
