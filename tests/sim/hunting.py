"""Plants a bug in a copy of the code and lets the simulator look for it. The working tree is never touched.

A bug is hunted with the second opinion on, and with it off, so that the world's own witness has to see it alone. First
where it was found before, then in one seed after the other: short runs, then long ones.
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
HOURS, HOURS_LONG = 0.5, 2.0  # what comes seldom, or needs a fleet that has grown, shows in the long ones alone
LONG_EACH = 5  # one run of so many is a long one
SECONDS = 600.0  # of CPU for one bug with the second opinion, and once more without, after which no run is begun
NOTHING_SECONDS_MAX = 1e9
SECOND_OPINION = "the second opinion"  # the promise that a refused plan breaks
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
    seeds_count: int  # runs that it took when it was looked for without knowing where
    seconds: float  # of CPU, of this run


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one bug."""

    by_all: Find | None = None  # None: not found
    by_world: Find | None = None  # with the second opinion switched off


class Hunt(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one bug."""

    name: str
    promise_attacked: int
    found: Found
    what: str = ""  # the promise's own words
    runs: int = 0
    seconds: float = 0.0  # wall time
    exceptions: int = 0  # runs in which the code fell over instead
    exception: str = ""  # the first of them


def plant(bug: Planted, root: Path) -> None:
    """Change its places in this copy. Raises ValueError where a text is not there exactly once."""
    for name, right, wrong in bug.changes():
        path = root / name
        text = path.read_text(encoding="utf-8")
        if text.count(right) != 1:
            raise ValueError(f"{bug.name!r}: {name} has its text {text.count(right)} times; plant it anew")
        path.write_text(text.replace(right, wrong), encoding="utf-8")


class CodeCopy:
    """A copy of the code, in which bugs stand for as long as somebody looks for them."""

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
        """Return what each place showed with these bugs, as far as the limits let it look."""
        asked = msgspec.json.encode(places).decode()
        # Compiled files are kept in the copy: most of what is imported is the same for all bugs.
        known = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        paths = os.pathsep.join(str(self._copy / part) for part in ("libs", "services", "."))
        with self._planted(bugs):
            done = subprocess.run(
                [sys.executable, "-m", "tests.sim.searching", asked, str(seconds), str(found_count)],
                env={**known, "PYTHONPATH": paths},
                cwd=self._copy,
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"{', '.join(bug.name for bug in bugs) or 'no bug'}: {done.stderr[-2000:]}")
        return [msgspec.json.decode(line, type=SearchResult) for line in done.stdout.splitlines()]

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
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # what was compiled of it is right again


@contextmanager
def code_copy() -> Iterator[CodeCopy]:
    """A copy of the code as it stands."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for part in ("libs", "services", "tests/sim"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        yield CodeCopy(copy)


def places_of(bug: Planted, seeds: Sequence[int], hours: float | None = None) -> list[Place]:
    """Where to look for a bug: in its world, under policies that let it show, in runs of `hours` or short and long."""
    right = [seed for seed in seeds if bug.where is None or bug.where(policy_of(seed))]
    return [
        Place(seed, hours or bug.hours or (HOURS_LONG if number % LONG_EACH == LONG_EACH - 1 else HOURS), bug.profile)
        for number, seed in enumerate(right)
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
    """Look for one bug: by all that there is, then by the world alone, first where each has seen it."""
    began_at = time.monotonic()
    told: list[SearchResult] = []
    by_all = _hunt((bug,), places, within, known.by_all, seconds, told)
    by_world = None
    if by_all is not None and by_all.promise != SECOND_OPINION:
        by_world = by_all  # no plan was refused until then, so that without the second opinion it is the same run
    elif by_all is not None and (known.by_all is None or known.by_world is not None):  # else it is known to see nothing
        by_world = _hunt((bug, UNCHECKED), places, within, known.by_world or by_all, seconds, told)
    errors = [one for one in told if one.error]
    return Hunt(
        name=bug.name,
        promise_attacked=bug.promise,
        found=Found(by_all=by_all, by_world=by_world),
        what=next((one.what for one in reversed(told) if one.is_found), ""),
        runs=len(told),
        seconds=round(time.monotonic() - began_at, 1),
        exceptions=len(errors),
        exception=errors[0].error if errors else "",
    )


def hunt_alone(bug: Planted, places: Sequence[Place], within: CodeCopy, known: Find | None) -> Find | None:
    """Return where the world alone sees it; None: nowhere."""
    return _hunt((bug, UNCHECKED), places, within, known, NOTHING_SECONDS_MAX, [])


def _hunt(
    bugs: Sequence[Planted],
    places: Sequence[Place],
    within: CodeCopy,
    known: Find | None,
    seconds: float,
    told: list[SearchResult],
) -> Find | None:
    """Return where it shows. Of a place that was known the number of runs stays what it was when it was found."""
    if known is not None:
        looked = within.search(bugs, (known.place,))
        told += looked
        if looked[0].is_found:
            return _find_of(looked[0], known.seeds_count)
    left = list(places)
    while left and seconds > 0.0:
        looked = within.search(bugs, left, seconds=seconds)
        told += looked
        left = left[len(looked) :]
        found = looked[-1] if looked and looked[-1].is_found else None
        if found is None:
            return None
        # What the code as it is breaks as well says nothing about the bug; `make sim` has to tell of that.
        if not within.search((), (found.place,))[0].is_found:
            return _find_of(found, len(places) - len(left))
        seconds -= sum(one.seconds for one in looked)
    return None


def _find_of(looked: SearchResult, seeds_count: int) -> Find:
    return Find(place=looked.place, promise=looked.promise, seeds_count=seeds_count, seconds=looked.seconds)


def known_finds(path: Path) -> dict[str, Found]:
    """Where each bug was found before, by its name."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Found])


def learn(path: Path, hunts: Sequence[Hunt], planted: Mapping[str, Planted]) -> None:
    """Keep where each bug was found; of those that are planted no more nothing is kept."""
    known = {name: found for name, found in known_finds(path).items() if name in planted}
    known |= {one.name: one.found for one in hunts if one.found.by_all is not None}
    lines = (f"  {_encoded(name)}: {_encoded(found)}" for name, found in sorted(known.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _encoded(told: object) -> str:
    return msgspec.json.encode(told).decode()
