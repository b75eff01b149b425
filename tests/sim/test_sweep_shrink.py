"""A failing run is shrunk: irrelevant faults are removed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sim.hunting import ROOT, plant
from tests.sim.planted import PLANTED

from gpu_autoscaler.sim.simulation import Result, Setting
from gpu_autoscaler.sim.sweep import shrink

KINDS = ("broker_away", "launch_slow", "service_killed", "store_full")
HAPPENED = tuple((kind, number) for kind in KINDS for number in (1, 2, 3))


def imagined(setting: Setting) -> Result:
    """A run that fails exactly when the second kill meets the third outage."""
    happened = [occurrence for occurrence in HAPPENED if setting.kinds is None or occurrence[0] in setting.kinds]
    if setting.only is not None:
        happened = [occurrence for occurrence in happened if occurrence in setting.only]
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
        violations=("a promise: broken",) if is_broken else (),
        invariant="a promise" if is_broken else "",
    )


def test_the_smallest_failing_run_is_found() -> None:
    """Two of twelve occurrences remain, and running them again violates the same invariant."""
    setting = Setting(seed=1)
    smallest, result = shrink(setting, imagined(setting), imagined)
    assert result.invariant == "a promise"
    assert set(smallest.only or ()) == {("service_killed", 2), ("broker_away", 3)}
    assert imagined(smallest).invariant == "a promise"


def test_a_failure_without_faults_needs_none() -> None:
    """A bug without faults is reported without a list of faults."""

    def always(setting: Setting) -> Result:
        violations = imagined(Setting(seed=1))
        return violations if setting.only is None else imagined(Setting(seed=1))

    smallest, _ = shrink(Setting(seed=1), imagined(Setting(seed=1)), always)
    assert smallest.only == ()


def test_shrinking_is_limited_in_time() -> None:
    """When time is up, the smallest run so far is returned, and no further attempt is made."""
    clock = iter(range(1000))
    tried: list[Setting] = []

    def slow(setting: Setting) -> Result:
        tried.append(setting)
        return imagined(setting)

    _, result = shrink(
        Setting(seed=1), imagined(Setting(seed=1)), slow, seconds_max=5.0, now=lambda: float(next(clock))
    )
    assert result.invariant == "a promise"
    assert len(tried) <= 5


@pytest.mark.sweep
def test_a_real_failure_is_shrunk_and_reproducible(tmp_path: Path) -> None:
    """A planted bug: seed, commit, invariant, relevant faults, last facts; both commands reproduce it."""
    bug = next(bug for bug in PLANTED if bug.name == "an interruption notice does not start a drain")
    for part in ("libs", "services"):
        shutil.copytree(ROOT / part, tmp_path / part)  # with compiled files
    plant(bug, tmp_path)
    # The seed's own choice of faults changes with every new kind; this run has fixed kinds.
    arguments = ("--seed", "14", "--hours", "0.3", "--only", "launch_slow#1,notice_120#1,store_slow#1,user_cancels#1")
    output = simulate(tmp_path, *arguments)
    violations = "violated: plan check: "
    assert "seed 14, commit " in output
    assert violations in output
    assert f'reproduce: make sim SEED=14 ARGS="{" ".join(arguments[2:])}"' in output
    assert 'faults: make sim SEED=14 ARGS="--hours 0.3 --only notice_120#1"' in output
    faults = output.partition("fewest faults found: ")[2].splitlines()[0]
    assert faults == "notice_120#1"
    assert violations in simulate(tmp_path, *arguments[:-1], faults)
    what = output.partition(violations)[2].splitlines()[0]
    assert simulate(tmp_path, *arguments).partition(violations)[2].splitlines()[0] == what


def simulate(root: Path, *arguments: str) -> str:
    """Return what `make sim` prints with the code under this root."""
    paths = os.pathsep.join((str(root / "libs"), str(root / "services")))
    command = [sys.executable, "-m", "gpu_autoscaler_services.simulate", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stdout
