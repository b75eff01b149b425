"""Broker losses in the simulator: all streams are lost, and the state is rebuilt from Kubernetes, cloud and store."""

import pytest
from tests.support.sweeping import represented

from gpu_autoscaler.sim.simulation import Result, Setting, Simulation
from gpu_autoscaler_services.scheduler.recovery import JobRecovery
from gpu_autoscaler_services.simulation import ROLES

LOST_AT_SECONDS = (900.0, 1800.0)


def lost_twice(seed: int) -> Result:
    """A run with two losses and no other fault."""
    simulation = Simulation(
        Setting(seed=seed, hours=0.75, kinds=("broker_lost",), only=(("broker_lost", 1), ("broker_lost", 2))), ROLES
    )
    for at_seconds in LOST_AT_SECONDS:
        simulation.loop.call_later(at_seconds, simulation.fault_schedule.strike, "broker_lost")
    result = simulation.run()
    assert result.faults == {"broker_lost": 2} or result.violations
    return result


@pytest.mark.parametrize("seed", represented(2, 3))
def test_the_state_is_rebuilt(seed: int) -> None:
    """Jobs within a reconcile period, nothing bought twice, no idle drain on missing data, the bill exact."""
    assert lost_twice(seed).violations == ()


def test_a_forgotten_job_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the invariant would prove nothing."""

    async def nobody_knows(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(JobRecovery, "jobs", nobody_knows)
    assert lost_twice(2).invariant == "state is rebuilt after a loss"


def test_an_orphaned_instance_is_terminated() -> None:
    """It has our tags but was not ordered: reported as an orphan, terminated, and charged."""
    simulation = Simulation(Setting(seed=2, hours=0.3, kinds=("instance_left_behind",)), ROLES)
    simulation.loop.call_later(600.0, simulation.fault_schedule.strike, "instance_left_behind")
    result = simulation.run()
    assert result.violations == ()
    assert result.reasons["node_orphaned"] >= 1


@pytest.mark.sweep
def test_job_spend_is_restored() -> None:
    """The new stream once had no sums of unknown jobs: job budgets restarted."""
    kinds = ("broker_lost", "operator_edits_policy")
    result = Simulation(Setting(seed=6, hours=1.0, kinds=kinds, faults_times=30.0, jobs_per_hour=30.0), ROLES).run()
    assert result.violations == ()
    assert result.faults["broker_lost"] >= 1
