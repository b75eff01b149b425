"""Every part of a score, in worlds so small that it can be worked out by hand."""

import pytest
from tests.support.scoring import HOUR, Scripted, job, offer, played, scenario

from gpu_autoscaler.sim.actors.checkpointing import SAVED_EVERY_SECONDS
from gpu_autoscaler.sim.cluster.controllers import START_SECONDS
from gpu_autoscaler.sim.scoring.baselines.protocol import Buy, Drain
from gpu_autoscaler.sim.scoring.metrics import ALL, waiting_of
from gpu_autoscaler.sim.scoring.scenario import Reclaim

ON_DEMAND, SPOT = offer("g4dn.xlarge/sim-a/on-demand"), offer("g4dn.xlarge/sim-a/spot")
READY = 600.0  # by then every node is there that was bought at the beginning
ONE_NODE = (0.0, Buy(offer=ON_DEMAND, token="one"))


def test_what_a_node_costs_is_billed_by_the_time_it_stood() -> None:
    """One g4dn.xlarge at 0.526 USD/h, for two hours in which it works for half of one."""
    score, _ = played(scenario(job("a", READY, HOUR / 2), hours=2.0), Scripted(ONE_NODE))
    assert score.cost_usd == pytest.approx(2 * 0.526, abs=0.006)
    assert score.node_hours == score.gpu_hours_bought == 2.0
    assert score.gpu_hours_used == 0.5
    assert score.gpu_used_ratio == pytest.approx(0.25)
    assert (score.jobs_count, score.failed_count, score.unfinished_count) == (1, 0, 0)


def test_a_run_ends_with_its_last_job_and_bills_no_further() -> None:
    """Work that goes on after the scene's hours is billed to its end: an hour from READY on, and no minute more."""
    score, _ = played(scenario(job("a", READY, HOUR), hours=0.5), Scripted(ONE_NODE))
    assert score.hours == pytest.approx((READY + HOUR) / HOUR, abs=0.003)
    assert score.node_hours == score.hours


def test_a_node_that_left_costs_nothing_more() -> None:
    """Given back after an hour, it is billed for that hour and the half minute that its end takes at most."""
    acts = Scripted(ONE_NODE, (HOUR, Drain(token="one")))
    score, _ = played(scenario(job("a", READY, 60.0), hours=3.0), acts)
    assert score.node_hours == pytest.approx(1.0, abs=0.01)


def test_what_one_storm_could_take_is_told() -> None:
    """One spot node and one on-demand of a GPU each, side by side for all of the time: half; alone: all, or nothing."""
    here = (0.0, Buy(offer=SPOT, token="two"))
    both, spot, safe = (
        played(scenario(job("a", READY, 60.0), hours=2.0), Scripted(*acts))[0]
        for acts in ((ONE_NODE, here), (here,), (ONE_NODE,))
    )
    assert both.storm_ratio == pytest.approx(0.5, abs=0.01)
    assert (spot.storm_ratio, safe.storm_ratio) == (1.0, 0.0)


def test_waiting_is_told_by_priority() -> None:
    """One GPU, three jobs of a thousand seconds at once: high goes first, low last."""
    arrivals = (job(name, READY, 1000.0, priority=name) for name in ("low", "medium", "high"))
    score, _ = played(scenario(*arrivals, hours=2.0), Scripted(ONE_NODE))
    least, most = START_SECONDS
    for turn, name in enumerate(("high", "medium", "low")):
        waiting = score.waiting[name]
        assert waiting.count == 1
        assert turn * (1000.0 + least) < waiting.mean_seconds < turn * (1000.0 + most) + most + 3.0
    assert score.waiting[ALL].count == 3
    assert score.waiting[ALL].max_seconds == score.waiting["low"].max_seconds
    assert score.waiting[ALL].p50_seconds == score.waiting["medium"].mean_seconds


