"""Every figure of a score, in scenarios small enough to compute by hand."""

import pytest
from tests.support.scoring import HOUR, Scripted, job, offer, played, scenario

from gpu_autoscaler.sim.actors.checkpointing import SAVE_SECONDS, SAVED_EVERY_SECONDS
from gpu_autoscaler.sim.cluster.controllers import START_SECONDS
from gpu_autoscaler.sim.scoring.baselines.observation import Buy, Drain
from gpu_autoscaler.sim.scoring.metrics import ALL, waiting_of
from gpu_autoscaler.sim.scoring.scenario import Reclaim

ON_DEMAND, SPOT = offer("g4dn.xlarge/sim-a/on-demand"), offer("g4dn.xlarge/sim-a/spot")
READY = 600.0  # all nodes bought at the start are ready
ONE_NODE = (0.0, Buy(offer=ON_DEMAND, token="one"))


def test_a_node_is_billed_for_its_running_time() -> None:
    """One g4dn.xlarge at 0.526 USD/h, for two hours, of which it works for half an hour."""
    score, _ = played(scenario(job("a", READY, HOUR / 2), hours=2.0), Scripted(ONE_NODE))
    assert score.cost_usd == pytest.approx(2 * 0.526, abs=0.006)
    assert score.node_hours == score.gpu_hours_bought == 2.0
    assert score.gpu_hours_used == 0.5
    assert score.gpu_used_ratio == pytest.approx(0.25)
    assert (score.jobs_count, score.failed_count, score.unfinished_count) == (1, 0, 0)


def test_billing_ends_with_the_last_job() -> None:
    """Work that continues after the scenario's hours is billed to its end: an hour from READY on, and no more."""
    score, _ = played(scenario(job("a", READY, HOUR), hours=0.5), Scripted(ONE_NODE))
    assert score.hours == pytest.approx((READY + HOUR) / HOUR, abs=0.003)
    assert score.node_hours == score.hours


def test_a_terminated_node_costs_nothing_more() -> None:
    """Terminated after an hour, it is billed for that hour and at most half a minute of termination."""
    acts = Scripted(ONE_NODE, (HOUR, Drain(token="one")))
    score, _ = played(scenario(job("a", READY, 60.0), hours=3.0), acts)
    assert score.node_hours == pytest.approx(1.0, abs=0.01)


def test_the_storm_ratio_is_the_share_exposed_to_one_storm() -> None:
    """One spot and one on-demand node with a GPU each: half; alone: all or nothing."""
    here = (0.0, Buy(offer=SPOT, token="two"))
    both, spot, safe = (
        played(scenario(job("a", READY, 60.0), hours=2.0), Scripted(*acts))[0]
        for acts in ((ONE_NODE, here), (here,), (ONE_NODE,))
    )
    assert both.storm_ratio == pytest.approx(0.5, abs=0.01)
    assert (spot.storm_ratio, safe.storm_ratio) == (1.0, 0.0)


def test_waiting_is_reported_by_priority() -> None:
    """One GPU, three jobs of a thousand seconds at once: high priority first, low last."""
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
    """The 95th of 1 to 100; of one value, that value."""
    waiting = waiting_of([float(number) for number in range(1, 101)])
    assert (waiting.mean_seconds, waiting.p50_seconds, waiting.p95_seconds, waiting.max_seconds) == (50.5, 50, 95, 100)
    assert waiting_of([7.0]).p95_seconds == 7.0


def test_a_gang_has_waited_as_long_as_its_last_member() -> None:
    """Two members, one GPU: the second waits for the first."""
    score, _ = played(scenario(job("a", READY, 1000.0, members=2), hours=1.0), Scripted(ONE_NODE))
    assert score.waiting[ALL].count == 1
    assert 1000.0 < score.waiting[ALL].max_seconds < 1030.0


