"""Scenarios from traces are correct, and our own system is scored in them."""

import gzip
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import quantiles

import pytest
from msgspec.structs import replace
from tests.support.scoring import HOUR, job, scenario

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.sim.actors.checkpointing import CheckpointSettings
from gpu_autoscaler.sim.scoring.metrics import ALL, Score
from gpu_autoscaler.sim.scoring.ours import OURS, WITHOUT_SAVE_REQUESTS, score_ours, score_without_save_requests
from gpu_autoscaler.sim.scoring.scenario import TEMPLATES, Reclaim, Scenario, bursts, steady
from gpu_autoscaler.sim.scoring.traces import BAMBOO_STEP_SECONDS, BAMBOO_ZONES, bamboo, fleet_sizes, openb, philly
from gpu_autoscaler_services.score_cases import SYSTEMS, Case, score
from gpu_autoscaler_services.score_page import ScenarioScores, ScoreReport, page
from gpu_autoscaler_services.simulation import ROLES

TRACES = Path(os.environ.get("GPU_AUTOSCALER_TRACES", "../shared/traces"))
real = pytest.mark.skipif(not TRACES.is_dir(), reason=f"traces: no folder {TRACES}; set GPU_AUTOSCALER_TRACES")


def test_our_score_uses_the_real_services() -> None:
    """One job of an hour on spot: one node, idle for ten minutes, and no violation."""
    result = score_ours(scenario(job("a", 60.0, HOUR), hours=2.0), ROLES)
    assert result.broken == ()
    assert (result.system, result.jobs_count, result.unfinished_count) == (OURS, 1, 0)
    assert 60.0 < result.waiting[ALL].max_seconds < 200.0  # the boot of a node
    assert result.gpu_hours_used == pytest.approx(1.0, abs=0.001)
    assert 1.0 < (result.node_hours or 0.0) < 1.3


def test_work_that_can_checkpoint_is_given_time_to_save() -> None:
    """A save of a minute and a half completes before the pod ends, and costs only its own time."""
    taken = Reclaim(at_seconds=1800.0, zone="sim-a", ratio=1.0, notice_seconds=120.0)
    slow = CheckpointSettings(
        every_seconds=3600.0, write_seconds_min=80.0, write_seconds_max=80.0, annotates=True, saves_at_end=False
    )
    world = replace(scenario(job("a", 60.0, HOUR, work="training"), hours=2.0, reclaims=(taken,)), checkpoints=slow)
    with_requests, without_requests = score_ours(world, ROLES), score_without_save_requests(world, ROLES)
    assert (with_requests.interrupted_jobs_count, with_requests.recovered_jobs_count) == (1, 1)
    assert with_requests.lost_gpu_hours < 130.0 / HOUR
    assert without_requests.lost_gpu_hours > 1500.0 / HOUR


def test_our_system_handles_notices() -> None:
    """Training that is asked to save loses almost nothing; the pod counts as interrupted, not as evicted."""
    taken = Reclaim(at_seconds=1800.0, zone="sim-a", ratio=1.0, notice_seconds=120.0)
    result = score_ours(scenario(job("a", 60.0, HOUR, work="training"), hours=2.0, reclaims=(taken,)), ROLES)
    assert (result.interrupted_count, result.evicted_count, result.unfinished_count) == (1, 0, 0)
    assert result.lost_gpu_hours < 0.02


@pytest.mark.parametrize("make", [steady, bursts])
def test_templates_tell_little_of_lengths(make: Callable[[int, float], Scenario]) -> None:
    """Of each template, the middle half of the lengths spreads by more than a factor e; medians grow by template."""
    lengths: defaultdict[str, list[float]] = defaultdict(list)
    for seed in range(1, 6):
        for arrival in make(seed, 12.0).arrivals:
            lengths[arrival.request.container.image].append(arrival.request.run_seconds or 0.0)
    of_templates = [quantiles(lengths[f"{name}:1"]) for name in TEMPLATES]
    assert len(lengths) == len(TEMPLATES)
    assert all(upper > math.e * lower for lower, _, upper in of_templates)
    assert [middle for _, middle, _ in of_templates] == sorted(middle for _, middle, _ in of_templates)