def test_quantiles_are_by_nearest_rank() -> None:
    """Of 1 to 100 the 95th, of one value that one."""
    waiting = waiting_of([float(number) for number in range(1, 101)])
    assert (waiting.mean_seconds, waiting.p50_seconds, waiting.p95_seconds, waiting.max_seconds) == (50.5, 50, 95, 100)
    assert waiting_of([7.0]).p95_seconds == 7.0


def test_a_gang_has_waited_as_long_as_its_last_member() -> None:
    """Two members, one GPU: the second waits for the first."""
    score, _ = played(scenario(job("a", READY, 1000.0, members=2), hours=1.0), Scripted(ONE_NODE))
    assert score.waiting[ALL].count == 1
    assert 1000.0 < score.waiting[ALL].max_seconds < 1030.0


def test_what_never_ran_has_waited_to_the_end() -> None:
    """Nothing is bought: the job is told as unfinished, and all of its time was waiting."""
    score, _ = played(scenario(job("a", 0.0, 60.0), hours=1.0), Scripted())
    assert (score.unfinished_count, score.cost_usd, score.gpu_hours_used) == (1, 0.0, 0.0)
    assert score.waiting[ALL].max_seconds == score.hours * HOUR
    assert score.gpu_used_ratio is None


TAKEN_AT = 2 * SAVED_EVERY_SECONDS + 600.0 + READY  # 600 s after the second saving, less the start
TAKEN = Reclaim(at_seconds=TAKEN_AT, zone="sim-a", ratio=1.0, notice_seconds=0.0)
SPOT_THEN_ANOTHER = ((0.0, Buy(offer=SPOT, token="one")), (TAKEN_AT, Buy(offer=ON_DEMAND, token="two")))


@pytest.mark.parametrize(("work", "lost_seconds"), [("training", 600.0), ("batch", 2 * SAVED_EVERY_SECONDS + 600.0)])
def test_work_that_a_reclaim_takes_is_lost_back_to_what_was_saved(work: str, lost_seconds: float) -> None:
    """Without a notice: training goes on where it saved last, batch begins again."""
    whole = 2 * HOUR
    score, _ = played(
        scenario(job("a", READY, whole, work=work), hours=1.0, reclaims=(TAKEN,)), Scripted(*SPOT_THEN_ANOTHER)
    )
    assert (score.interrupted_count, score.evicted_count, score.unfinished_count) == (1, 0, 0)
    assert score.lost_gpu_hours == pytest.approx(lost_seconds / HOUR, abs=0.005)
    assert score.gpu_hours_used == pytest.approx((whole + lost_seconds) / HOUR, abs=0.005)
    assert 60.0 < score.waiting[ALL].max_seconds < 300.0  # for the second node


@pytest.mark.parametrize(("work", "lost_seconds"), [("training", 0.0), ("batch", 1200.0)])
def test_who_moves_a_pod_by_choice_is_told_apart(work: str, lost_seconds: float) -> None:
    """Evicted after 1200 s with half a minute's grace: training saves, batch does not."""
    at = READY + 1200.0
    acts = Scripted(ONE_NODE, (at, Drain(token="one")), (at, Buy(offer=ON_DEMAND, token="two")))
    score, _ = played(scenario(job("a", READY, HOUR, work=work), hours=1.0), acts)
    assert (score.interrupted_count, score.evicted_count) == (0, 1)
    assert score.lost_gpu_hours == pytest.approx(lost_seconds / HOUR, abs=0.012)


def test_work_of_more_gpus_is_lost_by_each_of_them() -> None:
    """GPU-hours, not hours: four GPUs lose four times as much."""
    big = offer("g4dn.12xlarge/sim-a/spot")
    acts = Scripted((0.0, Buy(offer=big, token="one")), (TAKEN_AT, Buy(offer=big, token="two")))
    score, _ = played(scenario(job("a", READY, 2 * HOUR, gpus=4, work="training"), hours=1.0, reclaims=(TAKEN,)), acts)
    assert score.lost_gpu_hours == pytest.approx(4 * 600.0 / HOUR, abs=0.02)
