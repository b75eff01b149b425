"""Facts about living objects are published again while their stream still has them."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import msgspec
from tests.support.runners import Place, Probe, running, until

from gpu_autoscaler.bus.protocol import StreamSpan
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.runtime.resync import FACTS_COUNT_MAX, Resync

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
DAY = timedelta(days=1)
WEEK = StreamSpan(
    created_at=NOON, first_sequence=1, last_sequence=100, first_stored_at=NOON, bytes_count=10, bytes_max=1000,
    age_max=7 * DAY,
)  # fmt: skip


def node(name: str, version: int = 1) -> NodeObserved:
    """Return a node."""
    return NodeObserved(
        epoch=1, version=version, node_uid=NodeUid(name), name=name, is_ready=True, allocatable=Resources(),
        created_at=NOON,
    )  # fmt: skip


class Watcher(Probe):
    """Publishes nodes."""

    name: ClassVar[str] = "watcher"
    publishes: ClassVar[tuple[type[Fact], ...]] = (NodeObserved,)
    resyncs: ClassVar[tuple[type[Fact], ...]] = (NodeObserved,)

    def __init__(self, *nodes: NodeObserved) -> None:
        super().__init__()
        self.nodes = nodes

    def living(self) -> Iterator[Fact]:
        """Yield all nodes."""
        yield from self.nodes


def resync(*nodes: NodeObserved, published_at: datetime = NOON) -> Resync:
    """Return the memory of a watcher that has published these nodes, at sequences from 1 on."""
    memory = Resync(Watcher(*nodes))
    for number, fact in enumerate(nodes, start=1):
        memory.published(fact, number, stored_at=published_at, time=published_at)
    return memory


def test_nothing_is_due_in_the_younger_half() -> None:
    """A stream that is neither half full nor half old discards nothing for a long time."""
    assert resync(node("a")).due(WEEK, "NODE", NOON + 3 * DAY) == []
    assert Resync(Watcher(node("unknown"))).due(WEEK, "NODE", NOON + 3 * DAY) == []


def test_half_the_age_is_due_with_its_event_time() -> None:
    """The repeat keeps the time at which the fact became true."""
    memory = resync(node("a"))
    assert memory.due(WEEK, "NODE", NOON + 4 * DAY) == [(node("a"), NOON)]
    memory.published(node("a"), 101, stored_at=NOON + 4 * DAY, time=NOON)
    assert memory.due(WEEK, "NODE", NOON + 5 * DAY) == []
    assert memory.due(WEEK, "NODE", NOON + 8 * DAY) == [(node("a"), NOON)]


def test_the_older_half_of_a_full_stream_is_due() -> None:
    """Whatever its age: the limit by size discards it."""
    full = msgspec.structs.replace(WEEK, bytes_count=500)
    memory = resync(*(node(f"n{number:03}") for number in range(100)))
    due = memory.due(full, "NODE", NOON)
    assert [fact.node_uid for fact, _ in due if isinstance(fact, NodeObserved)] == [f"n{n:03}" for n in range(50)]


def test_unknown_position_is_due_once_the_stream_is_half_full() -> None:
    """Another process published it, at an unknown time."""
    memory = Resync(Watcher(node("a")))
    later = NOON + 4 * DAY
    assert memory.due(WEEK, "NODE", later) == [(node("a"), later)]
    memory.published(node("a"), 101, stored_at=later, time=later)
    assert memory.due(WEEK, "NODE", later) == []


def test_one_pass_is_bounded_and_takes_the_oldest_first() -> None:
    """The rest follows in the next pass."""
    nodes = [node(f"n{number:05}") for number in range(2 * FACTS_COUNT_MAX)]
    memory = resync(*reversed(nodes))
    due = memory.due(WEEK, "NODE", NOON + 6 * DAY)
    assert [fact for fact, _ in due] == nodes[: FACTS_COUNT_MAX - 1 : -1]


def test_only_living_objects_are_remembered() -> None:
    """A new version replaces the old one; what is gone is forgotten."""
    watcher = Watcher(node("a", 2))
    memory = Resync(watcher)
    for number, fact in enumerate((node("a"), node("gone"), node("a", 2)), start=1):
        memory.published(fact, number, stored_at=NOON, time=NOON)
    assert memory.due(WEEK, "NODE", NOON + 6 * DAY) == [(node("a", 2), NOON)]
    assert len(memory._positions) == 1


async def test_a_running_service_repeats_what_its_stream_would_discard() -> None:
    """The fact is stored a second time, with the time of the event, before the first one is discarded."""
    place = Place()
    place.passed = -4 * DAY
    await place.say(node("a"), at=NOON)
    place.passed = timedelta()
    async with running(place, Watcher(node("a"))):
        await until(lambda: _count(place, 2))
    first, again = await place.stored(NodeObserved)
    assert (again.fact, again.id) == (first.fact, first.id)


async def _count(place: Place, count: int) -> bool:
    return len(await place.stored(NodeObserved)) == count
