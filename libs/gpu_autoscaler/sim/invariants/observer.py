"""The interface through which adapters report the actions of processes."""

from collections.abc import Mapping, Sequence

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.sim.cluster.cloud import Machine


class Observer:
    """Observes the actions of processes on the simulation; this one checks nothing."""

    def launch_requested(self, order: Order, reported_up_to: int) -> None:
        """A process that knows its own stream up to this sequence is about to launch a machine."""

    def pod_disrupted(self, pod: core.Pod, *, is_forced: bool) -> None:
        """A process evicts the pod, or deletes it regardless of its budgets."""

    def machine_terminated(self, machine: Machine) -> None:
        """A process terminates a running machine."""

    def node_deleted(self, node: core.Node) -> None:
        """A process deletes a node object."""

    def finalizers_patched(self, node: core.Node, finalizers: Sequence[str]) -> None:
        """A process changes the finalizers of a node."""

    def taints_patched(self, node: core.Node, keys: Sequence[str]) -> None:
        """A process changes the taints of a node."""

    def pod_annotated(self, pod: core.Pod, annotations: Mapping[str, str]) -> None:
        """A process annotates a pod."""
