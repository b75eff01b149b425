"""`make sim-mutants`: plants each bug of `planted.py` in a copy of the code and lets the simulator look for it.

A bug is found when a promise breaks or the end is not settled; an exception in the code does not count. It is hunted
with the second opinion switched off, so that the world's own witness has to see it, and then with it on. First where
it was found before (`found_by.json`, written by `--learn`), then in one seed after the other, for so many seconds. The
runs that found something are done without any bug as well, where all promises must hold. Writes out/mutants.json; ends
with 1 where a bug was not found or the code as it is broke a promise. The working tree is never touched.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from tests.sim.planted import PLANTED
from tests.sim.planting import Planted
from tests.sim.searching import Looked, Place

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("out/mutants.json")
FOUND_BY = Path(__file__).parent / "found_by.json"
HOURS = 2.0
SEEDS_COUNT = 500
SECONDS = 60.0  # wall time for one bug, after which no run is begun
NOTHING_SECONDS_MAX = 1e9
# Planted beside a bug: the scaler asks nobody for a second opinion.
UNCHECKED = Planted(
    "nobody is asked for a second opinion",
    2,
    "services/gpu_autoscaler_services/scaler/service.py",
    "if mistakes := check(made, state, self._policy):",
    "if mistakes := check(made, state, self._policy)[:0]:",
)


class Find(msgspec.Struct, frozen=True, kw_only=True):
    """Where a bug was found first, and by what."""

    place: Place
    promise: str
    what: str


class Hunt(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one bug."""

    name: str
    promise_attacked: int
    by_world: Find | None  # with the second opinion switched off; None: not found
    by_all: Find | None  # with it
    runs: int
    seconds: float  # wall time
    exceptions: int  # runs in which the code fell over instead
    exception: str = ""  # the first of them


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of all, as out/mutants.json has it."""

    planted: int
    found: int
    found_by_world: int
    seconds: float
    bugs: tuple[Hunt, ...]
    places_without_bug: tuple[Place, ...]  # all that found something
    broken_without_bug: tuple[str, ...]


def plant(bug: Planted, root: Path) -> None:
    """Change the one place in this copy. Raises ValueError where the text is not there exactly once."""
    path = root / bug.path
    text = path.read_text(encoding="utf-8")
    if text.count(bug.right) != 1:
        raise ValueError(f"{bug.name!r}: {bug.path} has its text {text.count(bug.right)} times; plant it anew")
    path.write_text(text.replace(bug.right, bug.wrong), encoding="utf-8")


def search(
    bugs: Sequence[Planted], places: Sequence[Place], *, found_count: int = 1, seconds: float = NOTHING_SECONDS_MAX
) -> list[Looked]:
    """Return what each place showed in a copy of the code with these bugs, as far as the limits let it look."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for part in ("libs", "services"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for bug in bugs:
            plant(bug, copy)
        paths = os.pathsep.join(map(str, (copy / "libs", copy / "services", ROOT)))
        asked = msgspec.json.encode(places).decode()
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim.searching", asked, str(seconds), str(found_count)],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=copy,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{', '.join(bug.name for bug in bugs) or 'no bug'}: {done.stderr[-2000:]}")
        return [msgspec.json.decode(line, type=Looked) for line in done.stdout.splitlines()]


def hunt(bug: Planted, places: Sequence[Place], *, seconds: float = NOTHING_SECONDS_MAX) -> Hunt:
    """Look for one bug: by the world alone, then by all, first where the world has seen it."""
    began_at = time.monotonic()
    alone = search((bug, UNCHECKED), places, seconds=seconds)
    by_world = _find(alone)
    # Until a plan is refused both runs are the same one, so what the world sees is seen here as well.
    together = search((bug,), places if by_world is None else (by_world.place,), seconds=seconds)
    errors = [one for one in (*alone, *together) if one.error]
    return Hunt(
        name=bug.name,
        promise_attacked=bug.promise,
        by_world=by_world,
        by_all=_find(together),
        runs=len(alone) + len(together),
        seconds=round(time.monotonic() - began_at, 1),
        exceptions=len(errors),
        exception=errors[0].error if errors else "",
    )


def _find(looked: Sequence[Looked]) -> Find | None:
    found = (Find(place=one.place, promise=one.promise, what=one.what) for one in looked if one.is_found)
    return next(found, None)


