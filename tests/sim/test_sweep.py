"""A sweep respects its limits, and counts only hours of large, faulty runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from gpu_autoscaler.sim.simulation import Result, Setting
from gpu_autoscaler.sim.sweep import SweepLimits, fresh_seeds, is_counted, summarize, sweep
from gpu_autoscaler_services import simulate

LIVELY = Result(
    seed=1,
    cluster_hours=4.0,
    facts_count=1,
    plans_count=1,
    nodes_mean=10.0,
    pods_count=120,
    digest="",
    faults={"service_killed": 4},
    happened=(),
    reasons={},
    violations=(),
    cpu_seconds=2.0,
)


def lively_or_not(setting: Setting) -> Result:
    """Every other seed has too few nodes to count."""
    return replace(LIVELY, seed=setting.seed, nodes_mean=10.0 if setting.seed % 2 else 9.9)


@pytest.mark.parametrize(
    ("less", "why"),
    [
        ({"nodes_mean": 9.9}, "too small"),
        ({"pods_count": 119}, "too quiet"),
        ({"faults": {"service_killed": 3}}, "too healthy"),
    ],
)
def test_hours_of_an_easy_run_do_not_count(less: dict[str, object], why: str) -> None:
    """Ten nodes, thirty pods and one fault per hour are required, each of them."""
    assert is_counted(LIVELY)
    assert not is_counted(replace(LIVELY, **less)), why


def test_a_sweep_runs_until_its_hours_count() -> None:
    """Runs that do not count are run, reported and made up for."""
    runs = sweep(
        (Setting(seed=seed) for seed in range(1, 100)),
        lively_or_not,
        console=Console(quiet=True),
        processes_count=1,
        limits=SweepLimits(cluster_hours=12.0),
    )
    summary = summarize(runs, lively_or_not, commit="none")
    assert [setting.seed for setting, _ in runs] == [1, 2, 3, 4, 5]
    assert (summary.cluster_hours, summary.cluster_hours_run) == (12.0, 20.0)
    assert summary.cluster_hours_per_cpu_second == 2.0
    assert [run.is_counted for run in summary.runs] == [True, False, True, False, True]


def test_a_sweep_starts_nothing_after_its_time_limit() -> None:
    """Runs in progress are completed."""
    endless = (Setting(seed=seed) for seed in range(1, 10**6))
    limits = SweepLimits(seconds=0.5)
    runs = sweep(endless, lively_or_not, console=Console(quiet=True), processes_count=1, limits=limits)
    assert 0 < len(runs) < 10**5


def test_fresh_seeds_follow_from_their_text() -> None:
    """Another commit has other seeds, none of which a range from one reaches."""
    seeds = fresh_seeds("a commit", 500)
    assert seeds == fresh_seeds("a commit", 600)[:500]
    assert len(set(seeds)) == 500
    assert min(seeds) >= 1_000_000
    assert not set(seeds) & set(fresh_seeds("another commit", 500))


def test_fresh_seeds_run_in_turn_with_fixed_ones(tmp_path: Path) -> None:
    """The command names them, so that a failure can be repeated, and the report contains them."""
    options = ["--seeds", "2", "--fresh", "2", "--fresh-from", "here", "--hours", "0.05", "--processes", "1"]
    completed = subprocess.run(
        [sys.executable, "-m", "gpu_autoscaler_services.simulate", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    first, second = fresh_seeds("here", 2)
    assert f"fresh seeds: {first}, {second}" in completed.stdout
    report = json.loads((tmp_path / "out/sim.json").read_bytes())
    assert [run["seed"] for run in report["runs"]] == [1, first, 2, second]
    assert completed.returncode == bool(report["broken"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hours", "0"], "--hours is 0; it must be above 0"),
        (["--processes", "-1"], "--processes is -1; it must be above 0"),
        (["--seeds", "0"], "no seed is selected; give --seeds, --fresh or --seed"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_sweep_of_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Before it starts, with the option to correct."""
    monkeypatch.setattr("sys.argv", ["make sim", *arguments])
    with pytest.raises(SystemExit, match="2"):
        simulate.main()
    assert message in capsys.readouterr().err
