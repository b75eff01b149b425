"""Policies kept as Kubernetes objects (`AutoscalingPolicy`), in our units and names."""

import msgspec

from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType


class DocumentPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of a policy object. Empty filters allow every offer."""

    name: str
    nodes_count_min: int = 0
    nodes_count_max: int | None = None  # None: the limit of the policy
    gpu_models: tuple[str, ...] = ()  # models that it may buy
    instance_types: tuple[str, ...] = ()  # types that it may buy
    capacity_type: CapacityType | None = None  # None: mixed
    spot_ratio: float | None = None  # share of spot in a mixed pool, 0 to 1; None: that of the object
    priority: int = 0
    labels: dict[str, str] = {}  # of its nodes
    zones: tuple[str, ...] = ()  # zones that it may buy in
    gpu_memory_gib_min: int | None = None  # of one GPU, in GiB; None: no minimum
    idle_seconds: float | None = None  # an empty node is removed after so long; None: as in the policy


class PolicyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One policy object at one generation. None: unset, the policy file applies."""

    name: str
    uid: str  # UID of the object
    generation: int  # its metadata.generation
    created_at: Instant
    is_enabled: bool = True  # False: its pools are neither scaled up nor down voluntarily
    provider: str | None = None  # name of the cloud; None: not named
    high_ratio: float | None = None  # GPU utilization above which it scales up, 0 to 1; None: unset
    low_ratio: float | None = None  # GPU utilization below which a node is underused, 0 to 1; None: unset
    scale_up_cooldown_seconds: float | None = None  # least time between two scale-ups; None: unset
    scale_down_cooldown_seconds: float | None = None  # least time between two scale-downs; None: unset
    pending_pod_timeout_seconds: float | None = None  # how long pods wait before nodes are bought for them; None: unset
    nodes_count_min: int = 0
    nodes_count_max: int | None = None
    spot_ratio: float | None = None  # share of spot in mixed pools, 0 to 1; None: unset
    is_spot_allowed: bool = True  # False: no spot capacity
    is_multi_tier: bool | None = None  # False: mixed pools have no share of reserved capacity; None: unset
    is_forecast_on: bool | None = None  # True: the forecast may buy ahead; None: unset
    idle_seconds: float | None = None  # how long an empty node of its pools is kept; None: unset
    pools: tuple[DocumentPool, ...] = ()  # in the order of the object; empty: it defines none

    @property
    def age_key(self) -> tuple[Instant, str]:
        """Sort key: oldest first, then by name."""
        return self.created_at, self.name
