"""Karpenter as a driver: decisions become NodeClaims that leave Karpenter no choice; or, with mode limits, higher
limits of its NodePools."""

from gpu_autoscaler.providers.karpenter.capacity import KarpenterCapacity
from gpu_autoscaler.providers.karpenter.limits_mode import LimitsModeCapacity
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions

__all__ = ["KarpenterCapacity", "KarpenterOptions", "LimitsModeCapacity"]
