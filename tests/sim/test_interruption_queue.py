"""The simulated interruption queue is sufficient to receive every notice, and behaves like a real queue."""

import pytest

from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.sim.adapters.interruption_queue import METADATA_CLOSED, VISIBILITY_TIMEOUT_SECONDS
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler_services.simulation import ROLES


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """A run with closed metadata and frequent notices."""
    simulation_ = Simulation(
        Setting(seed=2, hours=0.5, kinds=(METADATA_CLOSED, "notice_120", "notice_30"), faults_times=8.0), ROLES
    )
    assert simulation_.run().violations == ()
    return simulation_


def test_with_closed_metadata_every_notice_arrives_by_the_queue(simulation: Simulation) -> None:
    """Nodes are drained by the queue's notices alone, without a violation."""
    notices = [recorded.fact for recorded in simulation.bus.published if isinstance(recorded.fact, SpotNoticeReceived)]
    assert simulation.interruption_queue.is_metadata_closed
    assert notices
    assert {notice.channel for notice in notices} == {"queue"}


def test_published_messages_are_deleted(simulation: Simulation) -> None:
    """Messages that are not deleted would be received again and again."""
    assert simulation.interruption_queue.waiting == {}


def test_a_message_that_is_not_deleted_is_redelivered() -> None:
    """A process killed between receiving and publishing loses nothing."""
    simulation_ = Simulation(Setting(seed=1, kinds=(METADATA_CLOSED,)), ROLES)
    simulation_.cloud.leave_behind(simulation_.cloud.listed()[0], "somebody")
    simulation_.cloud.warn(simulation_.cloud.machines[0], 600.0)
    first = simulation_.interruption_queue.take(0.0)
    assert len(first) == 1
    assert simulation_.interruption_queue.take(VISIBILITY_TIMEOUT_SECONDS - 1.0) == []
    assert simulation_.interruption_queue.take(VISIBILITY_TIMEOUT_SECONDS + 1.0) == first
    simulation_.interruption_queue.delete(first[0].number)
    assert simulation_.interruption_queue.take(1000.0) == []
    simulation_.loop.close()
