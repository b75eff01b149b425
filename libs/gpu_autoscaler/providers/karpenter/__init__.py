"""Karpenter as a driver: what is decided here becomes its NodeClaims, and nothing is left for it to choose; or, by
choice, one machine more under the limits of its NodePools."""

from gpu_autoscaler.providers.karpenter.capacity import KarpenterCapacity
from gpu_autoscaler.providers.karpenter.limits_mode import LimitedCapacity
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions

__all__ = ["KarpenterCapacity", "KarpenterOptions", "LimitedCapacity"]