@pytest.fixture(scope="module")
def steady_scores() -> Mapping[str, Score]:
    """The score of each system in the same scenario."""
    return {system: score(Case("steady", system, seed=3, hours=0.5)) for system in SYSTEMS}


@pytest.mark.parametrize("system", SYSTEMS)
def test_equal_cases_give_equal_scores(system: str, steady_scores: Mapping[str, Score]) -> None:
    """Seed, scenario and system decide."""
    assert score(Case("steady", system, seed=3, hours=0.5)) == steady_scores[system]


def test_a_seed_determines_its_scenario() -> None:
    """The same work for all systems; other work for another seed."""
    assert steady(1, 2.0) == steady(1, 2.0)
    assert steady(1, 2.0) != steady(2, 2.0)
    assert len(bursts(1, 6.0).arrivals) == 80


# ---- traces


def test_a_shrinking_fleet_is_a_reclaim_and_a_shortage(tmp_path: Path) -> None:
    """Sixteen machines, then four, then sixteen again: three of four are reclaimed, and none is available meanwhile."""
    folder = tmp_path / "bamboo-spot"
    folder.mkdir()
    steps = [16] * 12 + [4] * 12 + [16] * 12
    for name, _ in BAMBOO_ZONES.values():
        rows = [f"{number * BAMBOO_STEP_SECONDS / HOUR:.3f},{count}" for number, count in enumerate(steps)]
        (folder / name).write_text("\n".join(rows))
    world = bamboo(tmp_path, 1, 2.9)
    first = next(item for item in world.reclaims if item.zone == "sim-a")
    assert (first.at_seconds, first.ratio, first.notice_seconds) == (12 * BAMBOO_STEP_SECONDS, 0.75, 120.0)
    assert [(item.from_seconds, item.to_seconds) for item in world.shortages if item.zone == "sim-a"] == [
        (12 * BAMBOO_STEP_SECONDS, 24 * BAMBOO_STEP_SECONDS)
    ]


def test_a_malformed_fleet_file_is_reported(tmp_path: Path) -> None:
    """The message has the path."""
    path = tmp_path / "x.csv"
    path.write_text("hello\n")
    with pytest.raises(ConfigError, match=r"x\.csv"):
        fleet_sizes(path)


def test_philly_has_a_job_for_each_ten_busy_nodes(tmp_path: Path) -> None:
    """Twenty nodes for an hour, then forty, then twenty: two jobs, two more, and the first two end."""
    folder = tmp_path / "philly"
    folder.mkdir()
    rows = ["time,active,total", *(f"t,{40 if 60 <= minute < 120 else 20},400" for minute in range(11 * 1440))]
    shifted = [rows[0], *(["t,0,400"] * 7 * 1440), *rows[1:]]
    (folder / "philly_node_sequence.csv.gz").write_bytes(gzip.compress("\n".join(shifted).encode()))
    world = philly(tmp_path, 1, 3.0)
    spans = [
        (item.at_seconds / 60, item.at_seconds / 60 + (item.request.run_seconds or 0) / 60) for item in world.arrivals
    ]
    assert spans == [(0, 120), (0, 120), (60, 181), (60, 181)]


@real
def test_the_real_traces_give_scenarios() -> None:
    """A window of each, with work in it; equal seeds, equal windows."""
    for make in (openb, philly, bamboo):
        world = make(TRACES, 1, 12.0)
        assert len(world.arrivals) > 20
        assert all(0.0 <= item.at_seconds < 12 * HOUR for item in world.arrivals)
        assert world == make(TRACES, 1, 12.0)
    assert bamboo(TRACES, 1, 12.0).reclaims


