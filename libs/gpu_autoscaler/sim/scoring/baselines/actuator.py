"""Executes the actions of a baseline as our executor does."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.sim.adapters.call_boundary import CallBoundary
from gpu_autoscaler.sim.adapters.kube_api import SimKube, WatchFaults
from gpu_autoscaler.sim.adapters.provider import SimProvider
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.replica_sets import ReplicaSets
from gpu_autoscaler.sim.faults.injection import Faults
from gpu_autoscaler.sim.invariants.observer import Observer
from gpu_autoscaler.sim.scoring.baselines.observation import Action, Baseline, Buy, Drain, Observation, Uncordon
from gpu_autoscaler.sim.virtual_time import VirtualClock, VirtualLoop

EVICTION_RETRY_SECONDS = 5.0  # after an eviction blocked by a budget
FORCED_GRACE_SECONDS = 1


class UnkillableProcess:
    """The process of a baseline: it is never killed or suspended, so baselines are compared at their best."""

    is_dead = False
    suspension = None
    role = "baseline"

    def kill(self) -> None:
        """Do nothing."""


class Actuator:
    """Runs one baseline."""

    def __init__(
        self,
        loop: VirtualLoop,
        faults: Faults,
        identity: Cluster,
        workloads: Workloads,
        replica_sets: ReplicaSets,
        cloud: Cloud,
    ) -> None:
        boundary, clock, bystander = CallBoundary(loop, faults, UnkillableProcess()), VirtualClock(loop), Observer()
        self.orders: dict[str, Machine] = {}
        self.observation = Observation(workloads.cluster, cloud, self.orders)
        self._loop = loop
        self._clock = clock
        self._installation = identity.installation
        self._cloud = cloud
        self._kube = SimKube(boundary, clock, identity, workloads, replica_sets, WatchFaults(), bystander)
        self._provider = SimProvider(boundary, cloud, bystander)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, baseline: Baseline) -> None:
        self._spawn(self._scan_forever(baseline))

    def close(self) -> None:
        """Cancel all tasks at the end of the run."""
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _scan_forever(self, baseline: Baseline) -> None:
        while True:
            self.observation.now_seconds = self._loop.time()
            await self.execute(baseline.step(self.observation))
            await asyncio.sleep(baseline.scan_seconds)

    async def execute(self, actions: Iterable[Action]) -> None:
        """Execute the actions: purchases at once, drains in the background."""
        for action in actions:
            match action:
                case Buy():
                    await self._buy(action)
                case Drain():
                    if action.token not in self.observation.draining:
                        self.observation.draining.add(action.token)
                        self._spawn(self._drain(action))
                case Uncordon():
                    self.observation.draining.discard(action.token)

    async def _buy(self, action: Buy) -> None:
        assert action.token not in self.orders, f"{action.token} was bought before"  # noqa: S101 - a bug of the baseline
        order = Order(
            action_id=ActionId(action.token),
            installation=self._installation,
            pool="baseline",
            offer=action.offer,
            labels=(),
            taints=(),
        )
        try:
            instance = await self._provider.launch(order)
        except LaunchRefused:
            self.observation.refused_at[action.offer.key] = self._loop.time()
            return
        machine = self._cloud.of_id(instance.provider_id)
        assert machine is not None, "a launched instance exists"  # noqa: S101 - a bug of the simulator
        self.orders[action.token] = machine

    async def _drain(self, action: Drain) -> None:
        machine, began_at = self.orders[action.token], self._loop.time()
        while action.token in self.observation.draining and machine.is_alive:
            if not await self._cordon(machine, is_cordoned=True):
                break
            pods = await self._kube.pods_on(machine.node_name)
            remaining = [pod for pod in pods if pod.status.phase not in ("Succeeded", "Failed")]
            if not remaining:
                break
            if action.seconds_max is not None and self._loop.time() - began_at > action.seconds_max:
                self.observation.draining.discard(action.token)
                break
            for pod in remaining:
                if pod.metadata.deletion_timestamp is None:
                    await self._evict(pod, is_forced=action.is_forced)
            await asyncio.sleep(
                1.0 if all(pod.metadata.deletion_timestamp for pod in remaining) else EVICTION_RETRY_SECONDS
            )
        if action.token in self.observation.draining:
            await self._provider.terminate(machine.provider_id, now=self._clock.now())
        else:
            await self._cordon(machine, is_cordoned=False)

    async def _evict(self, pod: core.Pod, *, is_forced: bool) -> None:
        eviction = await self._kube.evict_pod(pod)
        if is_forced and eviction.answer in ("blocked", "refused"):
            await self._kube.delete_pod(pod, grace_seconds=FORCED_GRACE_SECONDS)

    async def _cordon(self, machine: Machine, *, is_cordoned: bool) -> bool:
        """False where the machine has no node."""
        if self.observation.node(machine.node_name) is None:
            return False
        await self._kube.patch_node(machine.node_name, {"spec": {"unschedulable": True if is_cordoned else None}})
        return True
