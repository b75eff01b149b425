"""The shape of a pod or member, and a node as placement sees it."""

import enum
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from gpu_autoscaler.core.placement.pod_affinity import NO_POD_CONSTRAINTS, PodConstraints
from gpu_autoscaler.core.placement.preferences import NO_PREFERENCES, PlacementPreferences
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NO_DEMANDS, NodeDemands, Taint, Toleration


class Shape(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What one member needs of its node."""

    resources: Resources  # with pod_count=1
    gpu_models: tuple[str, ...] = ()  # any of these; empty: any at all
    gpu_memory_bytes_min: int | None = None  # of one GPU
    demands: NodeDemands = NO_DEMANDS
    is_spot_allowed: bool = True
    pod_constraints: PodConstraints = NO_POD_CONSTRAINTS  # affinity, anti-affinity, spread
    preferences: PlacementPreferences = NO_PREFERENCES  # satisfied where that costs nothing


@lru_cache(4096)
def tolerating_all(shape: Shape) -> Shape:
    """Return the shape as if its pods tolerated every taint."""
    demands = msgspec.structs.replace(shape.demands, tolerations=(Toleration(operator="Exists"),))
    return msgspec.structs.replace(shape, demands=demands)


class BinReadiness(enum.IntEnum):
    """How ready a bin is; the more ready one is filled first."""

    READY = 0
    COMING = 1  # ordered, launched or registered: capacity until its deadline
    BOUGHT = 2  # by the current plan
    CLOSED = 3  # cordoned or not ready: takes nothing, but pod constraints count the pods that stay on it


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """A node as placement sees it: free amounts and properties."""

    key: str  # node/<uid> where it is registered and ready, else action/<action id>
    name: str  # node name, or action id before it has one
    free: Resources
    has_gpus: bool
    readiness: BinReadiness
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    pods: tuple[PodObserved, ...] = ()  # already on the node
    gpu_model: str | None = None
    gpu_memory_bytes: int | None = None
    capacity_type: CapacityType | None = None
    expected_at: Instant | None = None  # when a coming node is expected to be usable

    @property
    def gpus_count(self) -> int:
        """GPUs of the node, in use or not, as far as they are free or requested."""
        return self.free.gpu_count + sum(pod.requests.gpu_count for pod in self.pods)
