"""A gateway on an in-process broker with its own store: published facts go over the bus, as in production."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.memory_bus import MemoryBus
from tests.support.timed_facts import Story, record

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.protocol import Ack, Projection, Publication
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.events.envelope import Recorded, encode
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import GatewaySettings
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.publisher import Publisher
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.gateway.access import NO_ACCESS_RULES, AccessRules
from gpu_autoscaler_services.gateway.api.logs import LogSource
from gpu_autoscaler_services.gateway.auth import Authenticator
from gpu_autoscaler_services.gateway.cost_history import CostHistory
from gpu_autoscaler_services.gateway.ledger import Ledger
from gpu_autoscaler_services.gateway.read_model import ReadModel
from gpu_autoscaler_services.gateway.recent_facts import Tail
from gpu_autoscaler_services.gateway.server import NO_LOGS, make_app, serving
from gpu_autoscaler_services.gateway.spec import Gateway

SETTLE_SECONDS_MAX = 60.0


class LossyBus(MemoryBus):
    """A bus whose broker can be down: publishing then fails with a transient error, as with a real one."""

    is_away = False
    unreadable: frozenset[str] = frozenset()  # streams that cannot be read now

    async def publish_many(self, publications: Sequence[Publication]) -> Sequence[Ack]:
        """As the bus does, unless the broker is down."""
        self._answer()
        return await super().publish_many(publications)

    async def publish(self, subject: str, payload: bytes, **more: Any) -> Ack:  # noqa: ANN401 - as the bus takes them
        """As the bus does, unless the broker is down."""
        self._answer()
        return await super().publish(subject, payload, **more)

    async def projection(self, stream: str, *, subjects: Sequence[str] = (), after_sequence: int = 0) -> Projection:
        """As the bus does, unless the stream cannot be read."""
        if stream in self.unreadable:
            raise TransientError(f"stream {stream} cannot be read now")
        return await super().projection(stream, subjects=subjects, after_sequence=after_sequence)

    def _answer(self) -> None:
        if self.is_away:
            raise TransientError("the broker does not answer", retry_after_seconds=3)


@dataclass(frozen=True, kw_only=True)
class Front:
    """A gateway that answers at `url`."""

    url: str
    model: ReadModel
    bus: LossyBus
    broker: MemoryBroker

    async def tell(self, *stories: Story) -> None:
        """Publish the stories' facts and fold them; returns when the gateway has seen them all."""
        recorded: list[Recorded] = []
        for each in record(told for story in stories for told in story):
            envelope = each.envelope
            ack = await self.model.bus.publish(envelope.fact.subject(), encode(envelope), message_id=envelope.id)
            recorded.append(Recorded(envelope=envelope, stream=ack.stream, sequence=ack.sequence))
        view = self.model.view
        view.advance(fold(view.state, recorded), {each.stream: each.sequence for each in recorded})
        async with asyncio.timeout(SETTLE_SECONDS_MAX):
            for stream in {each.stream for each in recorded}:
                while self.model.tail.position(stream) < await self.model.bus.last_sequence(stream):
                    await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def front(
    folder: Path,
    *,
    policy: ScalingPolicy = DEFAULT_POLICY,
    authenticators: Sequence[Authenticator] = (),
    rules: AccessRules = NO_ACCESS_RULES,
    readiness: Readiness | None = None,
    ring_count_max: int = 500,
    unreadable: frozenset[str] = frozenset(),
    port: int = 0,
    before: Front | None = None,
    logs: LogSource = NO_LOGS,
) -> AsyncIterator[Front]:
    """Serve a gateway until the context ends, on a free port by default. `before`: the gateway that it continues, with
    its broker and state."""
    declared = BusDeclaration(streams=streams())
    broker = MemoryBroker() if before is None else before.broker
    bus = LossyBus(broker, declared, now=lambda: datetime.now(UTC))
    bus.unreadable = unreadable
    await bus.ensure()
    store = await SqliteStore.open(folder / "store.db")
    clock, ledger = Clock(), Ledger()
    model = ReadModel(
        view=StateView() if before is None else before.model.view,
        tail=Tail(bus, clock, observers={"COST": ledger.observe}, ring_count_max=ring_count_max),
        cost_history=CostHistory(ledger, store, clock.now, span_days=1, ledger_days=400),
        store=store,
        bus=bus,
        publisher=Publisher(
            bus, clock, Metrics(Gateway.name), service=Gateway.name, instance="test", publishes=Gateway.publishes
        ),
        policy_file=policy,
        clock=clock,
    )
    app = make_app(model, authenticators=authenticators, rules=rules, readiness=readiness, logs=logs)
    try:
        async with serving(app, GatewaySettings(port=port)) as url:
            yield Front(url=url, model=model, bus=bus, broker=broker)
    finally:
        await bus.close()
        await store.close()
