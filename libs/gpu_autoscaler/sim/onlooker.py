"""What whoever acts on the world is seen to do. The witness looks on; whoever only compares looks away."""

from typing import Protocol

from gpu_autoscaler.kube import wire
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.sim.cloud import Machine


class Onlooker(Protocol):
    """Who sees what is done to the world by those who act on it."""

    def asked(self, order: Order, known_to: int) -> None:
        """Somebody is about to ask for a machine, and has heard its own stream up to this place."""
        ...

    def disturbed(self, pod: wire.Pod, *, is_forced: bool) -> None:
        """Somebody asks for the pod's eviction, or deletes it against all budgets."""
        ...

    def ended(self, machine: Machine) -> None:
        """Somebody ends a machine that lives."""
        ...

    def removed(self, node: wire.Node) -> None:
        """One of ours deletes a node's object."""
        ...
