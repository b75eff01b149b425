"""A sweep respects its limits, and counts only hours of large, faulty runs."""

import pytest
from msgspec.structs import replace
from rich.console import Console

from gpu_autoscaler.sim.simulation import Result, Setting
from gpu_autoscaler.sim.sweep import SweepLimits, is_counted, summarize, sweep

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
