"""The hunt for planted bugs works: it finds them, finds nothing without a bug, and never counts an exception."""

from collections.abc import Iterable, Iterator, Sequence
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
    known_finds,
    learn,
    places_of,
    plant,
)
from tests.sim.mutants import FOUND_BY, PAGE
from tests.sim.mutants_page import FAILURES_SWEPT, FAILURES_TESTED, PROMISES, named_tests, page
from tests.sim.planted import PLANTED
from tests.sim.planting import Planted
from tests.sim.searching import Place

from gpu_autoscaler.sim.actors.policies import policy_of

KNOWN = known_finds(FOUND_BY)
SWEPT = frozenset(name for names in FAILURES_SWEPT.values() for name in names)
PLACE = Place(1, 0.5, "calm")
CRASH = Planted(
    "the plan cannot be made",
    2,
    "libs/gpu_autoscaler/core/plan.py",
    "    draft = Draft.start(state, as_of, policy, rejected)\n",
    "    raise KeyError(as_of)\n",
)


def cheapest(bugs: Iterable[Planted]) -> list[Planted]:
    """Return the bugs, those found at least cost first; `make sim-mutants` hunts all."""
    return sorted(bugs, key=lambda bug: _seconds(KNOWN.get(bug.name)))


def _seconds(found: Found | None) -> float:
    return float("inf") if found is None or found.by_monitor is None else found.by_monitor.seconds


@pytest.fixture(scope="module")
def within() -> Iterator[CodeCopy]:
    """A copy of the code, shared by all tests."""
    with code_copy() as copy:
        yield copy


def is_found(bugs: Sequence[Planted], within: CodeCopy) -> bool:
    """True if the monitor alone finds one of them at its known place, or in a few other seeds: each change of the code
    changes what happens in a seed.
    """
    for bug in bugs:
        before = (ROOT / bug.path).read_bytes()
        hunted = hunt(bug, places_of(bug, range(1, 5), HOURS), within, known=KNOWN.get(bug.name, Found()))
        assert (ROOT / bug.path).read_bytes() == before
        if hunted.found.by_monitor is not None:
            return True
    return False


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("promise", sorted(PROMISES.keys() - {bug.promise for bug in PLANTED if bug.name in SWEPT}))
def test_the_monitor_alone_finds_a_bug_of_each_promise(promise: int, within: CodeCopy) -> None:
    """One of three bugs is enough. The other promises are those that bugs of the failures below attack."""
    assert is_found(cheapest(bug for bug in PLANTED if bug.promise == promise)[:3], within)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("failure", FAILURES_SWEPT)
def test_the_sweep_finds_a_bug_of_each_failure(failure: str, within: CodeCopy) -> None:
    """The monitor alone finds one of its bugs: a place where one was found once says nothing about today's code."""
    assert is_found(cheapest(bug for bug in PLANTED if bug.name in FAILURES_SWEPT[failure]), within)


def test_code_without_a_bug_violates_nothing(within: CodeCopy) -> None:
    """Otherwise a find would say nothing about the bug."""
    assert [result for result in within.search((), (PLACE,)) if result.promise or result.error] == []


def test_a_bug_that_only_raises_is_not_found(within: CodeCopy) -> None:
    """An exception shows broken code, not a violated promise."""
    result = hunt(CRASH, (PLACE,), within)
    assert result.found == Found()
    assert result.exceptions == 1
    assert "KeyError" in result.exception


def test_a_bug_whose_text_is_missing_is_reported(tmp_path: Path) -> None:
    """A hunt that plants nothing would call the simulator blind."""
    path = tmp_path / "code.py"
    path.write_text("one = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has its text 0 times"):
        plant(Planted("two", 1, "code.py", "two = 2", ""), tmp_path)


def test_every_promise_is_attacked() -> None:
    """Each promise has bugs; names are unique."""
    assert {bug.promise for bug in PLANTED} == set(PROMISES)
    assert len({bug.name for bug in PLANTED}) == len(PLANTED) >= 25


@pytest.mark.parametrize("failure", FAILURES_SWEPT)
def test_a_bug_of_each_failure_was_found(failure: str) -> None:
    """By an invariant, with the plan check disabled; the page says where."""
    found = (KNOWN.get(name) for name in FAILURES_SWEPT[failure])
    assert any(entry is not None and entry.by_monitor is not None for entry in found)


@pytest.mark.parametrize("failure", FAILURES_TESTED)
def test_a_test_finds_each_bug_that_no_run_shows(failure: str) -> None:
    """`test_planted_tested.py` plants it; the named test fails."""
    assert set(FAILURES_TESTED[failure]) <= named_tests().keys()


def test_a_bug_is_hunted_under_suitable_policies() -> None:
    """Seeds whose policy has no such limit say nothing about a bug in it."""
    bug = next(bug for bug in PLANTED if bug.name == "a zone's limit is not counted")
    places = places_of(bug, range(1, 51))
    assert 0 < len(places) < 50
    assert all(policy_of(place.seed).limits.zones for place in places)


def test_an_interrupted_hunt_can_be_continued(tmp_path: Path) -> None:
    """Finds are saved after each bug; bugs that are no longer planted are removed."""
    path, (first, second, *_) = tmp_path / "found.json", PLANTED
    path.write_text('{"a bug of last year": {"by_all": null}}', encoding="utf-8")
    find = Find(place=PLACE, promise="limits", seeds_count=3, seconds=1.0)
    for bug in (first, second):
        hunt_result = Hunt(name=bug.name, promise_attacked=bug.promise, found=Found(by_all=find))
        learn(path, [hunt_result], {bug.name: bug for bug in PLANTED})
    assert known_finds(path) == {bug.name: Found(by_all=find) for bug in (first, second)}


def test_the_page_is_up_to_date() -> None:
    """`make sim-mutants ARGS=--learn` writes it after each find."""
    assert PAGE.read_text(encoding="utf-8") == page(PLANTED, KNOWN)
    assert known_finds(FOUND_BY).keys() <= {bug.name for bug in PLANTED}
