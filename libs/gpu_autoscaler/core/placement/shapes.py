"""What one pod or member asks for, and a node as placement sees it.

Asked of each other in `core/placement/constraints.py`.
"""

import enum
from collections.abc import Mapping

import msgspec

from gpu_autoscaler.core.placement.pod_affinity import NO_POD_CONSTRAINTS, PodConstraints
from gpu_autoscaler.core.placement.preferences import NO_PREFERENCES, PlacementPreferences
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NO_DEMANDS, NodeDemands, Taint


class Shape(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What one member of a gang needs of its node."""

    resources: Resources  # with pod_count=1
    gpu_models: tuple[str, ...] = ()  # any of these will do; empty: any at all
    gpu_memory_bytes_min: int | None = None  # of one GPU
    demands: NodeDemands = NO_DEMANDS
    is_spot_allowed: bool = True
    pod_constraints: PodConstraints = NO_POD_CONSTRAINTS  # what the pods near it have to be
    preferences: PlacementPreferences = NO_PREFERENCES  # what is kept where that costs nothing


class BinReadiness(enum.IntEnum):
    """How real a bin is; what is more real is filled first."""

    READY = 0
    COMING = 1  # ordered, launched or registered: room until its deadline
    BOUGHT = 2  # by the plan in the making


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """A node as placement sees it: free room and marks."""

    key: str  # node/<uid> where it is registered and ready, else action/<action id>
    name: str  # as people know it: node name, or action id before it has one
    free: Resources
    has_gpus: bool
    readiness: BinReadiness
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    pods: tuple[PodObserved, ...] = ()  # that stand there already
    gpu_model: str | None = None
    gpu_memory_bytes: int | None = None
    capacity_type: CapacityType | None = None
    expected_at: Instant | None = None  # when a coming node should be usable

    @property
    def gpus_count(self) -> int:
        """GPUs of the node, in use or not; more are not known than are free or asked for."""
        return self.free.gpu_count + sum(pod.requests.gpu_count for pod in self.pods)