def hunt_all(
    bugs: Sequence[Planted],
    places: Sequence[Place],
    *,
    known: Mapping[str, Place],
    seconds: float,
    processes_count: int,
    console: Console,
) -> list[Hunt]:
    """Look for all bugs, on so many cores, each first where it is known to show; in the order of `bugs`."""
    found: dict[str, Hunt] = {}
    with ThreadPoolExecutor(processes_count) as pool:
        asked = [pool.submit(hunt, bug, _places_of(bug, places, known.get(bug.name)), seconds=seconds) for bug in bugs]
        for done in as_completed(asked):
            one = done.result()
            found[one.name] = one
            find = one.by_world or one.by_all
            seen = f"seed {find.place.seed}, {find.what}" if find else "not found " + one.exception
            console.print(f"{len(found)}/{len(bugs)} {one.name}: {seen}", highlight=False, soft_wrap=True)
    return [found[bug.name] for bug in bugs]


def _places_of(bug: Planted, places: Sequence[Place], known: Place | None) -> list[Place]:
    in_its_world = [msgspec.structs.replace(place, world=bug.world) for place in places]
    return in_its_world if known is None else [known, *in_its_world]


def tell(report: Report, console: Console) -> None:
    """Print the table."""
    columns = (
        "planted",
        "attacks",
        "by the world alone",
        "with the second opinion",
        "world",
        "seed",
        "hours",
        "runs",
        "s",
    )
    table = Table(*columns)
    for one in report.bugs:
        find = one.by_world or one.by_all
        seen = [each.promise if each else "NOT FOUND" for each in (one.by_world, one.by_all)]
        place = (find.place.world, str(find.place.seed), f"{find.place.hours:g}") if find else ("-",) * 3
        table.add_row(one.name, str(one.promise_attacked), *seen, *place, str(one.runs), f"{one.seconds:.0f}")
    console.print(table)
    console.print(
        f"found: {report.found} of {report.planted}, {report.found_by_world} by the world alone, "
        f"in {report.seconds / 60.0:.1f} minutes",
        highlight=False,
    )
    kept = f"the {len(report.places_without_bug)} runs that found something keep every promise without a bug"
    console.print("\n".join(report.broken_without_bug) or kept, highlight=False)


def known_places() -> dict[str, Place]:
    """Where each bug was found before, by its name."""
    return msgspec.json.decode(FOUND_BY.read_bytes(), type=dict[str, Place])


def encoded(told: object) -> str:
    """As JSON."""
    return msgspec.json.encode(told).decode()


def learn(hunts: Sequence[Hunt]) -> None:
    """Keep where each bug was found; of those that are planted no more nothing is kept."""
    places = {name: place for name, place in known_places().items() if any(bug.name == name for bug in PLANTED)}
    for one in hunts:
        if (find := one.by_world or one.by_all) is not None:
            places[one.name] = find.place
    lines = (f"  {encoded(name)}: {encoded(place)}" for name, place in places.items())
    FOUND_BY.write_text("{\n" + ",\n".join(sorted(lines)) + "\n}\n", encoding="utf-8")


def main() -> int:
    """Look for every bug, or for those whose name has the words given."""
    parser = argparse.ArgumentParser(prog="make sim-mutants", description=__doc__)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS_COUNT, help="try so many seeds at most")
    parser.add_argument("--hours", type=float, default=HOURS, help="cluster time of each run before it settles")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no run for a bug after so long")
    parser.add_argument("--only", default="", help="words in the name of a bug; `|` between several")
    parser.add_argument("--learn", action="store_true", help="keep where each bug was found")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="all cores if not given")
    asked = parser.parse_args()
    console, began_at = Console(), time.monotonic()
    bugs = [bug for bug in PLANTED if any(words in bug.name for words in asked.only.split("|"))]
    minutes_max = 2 * len(bugs) * asked.seconds / 60.0 / asked.processes
    console.print(f"{len(bugs)} bugs, at most {minutes_max:.0f} minutes, and what was begun until then")
    places = [Place(seed, asked.hours) for seed in range(asked.first, asked.first + asked.seeds)]
    hunts = hunt_all(
        bugs, places, known=known_places(), seconds=asked.seconds, processes_count=asked.processes, console=console
    )
    if asked.learn:
        learn(hunts)
    finds = [find for one in hunts if (find := one.by_world or one.by_all) is not None]
    control_places = tuple(dict.fromkeys(find.place for find in finds))
    control = search((), control_places, found_count=len(control_places)) if control_places else []
    report = Report(
        planted=len(bugs),
        found=len(finds),
        found_by_world=sum(one.by_world is not None for one in hunts),
        seconds=round(time.monotonic() - began_at, 1),
        bugs=tuple(hunts),
        places_without_bug=control_places,
        broken_without_bug=tuple(
            f"seed {one.place.seed} without a bug: {one.what or one.error}" for one in control if one.what or one.error
        ),
    )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    tell(report, console)
    return 1 if report.found < report.planted or report.broken_without_bug else 0


if __name__ == "__main__":
    sys.exit(main())
