"""Each baseline behaves as documented."""

from collections.abc import Iterable

import pytest
from msgspec.structs import replace
from tests.support.scoring import HOUR, OFFERS, job, offer, played, scenario, second_of

from gpu_autoscaler.sim.scoring.baselines import cluster_autoscaler, utilization
from gpu_autoscaler.sim.scoring.baselines.cluster_autoscaler import ClusterAutoscaler
from gpu_autoscaler.sim.scoring.baselines.karpenter import Karpenter
from gpu_autoscaler.sim.scoring.baselines.known_demand import FixedFleet, score_omniscient, sized_for
from gpu_autoscaler.sim.scoring.baselines.observation import Action, Baseline, Observation
from gpu_autoscaler.sim.scoring.baselines.utilization import UtilizationOnly, groups_for
from gpu_autoscaler.sim.scoring.metrics import ALL
from gpu_autoscaler.sim.scoring.scenario import Reclaim, Shortage

EVERY = [job(f"j{number}", 60.0 * number, 1500.0, work="training") for number in range(8)]


def baselines() -> list[Baseline]:
    """One of each."""
    whole = scenario(*EVERY, hours=1.0)
    return [FixedFleet(sized_for(whole)), UtilizationOnly(groups_for(whole)), ClusterAutoscaler(), Karpenter()]


# ---- fixed fleet


def test_a_fixed_fleet_never_changes() -> None:
    """The same machines run from the first second to the last."""
    whole = scenario(job("a", 0.0, 600.0), job("b", 0.0, 600.0, gpus=4), hours=3.0)
    _, machines = played(whole, FixedFleet(sized_for(whole)))
    assert {second_of(machine) for machine in machines} == {0.0}
    assert all(machine.terminated_at is None for machine in machines)


def test_a_fixed_fleet_is_sized_for_its_quantile_and_for_every_shape() -> None:
    """Two jobs of one GPU most of the time, ten for five minutes, one of four GPUs once."""
    busy = [job(f"always-{number}", 0.0, 10 * HOUR, spot=False) for number in range(2)]
    rush = [job(f"rush-{number}", HOUR, 290.0) for number in range(8)]
    most = sized_for(scenario(*busy, *rush, hours=10.0), 1.0)
    usual = sized_for(scenario(*busy, *rush, job("wide", 5 * HOUR, 60.0, gpus=4), hours=10.0))
    assert sum(offer.resources.gpu_count for offer in most) == 10
    assert sorted(offer.resources.gpu_count for offer in usual) == [1, 1, 4]


# ---- utilization only


def test_utilization_only_ignores_pending_pods() -> None:
    """Three jobs wait behind one; the group grows only after its GPU has been busy for three minutes."""
    whole = scenario(*(job(f"j{number}", 0.0, 2 * HOUR) for number in range(4)), hours=1.0)
    _, machines = played(whole, UtilizationOnly((offer("g4dn.xlarge/sim-a/on-demand"),)))
    launched = [second_of(machine) or 0.0 for machine in machines]
    assert launched[0] == 0.0
    assert launched[1] >= 60.0 + utilization.HIGH_SECONDS  # it boots, then is measured


def test_utilization_only_removes_busy_nodes() -> None:
    """Two nodes, each a quarter busy: one is removed after fifteen minutes at the earliest, and its work restarts."""
    stay = (job("a", 0.0, 2 * HOUR), job("c", 900.0, 2 * HOUR))
    jobs = (*stay, job("b", 0.0, 1500.0, gpus=3), job("d", 900.0, 600.0))
    score, machines = played(scenario(*jobs, hours=2.0), UtilizationOnly((offer("g4dn.12xlarge/sim-a/on-demand"),)))
    ended = [second_of(machine, lambda machine: machine.terminated_at) for machine in machines]
    assert min(at for at in ended if at is not None) > utilization.LOW_SECONDS
    assert score.evicted_count > 0
    assert score.lost_gpu_hours > 0.5


# ---- cluster-autoscaler


def test_cluster_autoscaler_waits_for_the_unneeded_time() -> None:
    """A job of two minutes; the node is removed ten minutes after it, not earlier."""
    _, (machine,) = played(scenario(job("a", 0.0, 120.0), hours=2.0), ClusterAutoscaler())
    ended = second_of(machine, lambda machine: machine.terminated_at)
    assert ended is not None
    idle_since = (second_of(machine) or 0.0) + 60.0 + 120.0
    assert idle_since + cluster_autoscaler.UNNEEDED_SECONDS < ended < idle_since + 900.0


def test_cluster_autoscaler_buys_by_least_waste_then_price() -> None:
    """One GPU is requested: a small node, and the cheapest of those with equal waste."""
    _, (machine,) = played(scenario(job("a", 0.0, 120.0), hours=0.2), ClusterAutoscaler())
    assert machine.offer.key == "g4dn.xlarge/sim-a/spot"


