"""Plants a bug in a copy of the code and lets the simulator search for it. The working tree is never changed.

A bug is hunted with the plan check enabled, and with it disabled, so that the invariant monitor must detect it alone.
The known place is tried first, then one seed after the other: short runs, then long ones.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tests.sim.planting import Planted
from tests.sim.searching import Place, SearchResult

from gpu_autoscaler.sim.actors.policies import policy_of

ROOT = Path(__file__).resolve().parents[2]
SEEDS_COUNT = 500
HOURS, HOURS_LONG = 0.5, 2.0  # rare conditions and grown fleets occur only in long runs
LONG_EVERY = 5  # every fifth run is a long one
SECONDS = 600.0  # of CPU for one bug, with and without the plan check each; no run is started later
NOTHING_SECONDS_MAX = 1e9
PLAN_CHECK = "plan check"  # the invariant that a refused plan violates
# Planted beside a bug: the scaler skips the plan check.
UNCHECKED = Planted(
    "the plan check is skipped",
    2,
    "libs/gpu_autoscaler/core/checked_plan.py",
    "        refused = check(made, state, policy)\n",
    "        refused = check(made, state, policy)[:0]\n",
)


class Find(msgspec.Struct, frozen=True, kw_only=True):
    """Where a bug was first found, and by which invariant."""

    place: Place
    promise: str
    seeds_count: int  # runs until it was found without a known place
    seconds: float  # of CPU, of this run


class Found(msgspec.Struct, frozen=True, kw_only=True, rename={"by_monitor": "by_world"}):
    """Where one bug is known to be found."""

    by_all: Find | None = None  # None: not found
    by_monitor: Find | None = None  # with the plan check disabled


class Hunt(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the hunt for one bug."""

    name: str
    promise_attacked: int
    found: Found
    what: str = ""  # the text of the violation
    runs: int = 0
    seconds: float = 0.0  # wall time
    exceptions: int = 0  # runs that ended with an exception instead
    exception: str = ""  # the first of them


def plant(bug: Planted, root: Path) -> None:
    """Apply the changes of a bug to this copy. Raises ValueError if a text does not occur exactly once."""
    for name, right, wrong in bug.changes():
        path = root / name
        text = path.read_text(encoding="utf-8")
        if text.count(right) != 1:
            raise ValueError(f"{bug.name!r}: {name} has its text {text.count(right)} times; plant it again")
        path.write_text(text.replace(right, wrong), encoding="utf-8")


class CodeCopy:
    """A copy of the code, with bugs planted during a search."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy

    def search(
        self,
        bugs: Sequence[Planted],
        places: Sequence[Place],
        *,
        found_count: int = 1,
        seconds: float = NOTHING_SECONDS_MAX,
    ) -> list[SearchResult]:
        """Return the result of each place with these bugs, within the limits."""
        places_json = msgspec.json.encode(places).decode()
        # Compiled files are kept in the copy: most imports are the same for all bugs.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        paths = os.pathsep.join(str(self._copy / part) for part in ("libs", "services", "."))
        with self._planted(bugs):
            completed = subprocess.run(
                [sys.executable, "-m", "tests.sim.searching", places_json, str(seconds), str(found_count)],
                env={**environment, "PYTHONPATH": paths},
                cwd=self._copy,
                capture_output=True,
                text=True,
                check=False,
            )
        if completed.returncode:
            raise RuntimeError(f"{', '.join(bug.name for bug in bugs) or 'no bug'}: {completed.stderr[-2000:]}")
        return [msgspec.json.decode(line, type=SearchResult) for line in completed.stdout.splitlines()]

    @contextmanager
    def _planted(self, bugs: Sequence[Planted]) -> Iterator[None]:
        changed = {self._copy / name for bug in bugs for name, _, _ in bug.changes()}
        before = {path: (path.read_bytes(), path.stat()) for path in changed}
        try:
            for bug in bugs:
                plant(bug, self._copy)
            yield
        finally:
            for path, (text, stat) in before.items():
                path.write_bytes(text)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # its compiled file is valid again


@contextmanager
def code_copy() -> Iterator[CodeCopy]:
    """Yield a copy of the current code."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for part in ("libs", "services", "tests/sim"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        yield CodeCopy(copy)


