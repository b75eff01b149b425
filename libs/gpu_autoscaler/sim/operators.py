"""Operators with kubectl: cordon nodes for hours, tighten PodDisruptionBudgets, override the policy, lower spend
limits.

They also add nodes of their own, which have capacity for pods and must not be cordoned, drained or terminated.
"""

import random
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.faults import Faults
from gpu_autoscaler.sim.groups import NAMESPACE, Groups
from gpu_autoscaler.sim.kubernetes import Entry, amounts_text, with_condition
from gpu_autoscaler.sim.workloads import Workloads

CORDONED_SECONDS = (600.0, 6 * 3600.0)
TIGHTENED_SECONDS = (120.0, 1800.0)
LOOKED_AGAIN_SECONDS = 60.0  # at a node that the cloud is reclaiming
OWN_NODES_COUNTS = (0, 0, 1, 2)


class Operators:
    """Everybody with write access to the cluster."""

    def __init__(
        self, workloads: Workloads, groups: Groups, cloud: Cloud, faults: Faults, chance: random.Random
    ) -> None:
        self._cluster = workloads.cluster
        self._loop = workloads.loop
        self._groups = groups
        self._cloud = cloud
        self._faults = faults
        self._chance = chance
        self._acts: Mapping[str, Callable[[], None]] = {
            "node_cordoned": self._cordon,
            "budget_tightened": self._tighten,
        }
        self._cordoned: set[str] = set()  # node names
        self._cluster.listen(self._heard)

    def begin(self) -> None:
        """Add own nodes; act until the faults end."""
        for number in range(self._chance.choice(OWN_NODES_COUNTS)):
            self._bring(f"own-{number}")
        for name in self._acts:
            self._await(name)

    def _await(self, name: str) -> None:
        seconds = self._faults.next_in_seconds(name)
        if seconds is not None:
            self._loop.call_later(seconds, self._act, name)

    def _act(self, name: str) -> None:
        if not self._faults.is_over:
            self._acts[name]()
            self._await(name)

    def _bring(self, name: str) -> None:
        shown = {
            labels.HOSTNAME: name,
            labels.GPU_MODEL: "T4",
            labels.CAPACITY_TYPE: str(CapacityType.ON_DEMAND),
        }
        amounts = amounts_text(16_000, 64 * GIBIBYTE, 200 * GIBIBYTE, pods=50)
        self._cluster.put(
            NODES,
            wire.Node(
                metadata=self._cluster.metadata("", name, labels=shown),
                spec=wire.NodeSpec(provider_id=f"metal://{name}"),
                status=wire.NodeStatus(
                    allocatable={**amounts, GPU_RESOURCE: "2"},
                    conditions=with_condition((), "Ready", "True", self._cluster.now()),
                ),
            ),
        )

    def _cordon(self) -> None:
        found = {machine.node_name: machine for machine in self._cloud.alive() if self._may_cordon(machine)}
        if found and self._faults.happens("node_cordoned"):
            machine = found[self._faults.choose("node_cordoned", sorted(found))]
            self._mark(machine, is_cordoned=True)
            seconds = self._faults.seconds("node_cordoned", *CORDONED_SECONDS)
            self._loop.call_later(seconds, self._uncordon, machine)

    def _may_cordon(self, machine: Machine) -> bool:
        node = self._cluster.find(NODES, "", machine.node_name)
        return machine.is_usable and machine.notice is None and node is not None and not node.spec.unschedulable

    def _uncordon(self, machine: Machine) -> None:
        if machine.notice is not None:  # the node stays cordoned for its notice
            self._loop.call_later(LOOKED_AGAIN_SECONDS, self._uncordon, machine)
        elif machine.is_alive:
            self._mark(machine, is_cordoned=False)

    def _mark(self, machine: Machine, *, is_cordoned: bool) -> None:
        node = self._cluster.find(NODES, "", machine.node_name)
        if node is not None and node.spec.unschedulable != is_cordoned:
            self._cluster.put(NODES, replace(node, spec=replace(node.spec, unschedulable=is_cordoned)))

    def _tighten(self) -> None:
        names = self._groups.names()
        if names and self._faults.happens("budget_tightened"):
            name = self._faults.choose("budget_tightened", names)
            loosen = self._groups.tighten(name)
            self._loop.call_later(self._faults.seconds("budget_tightened", *TIGHTENED_SECONDS), loosen)

    def _heard(self, plural: str, entry: Entry) -> None:
        """A node was cordoned: another replica fails just then, and a budget of its pods allows no disruption."""
        node = entry.object
        if plural != NODES.plural or not isinstance(node, wire.Node):
            return
        name = node.metadata.name
        if entry.is_deleted or not node.spec.unschedulable:
            self._cordoned.discard(name)
        elif name not in self._cordoned:
            self._cordoned.add(name)
            apps = {pod.metadata.labels.get("app", "") for pod in self._cluster.all(PODS) if _is_replica(pod, name)}
            if found := sorted(apps & set(self._groups.names())):
                self._spend(found)

    def _spend(self, names: list[str]) -> None:
        if self._faults.strikes("budget_spent_in_drain"):
            loosen = self._groups.tighten(self._faults.choose("budget_spent_in_drain", names))
            self._loop.call_later(self._faults.seconds("budget_spent_in_drain", *TIGHTENED_SECONDS), loosen)


def _is_replica(pod: wire.Pod, node_name: str) -> bool:
    return pod.spec.node_name == node_name and pod.metadata.namespace == NAMESPACE
