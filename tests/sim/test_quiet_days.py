"""A quiet month in the simulator: streams discard what they have, and the work that comes afterwards is served."""

from datetime import timedelta

import pytest

from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.events.scaling import ScalingNodeLaunched, ScalingPlanMade
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler.sim.virtual_time import ORIGIN
from gpu_autoscaler_services.simulation import ROLES

QUIET_DAYS = 35  # longer than any stream keeps facts
QUIET_MONTH = Setting(seed=1, hours=0.3, kinds=(), jobs_per_hour=20.0, quiet_days=QUIET_DAYS)


@pytest.mark.sweep
def test_work_is_served_after_a_quiet_month() -> None:
    """Nothing of before is in the streams any more; plans go on, and each new job gets its node."""
    simulation = Simulation(QUIET_MONTH, ROLES)
    result = simulation.run()
    assert result.violations == ()
    quiet_until = ORIGIN + timedelta(days=QUIET_DAYS)
    for fact in (ScalingPlanMade, ScalingNodeLaunched, JobFinished):
        published = [recorded for recorded in simulation.bus.published if isinstance(recorded.fact, fact)]
        before = [recorded for recorded in published if recorded.envelope.time < ORIGIN + timedelta(days=1)]
        after = [recorded for recorded in published if recorded.envelope.time > quiet_until]
        assert before, f"no {fact.__name__} before the month"
        assert after, f"no {fact.__name__} after the month"
        assert simulation.bus.span(fact.stream()).first_sequence > before[-1].sequence
