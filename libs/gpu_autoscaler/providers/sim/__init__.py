"""The cloud of the simulated cluster, over its capacity API."""

from gpu_autoscaler.providers.sim.capacity import SimCapacity

__all__ = ["SimCapacity"]
