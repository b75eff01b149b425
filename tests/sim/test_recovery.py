"""Promise 7 in the simulator: the broker loses everything, and the rest of the world tells it again."""

import pytest

from gpu_autoscaler.sim.simulation import Result, Setting, Simulation
from gpu_autoscaler_services.scheduler.recovery import JobRecovery
from gpu_autoscaler_services.simulation import ROLES

LOST_AT_SECONDS = (1500.0, 3300.0)


def lost_twice(seed: int) -> Result:
    """A run in which nothing else goes wrong."""
    world = Simulation(
        Setting(seed=seed, hours=1.5, kinds=("broker_lost",), only=(("broker_lost", 1), ("broker_lost", 2))), ROLES
    )
    for at_seconds in LOST_AT_SECONDS:
        world.loop.call_later(at_seconds, world.fault_schedule.strike, "broker_lost")
    result = world.run()
    assert result.faults == {"broker_lost": 2} or result.broken
    return result


@pytest.mark.parametrize("seed", [2, 3])
def test_everything_is_known_again(seed: int) -> None:
    """Jobs within a reconcile period, nothing bought twice, no idle drain on what nobody has seen, the bill exact."""
    assert lost_twice(seed).broken == ()


def test_a_job_that_is_forgotten_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the check above would say nothing."""

    async def nobody_knows(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(JobRecovery, "jobs", nobody_knows)
    assert lost_twice(2).promise == "everything is rebuilt"


def test_a_machine_that_no_plan_knows_is_given_back() -> None:
    """It has our tags and nobody ordered it: reported as an orphan, ended, and paid."""
    world = Simulation(Setting(seed=2, hours=1.5, kinds=("instance_left_behind",)), ROLES)
    world.loop.call_later(600.0, world.fault_schedule.strike, "instance_left_behind")
    result = world.run()
    assert result.broken == ()
    assert result.reasons["node_orphaned"] >= 1


def test_what_jobs_have_spent_is_known_again() -> None:
    """The new stream was once told the sums of no job, as nobody had said yet which there are: budgets began anew."""
    kinds = ("broker_lost", "operator_edits_policy")
    result = Simulation(Setting(seed=6, hours=1.0, kinds=kinds, faults_times=30.0, jobs_per_hour=30.0), ROLES).run()
    assert result.broken == ()
    assert result.faults["broker_lost"] >= 1
