"""docs/mutants.md: every planted bug, and what found it. Written by `make sim-mutants ARGS=--learn`, never by hand."""

from collections.abc import Iterator, Mapping, Sequence

from tests.sim.hunting import Found
from tests.sim.planting import Planted

PROMISES = {
    1: "No accepted job is lost",
    2: "Never two launches for one action, never more than the limits",
    3: "Nothing is disturbed that must not be, and never on missing data",
    4: "A notice is answered",
    5: "The ledger is the bill, and no limit of money is passed",
    6: "A recorded plan can be recomputed",
    7: "With everything of the broker lost, the system rebuilds",
    8: "A fleet that reads all zero is a broken sensor",
}
_HEAD = """# Planted bugs

The simulator can fail. Each line below is one small change of the code as it stands that breaks a promise
(`tests/sim/planted.py`); `make sim-mutants` plants one at a time in a copy of the code and runs worlds until a promise
of the world's own witness breaks, or the end does not settle. An exception does not count. This page is written by
`make sim-mutants ARGS=--learn`.

- **found by** is what broke with everything in place. *The second opinion* is `core/check/plan_check.py`, which refuses a plan.
- **by the world alone** is what broke when nobody is asked for a second opinion. A dash: what the bug would do never
  reaches the world in a way that breaks a promise, or was not seen to; the second opinion is what stands between.
- **runs** is how many it took to find it without knowing where to look. The run is done once more by
  `make sim-mutants ARGS='--only "NAME"'`.
"""


def page(bugs: Sequence[Planted], known: Mapping[str, Found]) -> str:
    """Return the page."""
    return "\n".join((_HEAD, *_sums(bugs, known), *_tables(bugs, known)))


def _sums(bugs: Sequence[Planted], known: Mapping[str, Found]) -> Iterator[str]:
    found = [known[bug.name] for bug in bugs if bug.name in known]
    by_world = sum(one.by_world is not None for one in found)
    yield f"{len(bugs)} bugs are planted, {len(found)} are found, {by_world} of them by the world alone."
    yield ""


def _tables(bugs: Sequence[Planted], known: Mapping[str, Found]) -> Iterator[str]:
    for number, promise in PROMISES.items():
        yield f"## {number}. {promise}"
        yield ""
        yield "| bug | where | found by | by the world alone | world, seed, hours | runs |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for bug in bugs:
            if bug.promise == number:
                yield _row(bug, known.get(bug.name))
        yield ""


def _row(bug: Planted, found: Found | None) -> str:
    where = f"`{bug.path.rsplit('/', 1)[-1]}`"
    if found is None or found.by_all is None:
        return f"| {bug.name} | {where} | not found | - | - | - |"
    find = found.by_world or found.by_all
    place = f"{find.place.profile}, {find.place.seed}, {find.place.hours:g}"
    alone = "-" if found.by_world is None else found.by_world.promise
    return f"| {bug.name} | {where} | {found.by_all.promise} | {alone} | {place} | {found.by_all.seeds_count} |"
