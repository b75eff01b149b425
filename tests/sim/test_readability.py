"""Streams that discard by age and size lose nothing alive."""

import pytest

from gpu_autoscaler.runtime.resync import Resync
from gpu_autoscaler.sim.invariants import STATE_READABLE
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler_services.simulation import ROLES

SHORT = Setting(
    seed=2, hours=2.0, kinds=("retention_short", "service_killed", "snapshot_corrupt"), faults_times=8.0,
)  # fmt: skip


@pytest.mark.sweep  # every start of every service in a run is compared with a reader of all facts
def test_a_service_that_starts_from_short_streams_knows_everything_alive() -> None:
    """Services are killed and read what is left of streams that forget within 40 minutes."""
    result = Simulation(SHORT, ROLES).run()
    assert result.violations == ()
    assert result.faults["service_killed"] > 0


@pytest.mark.sweep
def test_a_reader_that_has_lost_messages_starts_again() -> None:
    """A service is suspended until its stream has discarded what it has not read; in the end it knows what lives."""
    kinds = ("retention_short", "service_suspended")
    simulation = Simulation(Setting(seed=1, hours=2.0, kinds=kinds, faults_times=8.0, jobs_per_hour=30.0), ROLES)
    assert simulation.run().violations == ()
    assert ("dcgm_ingest", "NODE") in simulation.bus.unread_discarded


@pytest.mark.sweep
def test_without_resync_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariant sees it at the next start of any service."""
    monkeypatch.setattr(Resync, "due", lambda *_: [])
    result = Simulation(SHORT, ROLES).run()
    assert result.invariant == STATE_READABLE
