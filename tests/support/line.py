"""The services at the heart of the system, run in one process: real runner, memory bus, simulated cluster."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.memory_bus import MemoryBus
from tests.support.upkeep import steps_of

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.streams import BUCKETS, BusDeclaration, streams
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Envelope, Recorded, encode
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.ids import FactId, ProviderId, derive_id
from gpu_autoscaler.runtime.decode import decode_message
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.service import Service, consumers_of
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.inventory import InstanceWatch
from gpu_autoscaler_services.scaler.purchases import Purchases
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery
from gpu_autoscaler_services.scaler.service import Digests, Scaler
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.service import Scheduler
from gpu_autoscaler_services.spot_watcher.offers import OffersPoller
from gpu_autoscaler_services.spot_watcher.service import SpotWatcher

FactT = TypeVar("FactT", bound=Fact)


def wall_now() -> datetime:
    """What the broker stamps messages with."""
    return datetime.now(UTC)


class Line:
    """A running system, its record, and the world around it."""

    def __init__(self, here: RunningCluster, store: SqliteStore, policy: ScalingPolicy) -> None:
        self.here = here
        self.store = store
        self.policy = policy
        self.broker = MemoryBroker()
        self._bus = MemoryBus(self.broker, BusDeclaration(streams=streams()), now=wall_now)
        self._runners: dict[str, tuple[Runner, asyncio.Task[None]]] = {}

    async def give_notice(self) -> SpotNoticeReceived:
        """Interrupt the first machine, with 20 s for the processes of a test, and publish the notice."""
        machine = self.here.cloud.machines[0]
        notice = SpotNoticeReceived(
            provider_id=ProviderId(machine.provider_id),
            kind="terminate",
            provider_event="1",
            reclaim_at=self.here.cloud.give_notice(machine, "terminate", 400.0),
            node_name=machine.node_name,
            received_at=self.here.clock.now(),
        )
        await self.say(notice)
        return notice

    async def say(self, fact: Fact) -> None:
        """Publish a fact as somebody outside."""
        now = self.here.clock.now()
        fact_id = FactId(fact.condition() or derive_id(fact.type_name(), now.isoformat()))
        envelope = Envelope(id=fact_id, source="/test", time=now, fact=fact)
        await self._bus.publish(fact.subject(), encode(envelope), message_id=fact_id)

    async def record(self) -> list[Recorded]:
        """Return all published facts, stream by stream."""
        said: list[Recorded] = []
        for spec in streams():
            for sequence in range(1, await self._bus.last_sequence(spec.name) + 1):
                message = await self._bus.message_at(spec.name, sequence)
                if message is not None and spec.name not in ("DEAD", "ATTEMPT", "ADVISORY"):
                    said.append(decode_message(message, self.here.clock))
        return said

    async def said(self, kind: type[FactT], holds: Callable[[FactT], object] = lambda _: True) -> list[FactT]:
        """Return the published facts of this type, in order."""
        return [one.fact for one in await self.record() if isinstance(one.fact, kind) and holds(one.fact)]

    async def wait_for(
        self, kind: type[FactT], holds: Callable[[FactT], object] = lambda _: True, seconds_max: float = 60.0
    ) -> FactT:
        """Return the first such fact, waiting for it."""

        async def first() -> FactT | None:
            return next(iter(await self.said(kind, holds)), None)

        found: FactT = await until(first, seconds_max)
        return found

    async def state(self) -> ClusterState:
        """The whole record, folded."""
        return fold(EMPTY_STATE, await self.record())

    async def dead_letters(self) -> list[str]:
        """Why messages were set aside."""
        reasons = []
        for sequence in range(1, await self._bus.last_sequence("DEAD") + 1):
            message = await self._bus.message_at("DEAD", sequence)
            if message is not None:
                reasons.append(message.headers.get("Dead-Reason", ""))
        return reasons

    # ---- the services

    async def start(self, name: str) -> None:
        """Start a service of this name; one that runs already is replaced by a fresh one."""
        await self.stop(name)
        view = StateView()
        service = self._make(name, view)
        declared = BusDeclaration(streams=streams(), consumers=consumers_of(service), buckets=BUCKETS)
        bus = MemoryBus(self.broker, declared, now=wall_now)
        await bus.ensure()
        runner = Runner(service, bus, view=view, clock=self.here.clock)
        self._runners[name] = (runner, asyncio.create_task(runner.run()))

    async def stop(self, name: str) -> None:
        """Stop it in good order."""
        if name in self._runners:
            runner, task = self._runners.pop(name)
            runner.stop()
            await task

    async def kill(self, name: str) -> None:
        """Stop it in the middle of whatever it does."""
        _, task = self._runners.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Stop all."""
        for name in tuple(self._runners):
            await self.stop(name)

    def _make(self, name: str, view: StateView) -> Service:
        here, clock = self.here, self.here.clock
        match name:
            case "pod_watcher":
                return PodWatcher(here.kube, here.cluster)
            case "spot_watcher":
                return SpotWatcher(OffersPoller(view, here.provider))
            case "scheduler":
                return Scheduler(view, self.policy, self.store, Binder(here.kube, "default"), clock.now)
            case "scaler":
                installation = here.cluster.installation
                purchases = Purchases(view, here.provider, installation, clock.now)
                return Scaler(
                    view,
                    self.policy,
                    Executor(
                        purchases,
                        Drains(view, here.kube, clock),
                        self.store,
                        steps_of(here.kube, here.provider, here.clock.now),
                    ),
                    DecisionRecovery(self.store, self.policy),
                    InstanceWatch(here.provider, installation, clock),
                    digests=Digests(policy="test", core="test"),
                    metrics=Metrics("scaler"),
                )
            case _:
                raise ValueError(name)


HEART = ("pod_watcher", "spot_watcher", "scheduler", "scaler")


@contextlib.asynccontextmanager
async def running_line(folder: Path, policy: ScalingPolicy, *, clock_factor: float = 20.0) -> AsyncIterator[Line]:
    """The four services on a fresh cluster, with a store in `folder`."""
    async with running_cluster(clock_factor=clock_factor) as here:
        store = await SqliteStore.open(folder / "store.db")
        line = Line(here, store, policy)
        try:
            for name in HEART:
                await line.start(name)
            yield line
        finally:
            await line.close()
            await store.close()
