"""Invariant: a node deleted by hand is drained before its finalizer is removed; otherwise Kubernetes kills its pods."""

from collections.abc import Callable

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.kubernetes import Entry
from gpu_autoscaler.sim.workloads import Workloads

NO_VOLUNTARY_REMOVAL = "no voluntary removal"


class Holding:
    """Checks the pods of each removed node object."""

    def __init__(self, workloads: Workloads, cloud: Cloud, breaks: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._breaks = breaks
        workloads.cluster.listen(self._heard)

    def _heard(self, plural: str, entry: Entry) -> None:
        node = entry.object
        if plural != NODES.plural or not isinstance(node, wire.Node) or not entry.is_deleted:
            return
        machine = self._cloud.of_node(node.metadata.name)
        if machine is None or not machine.is_alive or node.metadata.deletion_timestamp is None:
            return  # it had no finalizer, or its pods ended with the machine
        left = [pod.metadata.name for pod in self._cloud.pods_on(machine) if pod.metadata.deletion_timestamp is None]
        if left:
            what = f"{machine.node_name} was deleted by hand, and let go with work on it: {', '.join(left)}"
            self._breaks(NO_VOLUNTARY_REMOVAL, what)
