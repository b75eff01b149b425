"""Karpenter as a driver: decisions become NodeClaims that leave Karpenter no choice; or, with mode limits, higher
limits of its NodePools."""
