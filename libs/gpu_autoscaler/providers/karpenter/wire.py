"""Karpenter's objects, as far as we read them. Source: CustomResourceDefinitions of sigs.k8s.io/karpenter v1.12.1,
`karpenter.sh_nodeclaims.yaml`, and `pkg/apis/v1/nodeclaim_status.go` (read 2026-11-22)."""

from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.kube.protocol import Kind
from gpu_autoscaler.kube.wire.core import Condition, Object

GROUP = "karpenter.sh"
API_VERSION = f"{GROUP}/v1"
NODE_POOL, CAPACITY_TYPE = f"{GROUP}/nodepool", f"{GROUP}/capacity-type"  # labels
KARPENTER_FINALIZER = f"{GROUP}/termination"  # present from before the launch until the instance is gone
LAUNCHED, REGISTERED, INSTANCE_TERMINATING = "Launched", "Registered", "InstanceTerminating"


class ClaimStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Status of a claim."""

    provider_id: str = msgspec.field(default="", name="providerID")
    node_name: str = ""
    conditions: tuple[Condition, ...] = ()


class NodeClaim(Object, frozen=True, kw_only=True):
    """One machine that Karpenter launches, maintains and terminates."""

    status: ClaimStatus = ClaimStatus()

    @property
    def created_at(self) -> datetime:
        return self.metadata.creation_timestamp or datetime.max.replace(tzinfo=UTC)

    def condition(self, name: str) -> Condition | None:
        return next((condition for condition in self.status.conditions if condition.type == name), None)

    def has(self, name: str) -> bool:
        condition = self.condition(name)
        return condition is not None and condition.status == "True"


class ClassStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a node class."""

    conditions: tuple[Condition, ...] = ()


class NodeClassObject(Object, frozen=True, kw_only=True):
    """A node class of any cloud."""

    status: ClassStatus = ClassStatus()


CLAIMS = Kind(plural="nodeclaims", api=f"/apis/{API_VERSION}", type=NodeClaim)