def places_of(bug: Planted, seeds: Sequence[int], hours: float | None = None) -> list[Place]:
    """Return the places to search: the bug's profile, seeds with a suitable policy, runs of `hours` or short and long
    ones.
    """
    matching_seeds = [seed for seed in seeds if bug.where is None or bug.where(policy_of(seed))]
    return [
        Place(seed, hours or bug.hours or (HOURS_LONG if number % LONG_EVERY == LONG_EVERY - 1 else HOURS), bug.profile)
        for number, seed in enumerate(matching_seeds)
    ]


NOTHING_KNOWN = Found()


def hunt(
    bug: Planted,
    places: Sequence[Place],
    within: CodeCopy,
    *,
    known: Found = NOTHING_KNOWN,
    seconds: float = NOTHING_SECONDS_MAX,
) -> Hunt:
    """Hunt one bug: with the plan check, then by the invariant monitor alone, each at its known place first."""
    began_at = time.monotonic()
    results: list[SearchResult] = []
    by_all = _hunt((bug,), places, within, known.by_all, seconds, results)
    by_monitor = None
    if by_all is not None and by_all.promise != PLAN_CHECK:
        by_monitor = by_all  # no plan was refused before, so the run without the plan check is the same
    elif by_all is not None and (
        known.by_all is None or known.by_monitor is not None
    ):  # otherwise it is known not to be found
        by_monitor = _hunt((bug, UNCHECKED), places, within, known.by_monitor or by_all, seconds, results)
    errors = [result for result in results if result.error]
    return Hunt(
        name=bug.name,
        promise_attacked=bug.promise,
        found=Found(by_all=by_all, by_monitor=by_monitor),
        what=next((result.what for result in reversed(results) if result.is_found), ""),
        runs=len(results),
        seconds=round(time.monotonic() - began_at, 1),
        exceptions=len(errors),
        exception=errors[0].error if errors else "",
    )


def _hunt(
    bugs: Sequence[Planted],
    places: Sequence[Place],
    within: CodeCopy,
    known: Find | None,
    seconds: float,
    results: list[SearchResult],
) -> Find | None:
    """Return where it is found. The number of runs of a known place is kept."""
    if known is not None:
        results_ = within.search(bugs, (known.place,))
        results += results_
        if results_[0].is_found:
            return _find_of(results_[0], known.seeds_count)
    remaining = list(places)
    while remaining and seconds > 0.0:
        results_ = within.search(bugs, remaining, seconds=seconds)
        results += results_
        remaining = remaining[len(results_) :]
        found = results_[-1] if results_ and results_[-1].is_found else None
        if found is None:
            return None
        # A violation without the bug says nothing about the bug; `make sim` must report it.
        if not within.search((), (found.place,))[0].is_found:
            return _find_of(found, len(places) - len(remaining))
        seconds -= sum(result.seconds for result in results_)
    return None


def _find_of(result: SearchResult, seeds_count: int) -> Find:
    return Find(place=result.place, promise=result.promise, seeds_count=seeds_count, seconds=result.seconds)


def known_finds(path: Path) -> dict[str, Found]:
    """Return where each bug was found, by its name."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Found])


def learn(path: Path, hunts: Sequence[Hunt], planted: Mapping[str, Planted]) -> None:
    """Save where each bug was found; bugs that are no longer planted are removed."""
    known = {name: found for name, found in known_finds(path).items() if name in planted}
    known |= {hunt.name: hunt.found for hunt in hunts if hunt.found.by_all is not None}
    lines = (f"  {_encoded(name)}: {_encoded(found)}" for name, found in sorted(known.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()
