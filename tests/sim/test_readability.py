"""Streams that discard by age and size lose nothing alive."""

import pytest

from gpu_autoscaler.runtime.resync import Resync
from gpu_autoscaler.sim.invariants import STATE_READABLE
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler_services.simulation import ROLES

SHORT = Setting(
    seed=2, hours=2.0, kinds=("retention_short", "service_killed", "snapshot_corrupt"), faults_times=8.0,
)  # fmt: skip


def test_a_service_that_starts_from_short_streams_knows_everything_alive() -> None:
    """Services are killed and read what is left of streams that forget within 40 minutes."""
    result = Simulation(SHORT, ROLES).run()
    assert result.violations == ()
    assert result.faults["service_killed"] > 0


@pytest.mark.sweep
def test_without_resync_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariant sees it at the next start of any service."""
    monkeypatch.setattr(Resync, "due", lambda *_: [])
    result = Simulation(SHORT, ROLES).run()
    assert result.invariant == STATE_READABLE
