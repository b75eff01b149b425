"""What we ask of Kubernetes: some kinds to watch, a handful of writes. Implemented by `kube/client.py`.

All methods raise TransientError when the server is away, throttles or fails, NotFound and Conflict where the object
says no, PermanentError for every other refusal. Every call has a time limit of its own.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from gpu_autoscaler.kube.wire import core, devices, policy, storage, workloads
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.observed import Instant

T = TypeVar("T")
# A merge patch (RFC 7386), or the operations of a JSON patch (RFC 6902), which reaches into lists.
Patch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
ObjectT = TypeVar("ObjectT", bound=core.Object)


class NotFound(PermanentError):
    """The object is not there (any more)."""


class Conflict(PermanentError):
    """The object is not the one that was meant: it exists already, has another UID, or changed meanwhile."""


class Kind(msgspec.Struct, Generic[ObjectT], frozen=True, kw_only=True):
    """A kind of object that can be listed and watched across all namespaces."""

    plural: str  # as in the path, e.g. pods
    api: str  # path prefix, e.g. /apis/batch/v1
    type: type[ObjectT]
    is_optional: bool = False  # installed in some clusters alone: where it is not, there is none of it

    def path(self, namespace: str = "", name: str = "") -> str:
        """Path of the whole kind, of a namespace's, or of one object."""
        middle = f"/namespaces/{namespace}" if namespace else ""
        return f"{self.api}{middle}/{self.plural}" + (f"/{name}" if name else "")

    @property
    def crd(self) -> str:
        """Name of the CustomResourceDefinition that brings the kind, for one of others."""
        return f"{self.plural}.{self.api.split('/')[2]}"

    def decode(self, body: bytes | msgspec.Raw, what: str) -> ObjectT:
        """Return the object in an answer. Raises PermanentError where it is not what the API describes."""
        return decoded(self.type, body, f"{what} {self.plural}")


@cache
def _decoder(wanted: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(wanted)


def decoded(wanted: type[T], body: bytes | msgspec.Raw, what: str) -> T:
    """Return the struct in an answer. Raises PermanentError where it is not what the API describes."""
    try:
        thing: T = _decoder(wanted).decode(body)  # type: ignore[arg-type]  # a type is hashable
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise PermanentError(f"{what}: the server's answer is not what the API describes: {exc}") from exc
    return thing


PODS = Kind(plural="pods", api="/api/v1", type=core.Pod)
NODES = Kind(plural="nodes", api="/api/v1", type=core.Node)
BUDGETS = Kind(plural="poddisruptionbudgets", api="/apis/policy/v1", type=core.PodDisruptionBudget)
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
    plural=policy.PLURAL,
    api=f"/apis/{policy.GROUP}/{policy.VERSION}",
    type=policy.Policy,
    is_optional=True,
)
NAMESPACES = Kind(plural="namespaces", api="/api/v1", type=core.Object)
SERVICES = Kind(plural="services", api="/api/v1", type=core.Object)
# Kinds that others bring, in which members of a job can be made.
JOBSETS = Kind(plural="jobsets", api="/apis/jobset.x-k8s.io/v1alpha2", type=workloads.JobSet, is_optional=True)
PYTORCHJOBS = Kind(plural="pytorchjobs", api="/apis/kubeflow.org/v1", type=workloads.PyTorchJob, is_optional=True)
RAYJOBS = Kind(plural="rayjobs", api="/apis/ray.io/v1", type=workloads.RayJob, is_optional=True)
VOLCANO_JOBS = Kind(plural="jobs", api="/apis/batch.volcano.sh/v1alpha1", type=workloads.VolcanoJob, is_optional=True)


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a kind at one version."""

    kind: Kind[Any]
    objects: tuple[core.Object, ...]
    version: int
    seen_at: Instant


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """An object is like this now."""

    kind: Kind[Any]
    object: core.Object
    seen_at: Instant


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """An object is gone; `object` is its last state, at the version of its deletion."""

    kind: Kind[Any]
    object: core.Object
    seen_at: Instant


class Bookmark(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing happened up to this version that was not told: a sign of life."""

    kind: Kind[Any]
    version: int
    seen_at: Instant


WatchItem = Listed | Changed | Deleted | Bookmark


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Which cluster this is. A restored or rebuilt one has another kube-system namespace, so it differs in both."""

    installation: str  # UID of the kube-system namespace
    epoch: int  # its creation in Unix seconds


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an eviction.

    `accepted`: the pod has its grace period now. `gone`: it was gone already, or another took its name.
    `blocked`: a disruption budget says not now. `refused`: the budgets contradict each other; asking again is vain.
    """

    answer: Literal["accepted", "gone", "blocked", "refused"]
    message: str = ""
    retry_after_seconds: float | None = None  # wall time; only where the server said so


class KubeApi(Protocol):
    """Kubernetes, as far as we need it."""

    def watch(self, kind: Kind[Any], *, label_selector: str = "") -> AsyncIterator[WatchItem]:
        """List, then watch, for ever: lists again where history is lost, waits where the server is away."""
        ...

    async def cluster(self) -> Cluster:
        """Return which cluster this is."""
        ...

    async def get(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT:
        """Return the object. Raises NotFound."""
        ...

    async def serves(self, kind: Kind[Any]) -> bool:
        """True where the kind is installed."""
        ...

    async def pods_on(self, node_name: str) -> Sequence[core.Pod]:
        """Return the pods bound to this node, as the server knows them now, finished ones included."""
        ...

    async def nodes_labelled(self, label_selector: str) -> Sequence[core.Node]:
        """Return the nodes with these labels (`key=value`), as the server knows them now."""
        ...

    async def volumes_on(self, node_name: str) -> Sequence[str]:
        """Return the volumes that are attached to this node, by name; none where the server knows no attachments."""
        ...

    async def patch_node(self, name: str, patch: Mapping[str, Any]) -> core.Node:
        """Apply a merge patch (RFC 7386) to the node. Raises NotFound, Conflict."""
        ...

    async def delete_node(self, node: core.Node) -> bool:
        """Delete that very node as it was seen; False where it is gone, or has changed since."""
        ...

    async def annotate_pod(self, pod: core.Pod, annotations: Mapping[str, str]) -> bool:
        """Set annotations; False where that very pod is gone."""
        ...

    async def evict_pod(self, pod: core.Pod) -> Eviction:
        """Ask for that very pod's eviction; budgets are respected."""
        ...

    async def delete_pod(self, pod: core.Pod, *, grace_seconds: int) -> bool:
        """Delete that very pod whatever its budgets say; False where it is gone. `grace_seconds` is at least 1."""
        ...

    async def make(self, kind: Kind[ObjectT], namespace: str, manifest: Mapping[str, Any]) -> ObjectT:
        """Create the object. Raises Conflict where its name is taken, NotFound where the kind is not installed."""
        ...

    async def change(self, kind: Kind[ObjectT], namespace: str, name: str, patch: Patch) -> ObjectT:
        """Apply a patch to the object. Raises NotFound, Conflict."""
        ...

    async def remove(self, kind: Kind[Any], thing: core.Object, *, is_last: bool = False) -> bool:
        """Delete that very object and what it made in the background; False where it is gone."""
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...


class Now(Protocol):
    """Cluster time, handed in from the runtime."""

    def __call__(self) -> datetime:
        """The instant, UTC."""
        ...
