"""The interface to Kubernetes: some kinds to watch, and a few writes. Implemented by `kube/client.py`.

All methods raise TransientError when the server is away, throttles or fails, NotFound, Conflict and Rejected because
of the object, PermanentError for every other refusal. Every call has its own time limit.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from gpu_autoscaler.kube.wire import core, devices, policy, provisioning, storage, workloads
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.observed import Instant

T = TypeVar("T")
# A merge patch (RFC 7386), or the operations of a JSON patch (RFC 6902), which reaches into lists.
Patch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
ObjectT = TypeVar("ObjectT", bound=core.Object)


class NotFound(PermanentError):
    """The object does not exist."""


class Conflict(PermanentError):
    """The object already exists, has another UID, or changed meanwhile."""


class Rejected(PermanentError):
    """The object breaks a rule of the API server (400, 422)."""


class Kind(msgspec.Struct, Generic[ObjectT], frozen=True, kw_only=True):
    """A kind of object that can be listed and watched across all namespaces."""

    plural: str  # as in paths, e.g. pods
    api: str  # path prefix, e.g. /apis/batch/v1
    type: type[ObjectT]
    is_optional: bool = False  # installed in some clusters only; otherwise its list is empty

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the path of the kind, of its objects in a namespace, or of one object."""
        middle = f"/namespaces/{namespace}" if namespace else ""
        return f"{self.api}{middle}/{self.plural}" + (f"/{name}" if name else "")

    @property
    def crd(self) -> str:
        return f"{self.plural}.{self.api.split('/')[2]}"

    def decode(self, body: bytes | msgspec.Raw, what: str) -> ObjectT:
        """Return the object in an answer. Raises PermanentError when it does not match the API."""
        return decoded(self.type, body, f"{what} {self.plural}")