@real
@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_checkpoint_requests_halve_lost_work() -> None:
    """On recorded spot fleets, with the same periodic saves: 95 % of the interrupted jobs complete."""
    with_requests, without_requests = (
        score(Case("bamboo-checkpoints", system, seed=1, hours=12.0)) for system in (OURS, WITHOUT_SAVE_REQUESTS)
    )
    assert with_requests.broken == without_requests.broken == ()
    assert with_requests.interrupted_jobs_count > 0
    assert with_requests.recovered_jobs_count > 0.95 * with_requests.interrupted_jobs_count
    assert with_requests.lost_gpu_hours <= 0.5 * without_requests.lost_gpu_hours


# ---- the page


def _rendered(report: ScoreReport) -> str:
    return page(report, "# Scores\n\nThe method. Results for seed 2 are below.\n\nResults for seed 9 of a former run\n")


def test_new_results_replace_those_below_the_method(steady_scores: Mapping[str, Score]) -> None:
    """The method is kept as people wrote it; a page without results is refused."""
    scores = (steady_scores[OURS], steady_scores["karpenter"])
    rounds = (ScenarioScores(world="bursts", description="a test", scores=scores),)
    report = ScoreReport(seed=1, hours=0.5, rounds=rounds)
    text = _rendered(report)
    method = "The method. Results for seed 2 are below."
    assert text.startswith(f"# Scores\n\n{method}\n\nResults for seed 1, with jobs arriving for 0.5 h")
    assert "seed 9" not in text
    with pytest.raises(ValueError, match="restore it"):
        page(report, "# Scores\n")


def test_the_page_shows_where_ours_is_worse(steady_scores: Mapping[str, Score]) -> None:
    """Sentences and figures from the scores alone."""
    ours, other = steady_scores[OURS], steady_scores["karpenter"]
    expensive = ScenarioScores(world="bursts", description="a test", scores=(_at(ours, 20.0), _at(other, 10.0)))
    cheap = ScenarioScores(world="bursts", description="a test", scores=(_at(ours, 10.0), _at(other, 20.0)))
    text = _rendered(ScoreReport(seed=1, hours=0.5, rounds=(expensive,)))
    assert "**worse** in cost (20 to 10)" in text
    assert "The 10.00 USD (100.0%) of additional cost compared with karpenter-like buy " in text
    assert "better in cost (10 to 20)" in _rendered(ScoreReport(seed=1, hours=0.5, rounds=(cheap,)))


def test_the_page_shows_what_the_higher_cost_buys(steady_scores: Mapping[str, Score]) -> None:
    """Twelve jobs that wait five minutes less are an hour; without a gain, that is reported."""
    other = steady_scores["karpenter"]
    waiting = replace(other.waiting[ALL], count=12, mean_seconds=600.0)
    slow = replace(other, cost_usd=10.0, waiting={ALL: waiting}, evicted_count=3, lost_gpu_hours=1.5, storm_ratio=0.9)
    quick = replace(slow, system=OURS, cost_usd=12.0, evicted_count=0, lost_gpu_hours=0.0, storm_ratio=0.5)
    quick = replace(quick, waiting={ALL: replace(waiting, mean_seconds=300.0)})
    with_gain, without_gain = (
        _rendered(
            ScoreReport(
                seed=1, hours=0.5, rounds=(ScenarioScores(world="bursts", description="a test", scores=(mine, slow)),)
            )
        )
        for mine in (quick, replace(slow, system=OURS, cost_usd=12.0))
    )
    assert "1.0 h less waiting of all jobs (2.00 USD per hour); 1.5 GPU-h less lost work" in with_gain
    assert "3 fewer evictions; 50% of the GPUs exposed to one storm instead of 90%." in with_gain
    assert "buy **nothing** that is measured here." in without_gain


def _at(score: Score, usd: float) -> Score:
    return replace(score, cost_usd=usd)
