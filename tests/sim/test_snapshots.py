"""Starts in the simulator are the real ones: from snapshots, also from spoilt ones."""

import structlog
from structlog.testing import capture_logs

from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler_services.simulation import ROLES

SPOILT = ("snapshot_corrupt", "snapshot_of_old_version", "snapshot_of_other_stream")
KILLED_SECONDS = 300.0


def test_a_start_goes_on_from_a_snapshot_and_throws_spoilt_ones_away() -> None:
    """Scaler and scheduler die all the time; each start knows what the facts say, whatever snapshot it found."""
    structlog.reset_defaults()
    world = Simulation(Setting(seed=2, hours=1.5, kinds=SPOILT), ROLES)
    for number in range(1, 18):
        world.loop.call_later(number * KILLED_SECONDS, world.process_pool.restart, ("scaler", "scheduler"))
    with capture_logs() as logs:
        result = world.run()
    assert result.broken == ()
    assert {"corrupt", "format_changed", "stream_changed"} <= {one.get("reason") for one in logs}
    assert "started from a snapshot" in {one["event"] for one in logs}
