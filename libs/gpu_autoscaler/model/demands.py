"""What demand is made of: the shape of reported demand, and the pod sets of ProvisioningRequests."""

from typing import Final, Literal

import msgspec

from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NO_DEMANDS, NodeDemands, PodAffinitySpec, Preferences


class DemandShape(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Capacity for one member. Quantities as in Kubernetes: `8`, `500m`, `64Gi`."""

    gpu_count: int
    gpu_type: str | None = None  # a GPU model by name; None: any
    gpu_memory_gb: float | None = None  # of one GPU, in GiB; None: any
    cpu: str = "1"
    memory: str = "4Gi"
    ephemeral_storage: str = "10Gi"


# ---- ProvisioningRequests (autoscaling.x-k8s.io). Source: kubernetes/autoscaler, cluster-autoscaler/apis
# (read 2026-11-27).

CHECK_CAPACITY: Final = "check-capacity.autoscaling.x-k8s.io"
BEST_EFFORT_ATOMIC: Final = "best-effort-atomic-scale-up.autoscaling.x-k8s.io"
ProvisioningClass = Literal["check-capacity.autoscaling.x-k8s.io", "best-effort-atomic-scale-up.autoscaling.x-k8s.io"]
ProvisioningConditionType = Literal["Accepted", "Provisioned", "Failed", "BookingExpired", "CapacityRevoked"]


class PodSet(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Pods of one template that a ProvisioningRequest asks capacity for."""

    count: int
    requests: Resources  # of each pod
    priority: int = 0  # Kubernetes' spec.priority
    demands: NodeDemands = NO_DEMANDS
    pod_affinity: PodAffinitySpec | None = None  # None: no required rules
    gpu_models: tuple[str, ...] = ()  # acceptable models; empty: any
    gpu_memory_bytes_min: int | None = None  # of one GPU; None: no minimum
    labels: tuple[tuple[str, str], ...] = ()  # of the pods, sorted by key
    preferences: Preferences | None = None  # None: no preferences
    volume_trouble: str = ""  # why no node helps before a volume is ready; empty: volumes are no obstacle
    device_trouble: str = ""  # why its device claims cannot be evaluated; empty: they can, or it has none


class ProvisioningCondition(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A condition in the status of a ProvisioningRequest."""

    type: ProvisioningConditionType  # name of the condition
    is_true: bool
    since: Instant  # its lastTransitionTime
    reason: str = ""