def test_an_unfinished_job_has_waited_to_the_end() -> None:
    """Nothing is bought: the job is unfinished, and all of its time is waiting."""
    score, _ = played(scenario(job("a", 0.0, 60.0), hours=1.0), Scripted())
    assert (score.unfinished_count, score.cost_usd, score.gpu_hours_used) == (1, 0.0, 0.0)
    assert score.waiting[ALL].max_seconds == score.hours * HOUR
    assert score.gpu_used_ratio is None


TAKEN_AT = 2 * SAVED_EVERY_SECONDS + 600.0 + READY  # 600 s after the second save, less the start
TAKEN = Reclaim(at_seconds=TAKEN_AT, zone="sim-a", ratio=1.0, notice_seconds=0.0)
SPOT_THEN_ANOTHER = ((0.0, Buy(offer=SPOT, token="one")), (TAKEN_AT, Buy(offer=ON_DEMAND, token="two")))


@pytest.mark.parametrize(("work", "lost_seconds"), [("training", 600.0), ("batch", 2 * SAVED_EVERY_SECONDS + 600.0)])
def test_a_reclaim_loses_work_since_the_last_save(work: str, lost_seconds: float) -> None:
    """Without a notice: training continues from its last save, batch restarts."""
    whole = 2 * HOUR
    score, _ = played(
        scenario(job("a", READY, whole, work=work), hours=1.0, reclaims=(TAKEN,)), Scripted(*SPOT_THEN_ANOTHER)
    )
    assert (score.interrupted_count, score.evicted_count, score.unfinished_count) == (1, 0, 0)
    assert score.lost_gpu_hours == pytest.approx(lost_seconds / HOUR, abs=0.005)
    assert score.gpu_hours_used == pytest.approx((whole + lost_seconds) / HOUR, abs=0.005)
    assert 60.0 < score.waiting[ALL].max_seconds < 300.0  # for the second node


@pytest.mark.parametrize(("seconds_before", "lost_seconds"), [(200.0, 200.0), (SAVE_SECONDS / 2, 400.0)])
def test_a_save_counts_for_each_request(seconds_before: float, lost_seconds: float) -> None:
    """Asked twice before a reclaim: training continues from the second save, or from the first if the machine ends
    during the second."""
    world = scenario(job("a", READY, 2 * HOUR, work="training"), hours=1.0, reclaims=(TAKEN,))
    score, _ = played(world, Scripted(*SPOT_THEN_ANOTHER), asked_at=(TAKEN_AT - 400.0, TAKEN_AT - seconds_before))
    assert score.lost_gpu_hours == pytest.approx(lost_seconds / HOUR, abs=0.001)


@pytest.mark.parametrize(("work", "lost_seconds"), [("training", 0.0), ("batch", 1200.0)])
def test_voluntary_evictions_are_counted_separately(work: str, lost_seconds: float) -> None:
    """Evicted after 1200 s with a grace period of half a minute: training saves, batch does not."""
    at = READY + 1200.0
    acts = Scripted(ONE_NODE, (at, Drain(token="one")), (at, Buy(offer=ON_DEMAND, token="two")))
    score, _ = played(scenario(job("a", READY, HOUR, work=work), hours=1.0), acts)
    assert (score.interrupted_count, score.evicted_count) == (0, 1)
    assert score.lost_gpu_hours == pytest.approx(lost_seconds / HOUR, abs=0.012)


def test_lost_work_is_counted_in_gpu_hours() -> None:
    """GPU-hours, not hours: four GPUs lose four times as much."""
    big = offer("g4dn.12xlarge/sim-a/spot")
    acts = Scripted((0.0, Buy(offer=big, token="one")), (TAKEN_AT, Buy(offer=big, token="two")))
    score, _ = played(scenario(job("a", READY, 2 * HOUR, gpus=4, work="training"), hours=1.0, reclaims=(TAKEN,)), acts)
    assert score.lost_gpu_hours == pytest.approx(4 * 600.0 / HOUR, abs=0.02)
