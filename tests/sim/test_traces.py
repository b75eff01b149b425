"""Worlds cut from traces are what they say they are, and our own system is scored in them."""

import gzip
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.scoring import HOUR, job, scenario

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.sim.actors.checkpointing import CheckpointSettings
from gpu_autoscaler.sim.scoring.metrics import ALL, Score
from gpu_autoscaler.sim.scoring.runner import OURS, WITHOUT_SAVE_REQUESTS, score_ours, score_without_save_requests
from gpu_autoscaler.sim.scoring.scenario import Reclaim
from gpu_autoscaler.sim.scoring.synthetic import bursts, steady
from gpu_autoscaler.sim.scoring.traces import BAMBOO_STEP_SECONDS, BAMBOO_ZONES, bamboo, fleet_sizes, openb, philly
from gpu_autoscaler_services.score import SYSTEMS, Case, score
from gpu_autoscaler_services.score_page import Board, Round, page
from gpu_autoscaler_services.simulation import ROLES

TRACES = Path(os.environ.get("GPU_AUTOSCALER_TRACES", "../shared/traces"))
real = pytest.mark.skipif(not TRACES.is_dir(), reason=f"traces: no folder {TRACES}; set GPU_AUTOSCALER_TRACES")


def test_ours_is_scored_by_its_real_services() -> None:
    """One job of an hour on spot: a node for it, idle for ten minutes, and no promise broken."""
    result = score_ours(scenario(job("a", 60.0, HOUR), hours=2.0), ROLES)
    assert result.broken == ()
    assert (result.system, result.jobs_count, result.unfinished_count) == (OURS, 1, 0)
    assert 60.0 < result.waiting[ALL].max_seconds < 200.0  # the boot of a node
    assert result.gpu_hours_used == pytest.approx(1.0, abs=0.001)
    assert 1.0 < (result.node_hours or 0.0) < 1.3


def test_work_that_can_save_is_left_to_it() -> None:
    """A save of a minute and a half is done before the pod goes, and what it cost is the time that it took."""
    taken = Reclaim(at_seconds=1800.0, zone="sim-a", ratio=1.0, notice_seconds=120.0)
    slow = CheckpointSettings(
        every_seconds=3600.0, write_seconds_min=80.0, write_seconds_max=80.0, annotates=True, saves_at_end=False
    )
    world = replace(scenario(job("a", 60.0, HOUR, work="training"), hours=2.0, reclaims=(taken,)), checkpoints=slow)
    description, untold = score_ours(world, ROLES), score_without_save_requests(world, ROLES)
    assert (description.interrupted_jobs_count, description.recovered_jobs_count) == (1, 1)
    assert description.lost_gpu_hours < 130.0 / HOUR
    assert untold.lost_gpu_hours > 1500.0 / HOUR


def test_ours_answers_a_notice() -> None:
    """Training that is told to save loses next to nothing; the pod counts as interrupted, not as evicted by choice."""
    taken = Reclaim(at_seconds=1800.0, zone="sim-a", ratio=1.0, notice_seconds=120.0)
    result = score_ours(scenario(job("a", 60.0, HOUR, work="training"), hours=2.0, reclaims=(taken,)), ROLES)
    assert (result.interrupted_count, result.evicted_count, result.unfinished_count) == (1, 0, 0)
    assert result.lost_gpu_hours < 0.02


@pytest.mark.parametrize("system", SYSTEMS)
def test_equal_cases_are_equal_scores(system: str) -> None:
    """Seed, world and system decide."""
    case = Case("steady", system, seed=3, hours=0.5)
    assert score(case) == score(case)


def test_a_seed_is_a_world() -> None:
    """The same work for all systems; other work for another seed."""
    assert steady(1, 2.0) == steady(1, 2.0)
    assert steady(1, 2.0) != steady(2, 2.0)
    assert len(bursts(1, 6.0).arrivals) == 80


# ---- traces


