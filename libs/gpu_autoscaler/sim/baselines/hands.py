"""Carries out what a baseline decides, by the doors that our executor uses: one launch a token, evictions that budgets
may refuse, machines ended when they are empty."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.sim.baselines.protocol import Act, Baseline, Buy, Leave, Stay
from gpu_autoscaler.sim.baselines.sight import Sight
from gpu_autoscaler.sim.capacity import SimCapacity
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.faults import Faults
from gpu_autoscaler.sim.gate import Gate
from gpu_autoscaler.sim.groups import Groups
from gpu_autoscaler.sim.kube import SimKube, WatchTrouble
from gpu_autoscaler.sim.timeline import VirtualClock, VirtualLoop
from gpu_autoscaler.sim.workloads import Workloads

EVICTED_AGAIN_SECONDS = 5.0  # after a budget said no
FORCED_GRACE_SECONDS = 1


class Immortal:
    """The process of a baseline: it never dies. Baselines are compared at their best."""

    is_dead = False
    role = "baseline"

    def kill(self) -> None:
        """Nothing ends it."""


class Bystander:
    """Sees, and holds no promise of ours against anybody."""

    def asked(self, order: Order, known_to: int) -> None:
        """Whoever asks twice is a bug of the baseline, which says so itself."""

    def disturbed(self, pod: wire.Pod, *, is_forced: bool) -> None:
        """Counted by the tally, from the pod itself."""

    def ended(self, machine: Machine) -> None:
        """As above."""

    def removed(self, node: wire.Node) -> None:
        """As above."""


class Hands:
    """One baseline at work."""

    def __init__(
        self, loop: VirtualLoop, faults: Faults, identity: Cluster, workloads: Workloads, groups: Groups, cloud: Cloud
    ) -> None:
        gate, clock, bystander = Gate(loop, faults, Immortal()), VirtualClock(loop), Bystander()
        self.orders: dict[str, Machine] = {}
        self.sight = Sight(workloads.cluster, cloud, self.orders)
        self._loop = loop
        self._clock = clock
        self._installation = identity.installation
        self._cloud = cloud
        self._kube = SimKube(gate, clock, identity, workloads, groups, WatchTrouble(), bystander)
        self._provider = SimCapacity(gate, cloud, bystander)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, baseline: Baseline) -> None:
        """Let it look and act from now on."""
        self._do(self._scan_for_ever(baseline))

    def has_stumbled(self) -> bool:
        """True when something went wrong that ought not to; `close` says what."""
        return any(task.done() and not task.cancelled() and task.exception() is not None for task in self._tasks)

    def close(self) -> None:
        """The run is over. Raises what went wrong in a task."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise RuntimeError("the baseline stumbled") from task.exception()
            task.cancel()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)
        else:
            self._loop.stop()

    async def _scan_for_ever(self, baseline: Baseline) -> None:
        while True:
            self.sight.now_seconds = self._loop.time()
            await self.perform(baseline.look(self.sight))
            await asyncio.sleep(baseline.scan_seconds)

    async def perform(self, acts: Iterable[Act]) -> None:
        """Do it all: purchases at once, the rest begun."""
        for act in acts:
            match act:
                case Buy():
                    await self._buy(act)
                case Leave():
                    if act.token not in self.sight.leaving:
                        self.sight.leaving.add(act.token)
                        self._do(self._leave(act))
                case Stay():
                    self.sight.leaving.discard(act.token)

    async def _buy(self, act: Buy) -> None:
        assert act.token not in self.orders, f"{act.token} was bought before"  # noqa: S101 - a bug of the baseline
        order = Order(
            action_id=ActionId(act.token),
            installation=self._installation,
            pool="baseline",
            offer=act.offer,
            labels=(),
            taints=(),
        )
        try:
            instance = await self._provider.launch(order)
        except LaunchRefused:
            self.sight.refused_at[act.offer.key] = self._loop.time()
            return
        machine = self._cloud.of_id(instance.provider_id)
        assert machine is not None, "what was launched is there"  # noqa: S101 - a bug of the simulator
        self.orders[act.token] = machine

    async def _leave(self, act: Leave) -> None:
        machine, began_at = self.orders[act.token], self._loop.time()
        while act.token in self.sight.leaving and machine.is_alive:
            if not await self._cordon(machine, is_cordoned=True):
                break
            pods = await self._kube.pods_on(machine.node_name)
            staying = [pod for pod in pods if pod.status.phase not in ("Succeeded", "Failed")]
            if not staying:
                break
            if act.seconds_max is not None and self._loop.time() - began_at > act.seconds_max:
                self.sight.leaving.discard(act.token)
                break
            for pod in staying:
                if pod.metadata.deletion_timestamp is None:
                    await self._evict(pod, is_forced=act.is_forced)
            await asyncio.sleep(
                1.0 if all(pod.metadata.deletion_timestamp for pod in staying) else EVICTED_AGAIN_SECONDS
            )
        if act.token in self.sight.leaving:
            await self._provider.terminate(machine.provider_id, now=self._clock.now())
        else:
            await self._cordon(machine, is_cordoned=False)

    async def _evict(self, pod: wire.Pod, *, is_forced: bool) -> None:
        eviction = await self._kube.evict_pod(pod)
        if is_forced and eviction.answer in ("blocked", "refused"):
            await self._kube.delete_pod(pod, grace_seconds=FORCED_GRACE_SECONDS)

    async def _cordon(self, machine: Machine, *, is_cordoned: bool) -> bool:
        """False where the machine has no node."""
        if self.sight.node(machine.node_name) is None:
            return False
        await self._kube.patch_node(machine.node_name, {"spec": {"unschedulable": True if is_cordoned else None}})
        return True
