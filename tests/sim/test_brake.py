"""The brake in a simulated cluster whose spend limit is lowered again and again."""

from gpu_autoscaler.events.policy import PolicyDirectiveLifted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.directives import BRAKE
from gpu_autoscaler.sim.actors.operators import LOWERS_SPEND_LIMIT
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler_services.simulation import ROLES

# Of a few tried: one that removes more than three nodes by force.
SETTING = Setting(
    seed=5, hours=1.0, kinds=(LOWERS_SPEND_LIMIT,), faults_times=6.0, jobs_per_hour=40.0, ends_at_hours=1.0
)


def test_the_brake_holds_until_an_operator_resumes() -> None:
    """It trips, somebody resumes, more is removed, and no promise is broken."""
    simulation = Simulation(SETTING, ROLES)
    result = simulation.run()
    plans = [entry.fact.plan for entry in simulation.bus.facts["SCALING"] if isinstance(entry.fact, ScalingPlanMade)]
    trips = {plan.brake.tripped_at for plan in plans if plan.brake is not None}
    resumed = {
        entry.fact.tripped_at
        for entry in simulation.bus.facts["POLICY"]
        if isinstance(entry.fact, PolicyDirectiveLifted) and entry.fact.key == BRAKE
    }

    assert result.violations == ()
    assert len(trips) >= 1
    assert resumed & trips
    assert result.reasons["brake_tripped"] > 0
