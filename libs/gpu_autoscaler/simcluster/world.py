"""One cluster in one process: store, API rules, controllers, faults, and the loop that runs them.

The cloud adds controllers of its own, which read and write objects through `api` like the others.
"""

from datetime import datetime
from typing import Protocol

from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.controllers.budgets import Budgets
from gpu_autoscaler.simcluster.controllers.checkpoints import Checkpoints
from gpu_autoscaler.simcluster.controllers.devices import DeviceClaims
from gpu_autoscaler.simcluster.controllers.garbage import Garbage
from gpu_autoscaler.simcluster.controllers.jobs import Jobs
from gpu_autoscaler.simcluster.controllers.kubelet import Kubelets
from gpu_autoscaler.simcluster.controllers.nodes import LEASE_NAMESPACE, NodeLifecycle
from gpu_autoscaler.simcluster.controllers.protocol import Controller
from gpu_autoscaler.simcluster.controllers.scheduler import Scheduler
from gpu_autoscaler.simcluster.controllers.volumes import Volumes
from gpu_autoscaler.simcluster.faults import Faults
from gpu_autoscaler.simcluster.kinds import NAMESPACES, PRIORITY_CLASSES, Registry
from gpu_autoscaler.simcluster.store import HISTORY_CHANGES_MAX, Store

TICK_SECONDS = 0.05

_FIRST_NAMESPACES = ("default", "kube-system", "kube-public", LEASE_NAMESPACE)
# Kubernetes documentation, "Pod Priority and Preemption: Interactions of Pod priority and QoS" (read 2026-11-21).
_FIRST_PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}


class WorldClock(Protocol):
    """Cluster time, which may pass faster than wall time."""

    @property
    def factor(self) -> float:
        """How many times faster."""

    def now(self) -> datetime:
        """Return cluster time, UTC."""

    async def sleep(self, seconds: float) -> None:
        """Wait for this much cluster time."""


class World:
    """The whole server except HTTP."""

    def __init__(
        self,
        clock: WorldClock,
        *,
        tick_seconds: float = TICK_SECONDS,
        history_changes_max: int = HISTORY_CHANGES_MAX,
        seed: int | None = None,
    ) -> None:
        """`tick_seconds`: cluster time between steps. `seed` makes names and uids repeatable; None: random."""
        self.clock = clock
        self.tick_seconds = tick_seconds
        self.store = Store(history_changes_max)
        self.registry = Registry()
        self.api = Api(self.store, self.registry, clock.now, seed=seed)
        self.faults = Faults(self.store)
        checkpoints = Checkpoints(self.api)
        self.kubelets = Kubelets(self.api, checkpoints)
        self.controllers: list[Controller] = []
        for controller in (
            Jobs(self.api),
            DeviceClaims(self.api),
            Scheduler(self.api),
            self.kubelets,
            checkpoints,
            Budgets(self.api),
            Volumes(self.api),
            NodeLifecycle(self.api),
            Garbage(self.api),
        ):
            self.add_controller(controller)
        for name in _FIRST_NAMESPACES:
            self.api.create(NAMESPACES, None, {"metadata": {"name": name}})
        for name, value in _FIRST_PRIORITIES.items():
            self.api.create(PRIORITY_CLASSES, None, {"metadata": {"name": name}, "value": value})

    def add_controller(self, controller: Controller, *, is_first: bool = False) -> None:
        """Add a controller that gets every change and every step, before the others or after."""
        self.store.subscribe(controller.on_change)
        self.controllers.insert(0 if is_first else len(self.controllers), controller)

    def step(self) -> None:
        for controller in self.controllers:
            controller.step(self.clock.now())

    async def run(self) -> None:
        """Step until canceled. An error in a controller ends the server."""
        while True:
            self.step()
            await self.clock.sleep(self.tick_seconds)
