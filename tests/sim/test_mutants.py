"""The hunt for planted bugs works: it finds what is there, finds nothing where nothing is, and never counts a crash."""

from pathlib import Path

import pytest
from rich.console import Console
from tests.sim.mutants import ROOT, hunt, hunt_all, known_places, plant, search
from tests.sim.planted import PLANTED
from tests.sim.planting import Planted
from tests.sim.searching import Place

HOURS = 0.5
PLACES = tuple(Place(seed, HOURS) for seed in range(1, 5))
QUICK = ("the fence is dropped", "launched again without the token", "a released Job is left suspended")


def test_planted_bugs_are_found_and_the_code_as_it_is_keeps_the_same_seeds() -> None:
    """Else `make sim-mutants` would prove nothing about the simulator."""
    bugs = [bug for bug in PLANTED if bug.name in QUICK]
    before = {bug.path: (ROOT / bug.path).read_bytes() for bug in bugs}
    console = Console(quiet=True)
    hunts = hunt_all(bugs, PLACES, known={}, seconds=300.0, processes_count=2, console=console)
    assert {one.name: bool(one.by_world and one.by_all) for one in hunts} == dict.fromkeys(QUICK, True)
    assert not any(one.exceptions for one in hunts)
    assert [one for one in search((), PLACES) if one.promise or one.error] == []
    assert {path: (ROOT / path).read_bytes() for path in before} == before


def test_a_bug_that_only_raises_is_not_found() -> None:
    """An exception says that code is broken, not that a promise is."""
    crash = Planted(
        "the plan cannot be made",
        2,
        "libs/gpu_autoscaler/core/plan.py",
        "def plan(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Plan:\n",
        "def plan(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Plan:\n    raise KeyError(as_of)\n\n",
    )
    looked = hunt(crash, PLACES[:1])
    assert looked.by_world is None
    assert looked.by_all is None
    assert looked.exceptions == 1 + 1  # without the second opinion, and with it
    assert "KeyError" in looked.exception


def test_a_bug_that_has_lost_its_place_is_told(tmp_path: Path) -> None:
    """A hunt that plants nothing would call the simulator blind."""
    path = tmp_path / "code.py"
    path.write_text("one = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has its text 0 times"):
        plant(Planted("two", 1, "code.py", "two = 2", ""), tmp_path)


def test_every_promise_is_attacked() -> None:
    """Each promise has bugs that would break it; names say which is which."""
    assert {bug.promise for bug in PLANTED} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert len({bug.name for bug in PLANTED}) == len(PLANTED) >= 25


def test_places_are_kept_of_bugs_that_are_planted() -> None:
    """Where a bug was found is looked at first; of others nobody keeps anything."""
    assert known_places().keys() <= {bug.name for bug in PLANTED}
