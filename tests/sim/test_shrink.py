"""A failing run gets small: what does not matter is left out."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.sim.hunting import ROOT, plant
from tests.sim.planted import PLANTED

from gpu_autoscaler.sim.shrink import shrink
from gpu_autoscaler.sim.simulation import Result, Setting

KINDS = ("broker_away", "launch_slow", "service_killed", "store_full")
HAPPENED = tuple((kind, number) for kind in KINDS for number in (1, 2, 3))


def imagined(setting: Setting) -> Result:
    """A run that breaks exactly when the second kill meets the third outage."""
    happened = [one for one in HAPPENED if setting.kinds is None or one[0] in setting.kinds]
    if setting.only is not None:
        happened = [one for one in happened if one in setting.only]
    is_broken = ("service_killed", 2) in happened and ("broker_away", 3) in happened
    return Result(
        seed=setting.seed,
        cluster_hours=1.0,
        facts_count=0,
        plans_count=0,
        nodes_mean=0.0,
        pods_count=0,
        digest="",
        faults=dict.fromkeys(sorted({kind for kind, _ in happened}), 3),
        happened=tuple(happened),
        reasons={},
        broken=("a promise: broken",) if is_broken else (),
        promise="a promise" if is_broken else "",
    )


def test_the_least_that_still_breaks_is_found() -> None:
    """Two occurrences of twelve are left, and running them again breaks the same promise."""
    setting = Setting(seed=1)
    smallest, result = shrink(setting, imagined(setting), imagined)
    assert result.promise == "a promise"
    assert set(smallest.only or ()) == {("service_killed", 2), ("broker_away", 3)}
    assert imagined(smallest).promise == "a promise"


def test_what_breaks_without_any_fault_needs_none() -> None:
    """A bug in plain sight is told without a list of innocents."""

    def always(setting: Setting) -> Result:
        broken = imagined(Setting(seed=1))
        return broken if setting.only is None else imagined(Setting(seed=1))

    smallest, _ = shrink(Setting(seed=1), imagined(Setting(seed=1)), always)
    assert smallest.only == ()


def test_time_is_bounded() -> None:
    """When the time is over, the smallest run found so far is told, and not one more is tried."""
    clock = iter(range(1000))
    tried: list[Setting] = []

    def slow(setting: Setting) -> Result:
        tried.append(setting)
        return imagined(setting)

    _, result = shrink(
        Setting(seed=1), imagined(Setting(seed=1)), slow, seconds_max=5.0, now=lambda: float(next(clock))
    )
    assert result.promise == "a promise"
    assert len(tried) <= 5


def test_a_real_failure_is_told_small_and_comes_again(tmp_path: Path) -> None:
    """A planted bug: seed, commit, promise, the faults that matter, last facts; both ways to see it again work."""
    bug = next(bug for bug in PLANTED if bug.name == "a notice is not answered")
    for part in ("libs", "services"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    plant(bug, tmp_path)
    # The world's own choice of faults moves with every kind that is added; this run keeps to a few.
    asked = ("--seed", "14", "--hours", "0.5", "--only", "launch_slow#1,notice_120#1,store_slow#1,user_cancels#1")
    description = simulate(tmp_path, *asked)
    broken = "broken: the second opinion: "
    assert "seed 14, commit " in description
    assert broken in description
    assert f'again: make sim SEED=14 ARGS="{" ".join(asked[2:])}"' in description
    assert 'alone: make sim SEED=14 ARGS="--hours 0.5 --only notice_120#1"' in description
    faults = description.partition("shortest list of faults found: ")[2].splitlines()[0]
    assert faults == "notice_120#1"
    assert broken in simulate(tmp_path, *asked[:-1], faults)
    what = description.partition(broken)[2].splitlines()[0]
    assert simulate(tmp_path, *asked).partition(broken)[2].splitlines()[0] == what


def simulate(root: Path, *arguments: str) -> str:
    """What `make sim` prints of the code under this root."""
    paths = os.pathsep.join((str(root / "libs"), str(root / "services")))
    command = [sys.executable, "-m", "gpu_autoscaler_services.simulate", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stdout