@cache
def _decoder(schema: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(schema)


def decoded(schema: type[T], body: bytes | msgspec.Raw, what: str) -> T:
    """Return the struct in an answer. Raises PermanentError when it does not match the API."""
    try:
        value: T = _decoder(schema).decode(body)  # type: ignore[arg-type]  # a type is hashable
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise PermanentError(f"{what}: answer does not match the API: {exc}") from exc
    return value


PODS = Kind(plural="pods", api="/api/v1", type=core.Pod)
NODES = Kind(plural="nodes", api="/api/v1", type=core.Node)
BUDGETS = Kind(plural="poddisruptionbudgets", api="/apis/policy/v1", type=core.PodDisruptionBudget)
QUOTAS = Kind(plural="resourcequotas", api="/api/v1", type=core.ResourceQuota)
JOBS = Kind(plural="jobs", api="/apis/batch/v1", type=core.Job)
CLAIMS = Kind(plural="persistentvolumeclaims", api="/api/v1", type=storage.Claim)
VOLUMES = Kind(plural="persistentvolumes", api="/api/v1", type=storage.PersistentVolume)
CLASSES = Kind(plural="storageclasses", api="/apis/storage.k8s.io/v1", type=storage.StorageClass)
ATTACHMENTS = Kind(plural="volumeattachments", api="/apis/storage.k8s.io/v1", type=storage.Attachment)
GROUPS = Kind(plural="podgroups", api="/apis/scheduling.x-k8s.io/v1alpha1", type=storage.Group, is_optional=True)
VOLCANO_GROUPS = Kind(
    plural="podgroups", api="/apis/scheduling.volcano.sh/v1beta1", type=storage.Group, is_optional=True
)
_DEVICES = "/apis/resource.k8s.io/v1"  # since Kubernetes 1.34
DEVICE_CLAIMS = Kind(plural="resourceclaims", api=_DEVICES, type=devices.ResourceClaim, is_optional=True)
DEVICE_TEMPLATES = Kind(
    plural="resourceclaimtemplates", api=_DEVICES, type=devices.ResourceClaimTemplate, is_optional=True
)
DEVICE_CLASSES = Kind(plural="deviceclasses", api=_DEVICES, type=devices.DeviceClass, is_optional=True)
DEVICE_SLICES = Kind(plural="resourceslices", api=_DEVICES, type=devices.ResourceSlice, is_optional=True)
POLICIES = Kind(
    plural=policy.PLURAL, api=f"/apis/{policy.GROUP}/{policy.VERSION}", type=policy.Policy, is_optional=True
)
POD_TEMPLATES = Kind(plural="podtemplates", api="/api/v1", type=provisioning.PodTemplate)
PRIORITY_CLASSES = Kind(plural="priorityclasses", api="/apis/scheduling.k8s.io/v1", type=provisioning.PriorityClass)
PROVISIONING_REQUESTS = Kind(
    plural="provisioningrequests",
    api="/apis/autoscaling.x-k8s.io/v1beta1",  # the version that all releases of its definition serve
    type=provisioning.ProvisioningRequest,
    is_optional=True,
)
NAMESPACES = Kind(plural="namespaces", api="/api/v1", type=core.Object)
SERVICES = Kind(plural="services", api="/api/v1", type=core.Object)
SERVICE_ACCOUNTS = Kind(plural="serviceaccounts", api="/api/v1", type=core.Object)
NETWORK_POLICIES = Kind(plural="networkpolicies", api="/apis/networking.k8s.io/v1", type=core.Object)
# Third-party kinds that can carry the members of a job.
DEPLOYMENTS = Kind(plural="deployments", api="/apis/apps/v1", type=workloads.Scalable)
REPLICA_SETS = Kind(plural="replicasets", api="/apis/apps/v1", type=workloads.Scalable)
STATEFUL_SETS = Kind(plural="statefulsets", api="/apis/apps/v1", type=workloads.Scalable)
JOBSETS = Kind(plural="jobsets", api="/apis/jobset.x-k8s.io/v1alpha2", type=workloads.JobSet, is_optional=True)
PYTORCHJOBS = Kind(plural="pytorchjobs", api="/apis/kubeflow.org/v1", type=workloads.PyTorchJob, is_optional=True)
RAYJOBS = Kind(plural="rayjobs", api="/apis/ray.io/v1", type=workloads.RayJob, is_optional=True)
VOLCANO_JOBS = Kind(plural="jobs", api="/apis/batch.volcano.sh/v1alpha1", type=workloads.VolcanoJob, is_optional=True)


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """All objects of a kind at one version."""

    kind: Kind[Any]
    objects: tuple[core.Object, ...]
    version: int
    seen_at: Instant


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """The new state of an object."""

    kind: Kind[Any]
    object: core.Object
    seen_at: Instant


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """A deleted object; `object` is its last state, at the version of its deletion."""

    kind: Kind[Any]
    object: core.Object
    seen_at: Instant


class Bookmark(msgspec.Struct, frozen=True, kw_only=True):
    """All changes up to this version were delivered; also a heartbeat."""

    kind: Kind[Any]
    version: int
    seen_at: Instant


WatchItem = Listed | Changed | Deleted | Bookmark


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a cluster. A rebuilt one has another kube-system namespace and differs in both; one with an etcd
    that was restored from a backup differs in its epoch, once the restore is declared."""

    installation: str  # UID of the kube-system namespace
    epoch: int  # Unix seconds of its creation, or of the declared restore


# How an operator declares a restore.
RESTORED_COMMAND = (
    f'kubectl annotate namespace kube-system --overwrite {labels.RESTORED_AT}="$(date -u +%Y-%m-%dT%H:%M:%SZ)"'
)


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an eviction.

    `accepted`: the pod's grace period started. `gone`: the pod no longer exists, or another has its name.
    `blocked`: a PodDisruptionBudget denies it now. `refused`: several budgets select the pod; retrying cannot help.
    """

    answer: Literal["accepted", "gone", "blocked", "refused"]
    message: str = ""
    retry_after_seconds: float | None = None  # wall time; None without a Retry-After


class KubeApi(Protocol):
    """The calls to Kubernetes that services make."""

    def watch(self, kind: Kind[Any], *, label_selector: str = "") -> AsyncIterator[WatchItem]:
        """List, then watch, without an end: list again when history is lost, wait while the server is away."""

    async def cluster(self) -> Cluster:
        """Return the identity of the cluster."""

    async def get(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT:
        """Return the object. Raises NotFound."""

    async def serves(self, kind: Kind[Any]) -> bool:
        """True when the kind is installed."""

    async def pods_on(self, node_name: str) -> Sequence[core.Pod]:
        """Return the current pods bound to this node, finished ones included."""

    async def nodes_labeled(self, label_selector: str) -> Sequence[core.Node]:
        """Return the current nodes with these labels (`key=value`)."""

    async def volumes_on(self, node_name: str) -> Sequence[str]:
        """Return the names of the volumes attached to this node; none without the VolumeAttachment API."""

    async def patch_node(self, name: str, patch: Mapping[str, Any]) -> core.Node:
        """Apply a merge patch (RFC 7386) to the node. Raises NotFound, Conflict."""

    async def delete_node(self, node: core.Node) -> bool:
        """Delete exactly this node as observed; False when it was deleted or has changed since."""

    async def annotate_pod(self, pod: core.Pod, annotations: Mapping[str, str]) -> bool:
        """Set annotations; False when exactly this pod no longer exists."""

    async def evict_pod(self, pod: core.Pod) -> Eviction:
        """Request the eviction of exactly this pod, subject to PodDisruptionBudgets."""

    async def delete_pod(self, pod: core.Pod, *, grace_seconds: int) -> bool:
        """Delete exactly this pod regardless of PodDisruptionBudgets; False when it no longer exists. `grace_seconds`
        is at least 1."""

    async def make(self, kind: Kind[ObjectT], namespace: str, manifest: Mapping[str, Any]) -> ObjectT:
        """Create the object. Raises Conflict when its name is taken, NotFound when the kind is not installed."""

    async def change(
        self, kind: Kind[ObjectT], namespace: str, name: str, patch: Patch, *, subresource: str = ""
    ) -> ObjectT:
        """Apply a patch to the object, or to a subresource such as status. Raises NotFound, Conflict."""

    async def remove(self, kind: Kind[Any], thing: core.Object, *, is_last: bool = False) -> bool:
        """Delete exactly this object and, in the background, its dependents; False when it no longer exists."""

    async def close(self) -> None:
        """Close connections."""


class Now(Protocol):
    """Returns cluster time."""

    def __call__(self) -> datetime:
        """Return the current time, UTC."""
