"""The offline schedule is feasible: each rule is checked here from its nodes and the scenario alone."""

import random

import pytest
from msgspec.structs import replace
from tests.support.scoring import HOUR, job, scenario

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.sim.scoring.baselines.known_demand import fits_on, score_omniscient
from gpu_autoscaler.sim.scoring.baselines.offline import Node, OfflineSchedule, score_offline
from gpu_autoscaler.sim.scoring.metrics import SERVING
from gpu_autoscaler.sim.scoring.scenario import Scenario, ServiceReplicas, Shortage

# Means of what the simulation draws, in seconds: the start of a pod, the end of a machine, the boot of a g4dn.xlarge.
START, END, BOOT = 5.0, 17.5, 90.0 * 1.05
WAITS = {"high": 0.0, "medium": 300.0, "low": 300.0, SERVING: 120.0}


def small() -> Scenario:
    """Forty jobs of all priorities, some of several members, on spot or not; a service; two shortages."""
    rng = random.Random(3)  # noqa: S311 - a test
    jobs = (
        job(
            f"j{number}",
            round(rng.uniform(0.0, HOUR), 1),
            round(rng.lognormvariate(6.5, 1.0), 1),
            gpus=rng.choice((0, 1, 1, 2, 4)),
            members=rng.choice((1, 1, 2, 3)),
            priority=rng.choice(("low", "medium", "high")),
            spot=rng.random() < 0.8,
        )
        for number in range(40)
    )
    return replace(
        scenario(*sorted(jobs, key=lambda arrival: arrival.at_seconds), hours=1.0),
        services=(ServiceReplicas(name="api", at_seconds=60.0, replicas_count=2, gpu_count=1),),
        shortages=(
            Shortage(zone="sim-a", from_seconds=600.0, to_seconds=1500.0),
            Shortage(zone="sim-b", from_seconds=600.0, to_seconds=900.0),
        ),
    )


@pytest.fixture(scope="module")
def schedule() -> OfflineSchedule:
    """The schedule of the small scenario after some rounds."""
    made = OfflineSchedule(small())
    made.improve(random.Random(1), rounds_count=150)  # noqa: S311 - a test
    return made


def test_all_work_runs_once_as_long_as_it_takes_and_gangs_start_together(schedule: OfflineSchedule) -> None:
    """Each job has a run for each member, all of one time, on nodes that its requirements allow."""
    for number, work in enumerate(schedule.work):
        runs = [(node, run) for node in schedule.nodes for run in node.runs if run.work == number]
        assert len(runs) == work.members_count
        ((start, end),) = {(run.from_seconds, run.to_seconds) for _, run in runs}
        length = work.pod.to_seconds - work.pod.from_seconds
        assert end == pytest.approx(HOUR if work.class_name == SERVING else start + START + length)
        assert all(fits_on(work.pod, node.kind.offer) for node, _ in runs)


def test_no_work_starts_before_its_arrival_or_waits_longer_than_allowed(schedule: OfflineSchedule) -> None:
    """High priority starts at once, other jobs within 300 s and replicas within 120 s."""
    waits = [
        (run.from_seconds - work.pod.from_seconds, WAITS[work.class_name])
        for node in schedule.nodes
        for run in node.runs
        for work in (schedule.work[run.work],)
    ]
    assert all(0.0 <= wait <= longest for wait, longest in waits)


def test_no_node_is_overcommitted(schedule: OfflineSchedule) -> None:
    """Whenever a pod starts, all pods of its node fit in what the offer has."""
    for node in schedule.nodes:
        for at in (run.from_seconds for run in node.runs):
            running = [run for run in node.runs if run.from_seconds <= at < run.to_seconds]
            taken = sum((schedule.work[run.work].pod.resources for run in running), start=Resources())
            assert taken.fits_in(node.kind.offer.resources)


def test_boots_are_paid_and_no_spot_is_launched_in_a_shortage(schedule: OfflineSchedule) -> None:
    """A node is launched its boot time before its first pod, and paid until it has ended after the last."""
    for node in schedule.nodes:
        offer = node.kind.offer
        assert node.launched_at + offer.boot_seconds * 1.05 <= min(run.from_seconds for run in node.runs) + 1e-6
        assert node.ended_at == pytest.approx(max(run.to_seconds for run in node.runs) + END)
        assert not any(
            offer.capacity_type is CapacityType.SPOT
            and offer.zone == shortage.zone
            and shortage.from_seconds <= node.launched_at < shortage.to_seconds
            for shortage in small().shortages
        )
    assert schedule.usd == pytest.approx(sum(map(_usd, schedule.nodes)))


def _usd(node: Node) -> float:
    return (node.kind.offer.price_micro_usd_per_hour or 0) / 1e6 * (node.ended_at - node.launched_at) / HOUR


def test_rounds_only_make_it_cheaper(schedule: OfflineSchedule) -> None:
    """The cheapest schedule is kept."""
    assert schedule.usd < OfflineSchedule(small()).usd


def test_one_job_costs_its_node_with_boot_and_end() -> None:
    """An hour of the cheapest spot node, its boot, the start of the pod and its termination."""
    score = score_offline(scenario(job("a", HOUR, HOUR), hours=1.0))
    assert score.cost_usd == pytest.approx(0.16 * (BOOT + START + HOUR + END) / HOUR, abs=0.005)
    assert score.waiting["all"].max_seconds == START


def test_jobs_that_follow_each_other_share_a_node() -> None:
    """Of two jobs the second starts when the first has ended: one boot is paid."""
    made = OfflineSchedule(scenario(job("a", HOUR, 600.0), job("b", HOUR + 500.0, 600.0), hours=2.0))
    (node,) = made.nodes
    assert [run.from_seconds for run in node.runs] == [HOUR, HOUR + 605.0]


def test_its_score_is_reproducible_above_the_bound_and_adds_up_by_cause() -> None:
    """The dollars by cause are those of the nodes."""
    whole = scenario(*(job(f"j{number}", 60.0 * number, 900.0) for number in range(6)), hours=0.5)
    score = score_offline(whole, rounds_count=50)
    assert score == score_offline(whole, rounds_count=50)
    assert score.cost_usd >= score_omniscient(whole).cost_usd
    assert sum(score.micro_usd_by_cause.values()) / 1e6 == pytest.approx(score.cost_usd, abs=0.01)
    assert min(score.micro_usd_by_cause.values()) >= 0
