"""Starts in the simulator use real snapshots, corrupted ones included."""

import pytest
import structlog
from structlog.testing import capture_logs

from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler_services.simulation import ROLES

CORRUPTIONS = ("snapshot_corrupt", "snapshot_of_old_version", "snapshot_of_other_stream")
KILLED_SECONDS = 300.0
RESTARTED = tuple(name for name, role in ROLES.items() if role.snapshots is not None)


@pytest.mark.sweep
def test_a_start_uses_a_snapshot_and_discards_corrupted_ones() -> None:
    """Services are killed constantly; each start gives the state of all facts that it folds, from any snapshot."""
    structlog.reset_defaults()
    simulation = Simulation(Setting(seed=2, hours=1.5, kinds=CORRUPTIONS), ROLES)
    for number in range(1, 18):
        simulation.loop.call_later(number * KILLED_SECONDS, simulation.process_pool.restart, RESTARTED)
    with capture_logs() as logs:
        result = simulation.run()
    assert result.violations == ()
    assert {"corrupt", "format_changed", "stream_changed"} <= {entry.get("reason") for entry in logs}
    assert "state restored from snapshot" in {entry["event"] for entry in logs}
    assert {"scaler", "scheduler", "cost_tracker", "prices", "notices", "dcgm_ingest"} == set(RESTARTED)
