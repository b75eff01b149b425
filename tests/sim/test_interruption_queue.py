"""The simulated cloud's queue of events is enough to hear of every notice; it keeps its messages as real ones do."""

import pytest

from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.sim.adapters.interruption_queue import METADATA_CLOSED, VISIBILITY_TIMEOUT_SECONDS
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler_services.simulation import ROLES


@pytest.fixture(scope="module")
def world() -> Simulation:
    """A run in which metadata answers nobody, and notices come often."""
    lived = Simulation(
        Setting(seed=2, hours=0.5, kinds=(METADATA_CLOSED, "notice_120", "notice_30"), faults_times=8.0), ROLES
    )
    assert lived.run().broken == ()
    return lived


def test_where_metadata_is_closed_every_notice_comes_by_the_queue(world: Simulation) -> None:
    """Nodes that are warned are answered by what the queue says alone, and no promise breaks."""
    description = [each.fact for each in world.bus.order if isinstance(each.fact, SpotNoticeReceived)]
    assert world.interruption_queue.is_metadata_closed
    assert description
    assert {notice.way for notice in description} == {"queue"}


def test_what_was_told_is_deleted_at_the_end(world: Simulation) -> None:
    """A queue that keeps what is on record would be read again and again."""
    assert world.interruption_queue.waiting == {}


def test_a_message_that_nobody_deletes_comes_again_after_a_while() -> None:
    """Whoever dies between reading and telling loses nothing."""
    lived = Simulation(Setting(seed=1, kinds=(METADATA_CLOSED,)), ROLES)
    lived.cloud.leave_behind(lived.cloud.listed()[0], "somebody")
    lived.cloud.warn(lived.cloud.machines[0], 600.0)
    first = lived.interruption_queue.take(0.0)
    assert len(first) == 1
    assert lived.interruption_queue.take(VISIBILITY_TIMEOUT_SECONDS - 1.0) == []
    assert lived.interruption_queue.take(VISIBILITY_TIMEOUT_SECONDS + 1.0) == first
    lived.interruption_queue.delete(first[0].number)
    assert lived.interruption_queue.take(1000.0) == []
    lived.loop.close()
