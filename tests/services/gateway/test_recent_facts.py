"""The rings of recent facts are limited in bytes, those of large plans included."""

import gc
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pytest
from tests.support.memory_bus import MemoryBus

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.protocol import Message
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.events.examples import examples
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.gateway import recent_facts
from gpu_autoscaler_services.gateway.recent_facts import RING_COUNT_MAX, RINGS_BYTES_MAX, Tail
from gpu_autoscaler_services.gateway.subjects import SubjectFilter

MIB = 2**20
GATEWAY_MEMORY_BYTES = 1024 * MIB  # the container's limit in the chart
DECODED_RATIO_MAX = 4.0  # memory of a decoded plan by the bytes of its message; measured: 2.1


def large_plan(number: int, deferred_count: int) -> Message:
    """Return a plan that defers this number of actions, as a message of the stream."""
    (envelope,) = (item for item in examples() if isinstance(item.fact, ScalingPlanMade))
    fact = envelope.fact
    assert isinstance(fact, ScalingPlanMade)
    repeated = (fact.plan.deferred * deferred_count)[:deferred_count]
    assert len(repeated) == deferred_count
    plan_id = PlanId(f"plan-{number}")
    large = msgspec.structs.replace(fact, plan_id=plan_id, plan=msgspec.structs.replace(fact.plan, deferred=repeated))
    return _message(msgspec.structs.replace(envelope, id=f"id-{number}", fact=large), number)


def facts_of_each_type() -> Iterator[Message]:
    """Yield a fact of each type."""
    for number, envelope in enumerate(examples(), 1):
        yield _message(envelope, number)


def _message(envelope: Envelope, sequence: int) -> Message:
    return Message(
        subject=envelope.fact.subject(),
        payload=encode(envelope),
        message_id=envelope.id,
        stream=envelope.fact.stream(),
        sequence=sequence,
        stored_microseconds=1_800_000_000_000_000 + sequence,
    )


def new_tail(rings_bytes_max: int = RINGS_BYTES_MAX) -> Tail:
    """Return a tail that is given its messages."""
    broker = MemoryBus(MemoryBroker(), BusDeclaration(streams=streams()), now=lambda: datetime.now(UTC))
    return Tail(broker, Clock(), rings_bytes_max=rings_bytes_max)


def positions(tail: Tail, subject: str) -> list[str]:
    """Return the positions of the entries in memory, newest first."""
    return [entry.position for entry in tail.recent(SubjectFilter([subject]), RING_COUNT_MAX)]


def test_large_plans_take_the_memory_of_the_limit() -> None:
    """Fifty plans of five thousand deferred actions, 22 MB of messages: decoded, the kept ones are below the limit."""
    tail = new_tail(rings_bytes_max=8 * MIB)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, 51):
            tail.take([large_plan(number, 5_000)])
        gc.collect()
        held_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held_bytes < 8 * MIB * DECODED_RATIO_MAX
    assert positions(tail, "scaling.plan_made") == [f"SCALING:{number}" for number in range(50, 50 - 18, -1)]


def test_the_limit_leaves_most_of_the_container_free() -> None:
    """The state, snapshots and answers need memory too."""
    assert RINGS_BYTES_MAX * DECODED_RATIO_MAX < GATEWAY_MEMORY_BYTES / 4


def test_large_plans_displace_no_facts_of_other_streams() -> None:
    """The largest ring gives up its oldest facts, and keeps its newest, however large that is."""
    tail = new_tail(rings_bytes_max=100_000)
    others = [message for message in facts_of_each_type() if message.stream != "SCALING"]
    tail.take(others)
    for number in range(1, 11):
        tail.take([large_plan(number, 200)])
    assert positions(tail, "scaling.plan_made") == ["SCALING:10", "SCALING:9", "SCALING:8"]
    tail.take([large_plan(11, 2_000)])
    assert positions(tail, "scaling.plan_made") == ["SCALING:11"]
    assert {stream.partition(":")[0] for stream in positions(tail, ">")} == {
        "SCALING",
        *(message.stream for message in others),
    }


async def test_a_listener_with_too_many_bytes_unread_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets what is queued, then the reason; one that reads is not affected, and one plan may have any size."""
    monkeypatch.setattr(recent_facts, "LISTENER_BYTES_MAX", 30_000)
    tail = new_tail()
    slow, quick = (tail.listen(SubjectFilter(["scaling.>"]), 100) for _ in range(2))
    read = []
    for number, count in enumerate((2_000, 100, 100, 100), 1):
        tail.take([large_plan(number, count)])
        entry = await quick.next(1.0)
        assert entry is not None
        read.append(entry.position)
    assert read == ["SCALING:1", "SCALING:2", "SCALING:3", "SCALING:4"]
    assert quick.closed_because is None
    assert slow.closed_because == "29 KiB unread; resume with Last-Event-ID and a narrower filter"
    first, end = await slow.next(1.0), await slow.next(1.0)
    assert first is not None
    assert first.position == "SCALING:1"
    assert end is None
