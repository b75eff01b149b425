"""The hunt for planted bugs works: it finds what is there, finds nothing where nothing is, and never counts a crash."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sim.hunting import (
    HOURS,
    ROOT,
    CodeCopy,
    Find,
    Found,
    Hunt,
    code_copy,
    hunt,
    hunt_alone,
    known_finds,
    learn,
    places_of,
    plant,
)
from tests.sim.mutants import FOUND_BY, PAGE
from tests.sim.mutants_page import PROMISES, page
from tests.sim.planted import PLANTED
from tests.sim.planting import Planted
from tests.sim.searching import Place

from gpu_autoscaler.sim.actors.policies import policy_of

KNOWN = known_finds(FOUND_BY)
PLACE = Place(1, 0.5, "calm")
CRASH = Planted(
    "the plan cannot be made",
    2,
    "libs/gpu_autoscaler/core/plan.py",
    "def plan(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Plan:\n",
    "def plan(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Plan:\n    raise KeyError(as_of)\n\n",
)


def cheapest(promise: int) -> list[Planted]:
    """Bugs that attack the promise, those first that were found at least cost; `make sim-mutants` looks for all."""
    return sorted((bug for bug in PLANTED if bug.promise == promise), key=lambda bug: _seconds(KNOWN.get(bug.name)))


def _seconds(found: Found | None) -> float:
    return float("inf") if found is None or found.by_world is None else found.by_world.seconds


@pytest.fixture(scope="module")
def within() -> Iterator[CodeCopy]:
    """A copy of the code, the same for all."""
    with code_copy() as copy:
        yield copy


@pytest.mark.timeout(600)
@pytest.mark.parametrize("promise", PROMISES)
def test_the_world_alone_finds_a_bug_of_each_promise(promise: int, within: CodeCopy) -> None:
    """Where it was found before, or in a few other seeds, with nobody to refuse a plan; one of three bugs, as a change
    of the code gives each seed another story."""
    for bug in cheapest(promise)[:3]:
        before, known = (ROOT / bug.path).read_bytes(), KNOWN.get(bug.name)
        found = hunt_alone(bug, places_of(bug, range(1, 5), HOURS), within, None if known is None else known.by_world)
        assert (ROOT / bug.path).read_bytes() == before
        if found is not None:
            return
    pytest.fail(f"the simulator does not see that promise {promise} breaks")


def test_code_without_a_bug_keeps_what_a_bug_breaks(within: CodeCopy) -> None:
    """Else a find would say nothing about the bug."""
    assert [one for one in within.search((), (PLACE,)) if one.promise or one.error] == []


def test_a_bug_that_only_raises_is_not_found(within: CodeCopy) -> None:
    """An exception says that code is broken, not that a promise is."""
    looked = hunt(CRASH, (PLACE,), within)
    assert looked.found == Found()
    assert looked.exceptions == 1
    assert "KeyError" in looked.exception


def test_a_bug_that_has_lost_its_place_is_told(tmp_path: Path) -> None:
    """A hunt that plants nothing would call the simulator blind."""
    path = tmp_path / "code.py"
    path.write_text("one = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has its text 0 times"):
        plant(Planted("two", 1, "code.py", "two = 2", ""), tmp_path)


def test_every_promise_is_attacked() -> None:
    """Each promise has bugs that would break it; names say which is which."""
    assert {bug.promise for bug in PLANTED} == set(PROMISES)
    assert len({bug.name for bug in PLANTED}) == len(PLANTED) >= 25


def test_a_bug_is_looked_for_where_it_can_show() -> None:
    """Seeds whose policy has no such limit tell nothing of a bug in it; all that are tried have one."""
    bug = next(bug for bug in PLANTED if bug.name == "a zone's limit is not counted")
    places = places_of(bug, range(1, 51))
    assert 0 < len(places) < 50
    assert all(policy_of(place.seed).limits.zones for place in places)


def test_a_hunt_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """What was found is kept after each bug; a bug that is planted no more is forgotten."""
    path, (one, other, *_) = tmp_path / "found.json", PLANTED
    path.write_text('{"a bug of last year": {"by_all": null}}', encoding="utf-8")
    find = Find(place=PLACE, promise="limits", seeds_count=3, seconds=1.0)
    for bug in (one, other):
        hunted = Hunt(name=bug.name, promise_attacked=bug.promise, found=Found(by_all=find))
        learn(path, [hunted], {bug.name: bug for bug in PLANTED})
    assert known_finds(path) == {bug.name: Found(by_all=find) for bug in (one, other)}


def test_the_page_says_what_is_known() -> None:
    """`make sim-mutants ARGS=--learn` writes it with each find."""
    assert PAGE.read_text(encoding="utf-8") == page(PLANTED, KNOWN)
    assert known_finds(FOUND_BY).keys() <= {bug.name for bug in PLANTED}
