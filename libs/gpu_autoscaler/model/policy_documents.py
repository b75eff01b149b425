"""Policies kept as Kubernetes objects (`AutoscalingPolicy`), in our units and names."""

import msgspec

from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType


class DocumentPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of a policy object. Empty filters allow every offer."""

    name: str
    nodes_count_min: int = 0
    nodes_count_max: int | None = None  # none: the limit of the policy
    gpu_models: tuple[str, ...] = ()
    instance_types: tuple[str, ...] = ()
    capacity_type: CapacityType | None = None  # none: mixed
    spot_ratio: float | None = None  # of a mixed pool
    priority: int = 0
    labels: dict[str, str] = {}
    zones: tuple[str, ...] = ()
    gpu_memory_gib_min: int | None = None
    idle_seconds: float | None = None


class PolicyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One policy object at one generation. None: unset, the policy file applies."""

    name: str
    uid: str
    generation: int
    created_at: Instant
    is_enabled: bool = True  # False: its pools are neither scaled up nor down voluntarily
    provider: str | None = None
    high_ratio: float | None = None
    low_ratio: float | None = None
    scale_up_cooldown_seconds: float | None = None
    scale_down_cooldown_seconds: float | None = None
    pending_pod_timeout_seconds: float | None = None
    nodes_count_min: int = 0
    nodes_count_max: int | None = None
    spot_ratio: float | None = None
    is_spot_allowed: bool = True
    is_multi_tier: bool | None = None
    is_forecast_on: bool | None = None
    idle_seconds: float | None = None  # of its pools
    pools: tuple[DocumentPool, ...] = ()

    @property
    def age_key(self) -> tuple[Instant, str]:
        """Sort key: oldest first, then by name."""
        return self.created_at, self.name