def test_cluster_autoscaler_ignores_notices() -> None:
    """Its node is reclaimed with two minutes' notice: another is bought only when the pod is pending again."""
    taken = Reclaim(at_seconds=1200.0, zone="sim-a", ratio=1.0, notice_seconds=120.0)
    whole = scenario(job("a", 0.0, 2 * HOUR, work="training"), hours=1.0, reclaims=(taken,))
    score, machines = played(whole, ClusterAutoscaler())
    assert (second_of(machines[1]) or 0.0) > 1320.0
    assert score.lost_gpu_hours > 0.2


def test_a_refused_group_is_backed_off() -> None:
    """Where a zone has no spot capacity, the next group is tried at once."""
    whole = replace(
        scenario(job("a", 0.0, 120.0), hours=0.5),
        shortages=(Shortage(zone="sim-a", from_seconds=0.0, to_seconds=HOUR),),
    )
    _, (machine,) = played(whole, ClusterAutoscaler())
    assert machine.offer.key == "g4dn.xlarge/sim-b/spot"


# ---- karpenter


def test_karpenter_buys_the_cheapest_that_fits() -> None:
    """One GPU: the cheapest of all offers."""
    _, machines = played(scenario(job("a", 0.0, 120.0), hours=0.2), Karpenter())
    cheapest = min(OFFERS, key=lambda machine: machine.price_micro_usd_per_hour or 0)
    assert [machine.offer.key for machine in machines] == [cheapest.key]


def test_karpenter_respects_capacity_types() -> None:
    """The cheapest offer that the pod accepts."""
    _, machines = played(scenario(job("a", 0.0, 120.0, spot=False), hours=0.2), Karpenter())
    assert [machine.offer.key for machine in machines] == ["g4dn.xlarge/sim-a/on-demand"]


def test_karpenter_batches_pending_pods() -> None:
    """Four jobs within a second share one node."""
    jobs = [job(f"j{number}", 0.2 * number, 600.0) for number in range(4)]
    _, machines = played(scenario(*jobs, hours=0.2), Karpenter())
    assert [machine.offer.instance_type for machine in machines] == ["g4dn.12xlarge"]


def test_karpenter_removes_an_empty_node_soon() -> None:
    """After its job has ended: a search, fifteen seconds, validation, and the termination of the machine."""
    _, (machine,) = played(scenario(job("a", 0.0, 600.0), hours=1.0), Karpenter())
    ended = second_of(machine, lambda machine: machine.terminated_at)
    assert ended is not None
    assert ended < 90.0 * 1.4 + 10.0 + 600.0 + 120.0


def test_karpenter_replaces_a_node_at_its_notice() -> None:
    """Another node is bought within seconds of the notice, and training loses nothing."""
    taken = Reclaim(at_seconds=1200.0, zone="sim-a", ratio=1.0, notice_seconds=120.0)
    whole = scenario(job("a", 0.0, 2 * HOUR, work="training"), hours=1.0, reclaims=(taken,))
    score, machines = played(whole, Karpenter())
    assert 1200.0 <= (second_of(machines[1]) or 0.0) < 1220.0
    assert (score.interrupted_count, score.lost_gpu_hours) == (1, 0.0)


def test_karpenter_does_not_move_protected_pods() -> None:
    """Work that would restart from zero is annotated, and is never evicted voluntarily."""
    jobs = [job(f"j{number}", 30.0 * number, 300.0 * (number + 1), work="batch") for number in range(10)]
    score, _ = played(scenario(*jobs, hours=2.0), Karpenter())
    assert score.evicted_count == 0


# ---- all


class Failing:
    """Fails in its first step."""

    name = "stumbling"
    scan_seconds = 1.0

    def step(self, observation: Observation) -> Iterable[Action]:
        """Raise."""
        raise KeyError(observation.now_seconds)


def test_a_failing_baseline_gives_no_score() -> None:
    """A bug of a baseline ends the run with its cause; it is never scored as a system that buys nothing."""
    with pytest.raises(KeyError):
        played(scenario(job("a", 0.0, 60.0), hours=1.0), Failing())


# ---- omniscient


def test_the_bound_of_one_job_is_its_share_of_the_cheapest_node() -> None:
    """One GPU for an hour on a node of one GPU: the price of that node."""
    bound = score_omniscient(scenario(job("a", 0.0, HOUR, spot=False), hours=1.0))
    assert bound.cost_usd == pytest.approx(0.526, abs=0.005)
    assert score_omniscient(scenario(job("a", 0.0, HOUR), hours=1.0)).cost_usd == pytest.approx(0.16, abs=0.005)


@pytest.mark.parametrize("number", range(4))
def test_no_system_is_cheaper_than_the_bound(number: int) -> None:
    """Otherwise it would not be a bound."""
    whole = scenario(*EVERY, hours=1.0)
    score, _ = played(whole, baselines()[number])
    assert score.unfinished_count == 0
    assert score.cost_usd >= score_omniscient(whole).cost_usd
    assert score.waiting[ALL].mean_seconds >= 2.0


@pytest.mark.parametrize("number", range(4))
def test_a_score_is_reproducible(number: int) -> None:
    """The same scenario and baseline, the same score."""
    whole = scenario(*EVERY, hours=1.0)
    assert played(whole, baselines()[number])[0] == played(whole, baselines()[number])[0]
