"""A real broker that discards by age: what is alive stays readable, what is gone does not."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import ClassVar

import msgspec
import pytest
from tests.support.nats import nats_store, server
from tests.support.runners import Probe

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.loop_context import Limits
from gpu_autoscaler.runtime.runner import Runner

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

AGE_SECONDS = 4
NODE_STREAM = msgspec.structs.replace(
    next(spec for spec in streams() if spec.name == "NODE"), max_age_seconds=AGE_SECONDS, duplicate_window_seconds=1
)


def node(name: str) -> NodeObserved:
    """Return a node."""
    return NodeObserved(
        epoch=1, version=1, node_uid=NodeUid(name), name=name, is_ready=True, allocatable=Resources(),
        created_at=datetime(2026, 11, 21, tzinfo=UTC),
    )  # fmt: skip


class Watcher(Probe):
    """Publishes each node once; one of them ends at once."""

    name: ClassVar[str] = "watcher"
    publishes: ClassVar[tuple[type[Fact], ...]] = (NodeObserved,)
    resyncs: ClassVar[tuple[type[Fact], ...]] = (NodeObserved,)
    tick_seconds: ClassVar[float | None] = 3600.0

    async def on_tick(self, now: datetime) -> tuple[Fact, ...]:
        """Publish both nodes, once."""
        first = not self.ticks
        self.ticks.append(now)
        return (node("living"), node("ended")) if first else ()

    def living(self) -> Iterator[Fact]:
        """Yield the one that lives."""
        yield node("living")


async def test_a_node_stays_readable_while_it_lives(server: NatsServer) -> None:
    """Four times the age limit after it was published; the other one has aged out."""
    bus = await NatsBus.connect(server.url, name="watcher", declared=BusDeclaration(streams=(NODE_STREAM,)))
    await bus.ensure()
    service = Watcher()
    runner = Runner(service, bus, view=service.view, clock=Clock(), limits=Limits(resync_seconds=0.25))
    run = asyncio.create_task(runner.run())
    await asyncio.sleep(4 * AGE_SECONDS)
    span = await bus.span("NODE")
    stored = [await bus.message_at("NODE", number) for number in range(span.first_sequence, span.last_sequence + 1)]
    runner.stop()
    await asyncio.wait_for(run, 60)
    await bus.close()
    assert span.first_sequence > 2
    assert 3 <= span.last_sequence <= 12  # once in half the age limit, give or take: not with every look
    assert {message.message_id for message in stored if message is not None} == {node("living").condition()}