def test_a_fleet_that_falls_is_a_reclaim_and_a_shortage(tmp_path: Path) -> None:
    """Sixteen machines, then four, then sixteen again: three of four are taken, and none is sold meanwhile."""
    folder = tmp_path / "bamboo-spot"
    folder.mkdir()
    steps = [16] * 12 + [4] * 12 + [16] * 12
    for name, _ in BAMBOO_ZONES.values():
        rows = [f"{number * BAMBOO_STEP_SECONDS / HOUR:.3f},{count}" for number, count in enumerate(steps)]
        (folder / name).write_text("\n".join(rows))
    world = bamboo(tmp_path, 1, 2.9)
    first = next(one for one in world.reclaims if one.zone == "sim-a")
    assert (first.at_seconds, first.ratio, first.notice_seconds) == (12 * BAMBOO_STEP_SECONDS, 0.75, 120.0)
    assert [(one.from_seconds, one.to_seconds) for one in world.shortages if one.zone == "sim-a"] == [
        (12 * BAMBOO_STEP_SECONDS, 24 * BAMBOO_STEP_SECONDS)
    ]


def test_a_fleet_file_that_is_none_is_named(tmp_path: Path) -> None:
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
    spans = [(one.at_seconds / 60, one.at_seconds / 60 + (one.request.run_seconds or 0) / 60) for one in world.arrivals]
    assert spans == [(0, 120), (0, 120), (60, 181), (60, 181)]


@real
def test_the_real_traces_make_worlds() -> None:
    """A window of each, with work in it; equal seeds, equal windows."""
    for make in (openb, philly, bamboo):
        world = make(TRACES, 1, 12.0)
        assert len(world.arrivals) > 20
        assert all(0.0 <= one.at_seconds < 12 * HOUR for one in world.arrivals)
        assert world == make(TRACES, 1, 12.0)
    assert bamboo(TRACES, 1, 12.0).reclaims


@real
def test_work_that_is_asked_to_save_loses_half_at_most_and_recovers() -> None:
    """On recorded spot fleets, the same periodic saves on both sides: 95 % of interrupted jobs end well."""
    description, untold = (
        score(Case("bamboo-checkpoints", system, seed=1, hours=12.0)) for system in (OURS, WITHOUT_SAVE_REQUESTS)
    )
    assert description.broken == untold.broken == ()
    assert description.interrupted_jobs_count > 0
    assert description.recovered_jobs_count > 0.95 * description.interrupted_jobs_count
    assert description.lost_gpu_hours <= 0.5 * untold.lost_gpu_hours


# ---- the page


def test_the_page_says_where_ours_is_worse() -> None:
    """Figures in words, from the scores alone."""
    ours, other = (score(Case("bursts", system, seed=1, hours=0.5)) for system in (OURS, "karpenter"))
    dear = Round(world="bursts", description="a test", scores=(_at(ours, 20.0), _at(other, 10.0)))
    cheap = Round(world="bursts", description="a test", scores=(_at(ours, 10.0), _at(other, 20.0)))
    description = page(Board(seed=1, hours=0.5, rounds=(dear,)))
    assert "**worse** in cost (20 to 10)" in description
    assert "The 10.00 USD (100.0%) that it costs more than karpenter-like buy " in description
    assert "better in cost (10 to 20)" in page(Board(seed=1, hours=0.5, rounds=(cheap,)))


def test_the_page_says_what_money_buys() -> None:
    """Twelve jobs that wait five minutes less are an hour; where nothing is gained, that is said."""
    other = score(Case("bursts", "karpenter", seed=1, hours=0.5))
    waiting = replace(other.waiting[ALL], count=12, mean_seconds=600.0)
    slow = replace(other, cost_usd=10.0, waiting={ALL: waiting}, evicted_count=3, lost_gpu_hours=1.5, storm_ratio=0.9)
    quick = replace(slow, system=OURS, cost_usd=12.0, evicted_count=0, lost_gpu_hours=0.0, storm_ratio=0.5)
    quick = replace(quick, waiting={ALL: replace(waiting, mean_seconds=300.0)})
    description, vain = (
        page(Board(seed=1, hours=0.5, rounds=(Round(world="bursts", description="a test", scores=(mine, slow)),)))
        for mine in (quick, replace(slow, system=OURS, cost_usd=12.0))
    )
    assert "1.0 h less waiting of all jobs together (2.00 USD an hour); 1.5 GPU-h less of lost work" in description
    assert "3 evictions fewer; 50% of the GPUs within reach of one storm, not 90%." in description
    assert "buy **nothing** that is counted here." in vain


def _at(one: Score, usd: float) -> Score:
    return replace(one, cost_usd=usd)
