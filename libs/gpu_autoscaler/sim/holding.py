"""A node that somebody deletes by hand is emptied before its object goes: until then our finalizer holds it.

Part of the witness. Whoever lets go too early leaves it to Kubernetes to throw out what runs there, without a word.
"""

from collections.abc import Callable

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.kubernetes import Entry
from gpu_autoscaler.sim.workloads import Workloads

PROMISE = "no voluntary removal"


class Holding:
    """Sees which objects of nodes go, and what runs there then."""

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
            return  # it was never held, or what ran there has ended with its machine
        left = [pod.metadata.name for pod in self._cloud.pods_on(machine) if pod.metadata.deletion_timestamp is None]
        if left:
            what = f"{machine.node_name} was deleted by hand, and let go with work on it: {', '.join(left)}"
            self._breaks(PROMISE, what)
