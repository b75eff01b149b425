"""The interface through which adapters report the actions of processes."""

from typing import Protocol

from gpu_autoscaler.kube import wire
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.sim.cloud import Machine


class Onlooker(Protocol):
    """Observes the actions of processes on the simulation."""

    def asked(self, order: Order, known_to: int) -> None:
        """A process that knows its own stream up to this sequence is about to launch a machine."""
        ...

    def disturbed(self, pod: wire.Pod, *, is_forced: bool) -> None:
        """A process evicts the pod, or deletes it regardless of its budgets."""
        ...

    def ended(self, machine: Machine) -> None:
        """A process terminates a running machine."""
        ...

    def removed(self, node: wire.Node) -> None:
        """A process deletes a node object."""
        ...
