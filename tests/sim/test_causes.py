"""Dollars by cause: by hand on one node, and equal to the bill of a fleet that comes and goes."""

import random
from collections.abc import Mapping
from datetime import timedelta

import pytest
from tests.support.scoring import HOUR, Scripted, job, offer, played, scenario

from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.sim.cluster.cloud import BOOT_RATIO
from gpu_autoscaler.sim.scoring.baselines.karpenter import Karpenter
from gpu_autoscaler.sim.scoring.baselines.observation import Buy, Drain
from gpu_autoscaler.sim.scoring.metrics import Score
from gpu_autoscaler.sim.scoring.scenario import Reclaim
from gpu_autoscaler.sim.virtual_time import ORIGIN

READY = 600.0  # all nodes bought at the start are ready
START = 8.0 / HOUR  # a pod starts within this
FLOOR = 0.16  # USD per hour of a GPU: g4dn.xlarge, spot, zone sim-a
EMPTY = ("boot", "never", "before", "between", "after", "drain")


def dollars(score: Score) -> Mapping[str, float]:
    """Return the dollars by cause, without zeros."""
    return {cause: micro_usd / 1e6 for cause, micro_usd in score.micro_usd_by_cause.items() if micro_usd}


@pytest.mark.parametrize(
    ("key", "spot", "hourly"),
    [
        ("g4dn.xlarge/sim-a/spot", True, {"floor": FLOOR}),
        ("g4dn.xlarge/sim-c/spot", True, {"floor": FLOOR, "zone": 0.182857 - FLOOR}),
        ("g5.xlarge/sim-a/spot", True, {"floor": FLOOR, "type": 0.385 - FLOOR}),
        ("g4dn.xlarge/sim-a/on-demand", True, {"floor": FLOOR, "on-demand": 0.526 - FLOOR}),
        ("g4dn.xlarge/sim-a/on-demand", False, {"floor": 0.526}),
        (
            "g4dn.12xlarge/sim-b/on-demand",
            True,
            {
                "floor": FLOOR,
                "type": 1.2964 / 4 - FLOOR,
                "zone": (1.37048 - 1.2964) / 4,
                "on-demand": (3.704 - 1.37048) / 4,
                "stranded": 3.704 * 3 / 4,
            },
        ),
    ],
)
def test_an_hour_of_a_gpu_is_split_by_cause(key: str, *, spot: bool, hourly: Mapping[str, float]) -> None:
    """One pod of one GPU runs for an hour: at the floor, and what each choice adds to it."""
    acts = Scripted((0.0, Buy(offer=offer(key), token="one")))
    score, _ = played(scenario(job("a", READY, HOUR, spot=spot), hours=2.0), acts)
    working = {cause: amount for cause, amount in dollars(score).items() if cause not in EMPTY}
    assert working == pytest.approx(hourly, abs=1e-5)


def test_an_empty_node_is_split_by_when() -> None:
    """Boot, wait for a pod, pause, an hour after the last pod, and the end of a drain; another node never works."""
    one, two = offer("g4dn.xlarge/sim-a/on-demand"), offer("g5.xlarge/sim-a/on-demand")
    first, second = job("a", READY, 600.0), job("b", 2000.0, 600.0)
    acts = Scripted(
        (0.0, Buy(offer=one, token="one")), (3000.0, Buy(offer=two, token="two")), (2600.0 + HOUR, Drain(token="one"))
    )
    score, machines = played(scenario(first, second, hours=2.0), acts)
    spent, hourly = dollars(score), 0.526
    boot_seconds = [90.0 * 0.8 * ratio for ratio in BOOT_RATIO]  # a node is Ready after 0.8 of its boot time
    assert boot_seconds[0] < spent["boot"] * HOUR / (hourly + 1.1) < boot_seconds[1]
    before = spent["boot"] + spent["before"] + spent["never"] - 1.1 * (7200.0 - 3000.0) / HOUR
    assert before == pytest.approx(READY / HOUR * hourly, abs=2 * START * hourly)
    assert spent["between"] == pytest.approx((2000.0 - READY - 600.0) / HOUR * hourly, abs=2 * START * hourly)
    assert spent["after"] == pytest.approx(hourly, abs=2 * START * hourly)
    assert 0.0 < spent["drain"] < 31.0 / HOUR * hourly
    assert spent["never"] == pytest.approx(1.1 * (7200.0 - 3000.0 - 80.0) / HOUR, abs=1.1 * 40.0 / HOUR)
    assert len(machines) == 2


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_causes_add_up_to_the_bill(seed: int) -> None:
    """Nodes that boot, work, are reclaimed, consolidated, removed: not a micro-dollar is missing or counted twice."""
    rng = random.Random(seed)  # noqa: S311 - a scenario
    arrivals = [
        job(f"job-{number}", rng.uniform(0.0, HOUR), rng.uniform(60.0, HOUR), gpus=rng.choice((1, 1, 4)),
            spot=rng.random() < 0.7, work=rng.choice(("batch", "training")))
        for number in range(20)
    ]  # fmt: skip
    hours = 4.0
    reclaims = (Reclaim(at_seconds=HOUR, zone="sim-a", ratio=0.5, notice_seconds=120.0),)
    score, machines = played(scenario(*arrivals, hours=hours, reclaims=reclaims), Karpenter())
    until = ORIGIN + timedelta(hours=hours)
    bill = sum(
        cost_micro_usd(
            machine.price_micro_usd_per_hour, min(machine.terminated_at or until, until) - machine.launched_at
        )
        for machine in machines
    )
    assert score.hours == hours
    assert sum(score.micro_usd_by_cause.values()) == bill
    assert min(score.micro_usd_by_cause.values()) >= 0
    assert score.micro_usd_by_cause["floor"] < bill
