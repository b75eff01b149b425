"""The simulated cloud's queue of events is enough to hear of every notice; it keeps its messages as real ones do."""

import pytest

from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.sim.events import HIDDEN_SECONDS, KIND
from gpu_autoscaler.sim.world import Setting, World
from gpu_autoscaler_services.simulation import ROLES


@pytest.fixture(scope="module")
def world() -> World:
    """A run in which metadata answers nobody, and notices come often."""
    lived = World(Setting(seed=2, hours=0.5, kinds=(KIND, "notice_120", "notice_30"), faults_times=8.0), ROLES)
    assert lived.run().broken == ()
    return lived


def test_where_metadata_is_closed_every_notice_comes_by_the_queue(world: World) -> None:
    """Nodes that are warned are answered by what the queue says alone, and no promise breaks."""
    told = [each.fact for each in world.record.order if isinstance(each.fact, SpotNoticeReceived)]
    assert world.events.is_metadata_closed
    assert told
    assert {notice.way for notice in told} == {"queue"}


def test_what_was_told_is_deleted_at_the_end(world: World) -> None:
    """A queue that keeps what is on record would be read again and again."""
    assert world.events.waiting == {}


def test_a_message_that_nobody_deletes_comes_again_after_a_while() -> None:
    """Whoever dies between reading and telling loses nothing."""
    lived = World(Setting(seed=1, kinds=(KIND,)), ROLES)
    lived.cloud.leave_behind(lived.cloud.listed()[0], "somebody")
    lived.cloud.warn(lived.cloud.machines[0], 600.0)
    first = lived.events.take(0.0)
    assert len(first) == 1
    assert lived.events.take(HIDDEN_SECONDS - 1.0) == []
    assert lived.events.take(HIDDEN_SECONDS + 1.0) == first
    lived.events.delete(first[0].number)
    assert lived.events.take(1000.0) == []
    lived.loop.close()
