"""Items of Kubernetes watches, from JSON as the API server sends it, and a pod watcher that is given them."""

import json
from datetime import UTC, datetime
from typing import Any

from tests.support.kube_objects import Json, pod

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import (
    CLAIMS,
    CLASSES,
    DEVICE_CLAIMS,
    DEVICE_CLASSES,
    DEVICE_TEMPLATES,
    GROUPS,
    NAMESPACES,
    PODS,
    PRIORITY_CLASSES,
    VOLUMES,
    Changed,
    Cluster,
    Kind,
    Listed,
)
from gpu_autoscaler.kube.wire.core import Object
from gpu_autoscaler_services.pod_watcher.service import PodWatcher

T0 = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
PODS_PER_GROUP = 10

_CLUSTER_KINDS = (VOLUMES, CLASSES, DEVICE_CLASSES, PRIORITY_CLASSES, NAMESPACES)


def new_watcher(
    *,
    are_quotas_watched: bool = False,
    are_provisioning_requests_served: bool = False,
    are_namespaces_watched: bool = False,
) -> PodWatcher:
    """A watcher that is given its items; it never calls its client."""
    kube = KubeClient(Connection(base_url="http://127.0.0.1:9"), now=lambda: T0)
    return PodWatcher(
        kube,
        Cluster(installation="uid", epoch=7),
        are_quotas_watched=are_quotas_watched,
        are_provisioning_requests_served=are_provisioning_requests_served,
        are_namespaces_watched=are_namespaces_watched,
    )


def decoded(kind: Kind[Any], item: Json, version: int, **metadata: Any) -> Object:  # noqa: ANN401 - any field of metadata
    """Return the object as decoded from the wire."""
    own = {"uid": item["metadata"]["name"], "namespace": "default", "creationTimestamp": "2026-11-21T11:00:00Z"}
    full = {**item, "metadata": {**item["metadata"], **own, "resourceVersion": str(version), **metadata}}
    return kind.decode(json.dumps(full).encode(), "read")  # type: ignore[no-any-return]


def listed(kind: Kind[Any], *objects: Object, version: int = 100, at: datetime = T0) -> Listed:
    """Return a whole list."""
    return Listed(kind=kind, objects=objects, version=version, seen_at=at)


def changed(kind: Kind[Any], obj: Object, at: datetime = T0) -> Changed:
    """Return a change."""
    return Changed(kind=kind, object=obj, seen_at=at)


# ---- pods with related objects


def thing(kind: Kind[Any], name: str, version: int, **fields: Any) -> Object:  # noqa: ANN401 - fields of any kind
    """Return an object of the kind; `metadata` adds to its metadata."""
    metadata = {"name": name, **fields.pop("metadata", {})}
    where = {"namespace": ""} if kind in _CLUSTER_KINDS else {}
    return decoded(kind, {"metadata": metadata, **fields}, version, **where)


def volume_spec(zone: str) -> Json:
    """Return the spec of a volume that one zone reaches."""
    term = {"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": [zone]}]}
    return {"nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}}


def device_spec(class_name: str, count: int) -> Json:
    """Return the spec of a device claim."""
    exactly = {"deviceClassName": class_name, "count": count}
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


def claiming_pods(count: int) -> list[Object]:
    """Return pods with a volume and a device claim of their own; ten share a pod group."""
    return [
        decoded(
            PODS,
            pod(
                f"p{number}",
                labels={"scheduling.x-k8s.io/pod-group": f"g{number // PODS_PER_GROUP}"},
                volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": f"c{number}"}}],
                resourceClaims=[{"name": "gpu", "resourceClaimName": f"d{number}"}],
            ),
            number + 1,
        )
        for number in range(count)
    ]


def related_lists(count: int) -> list[Listed]:
    """Return the lists of the objects that these pods name."""
    numbers, device = range(count), device_spec("gpu.nvidia.com", 1)
    objects: dict[Kind[Any], list[Object]] = {
        CLAIMS: [thing(CLAIMS, f"c{number}", 1, spec={"volumeName": f"v{number}"}) for number in numbers],
        VOLUMES: [thing(VOLUMES, f"v{number}", 1, spec=volume_spec("a")) for number in numbers],
        CLASSES: [],
        DEVICE_CLAIMS: [thing(DEVICE_CLAIMS, f"d{number}", 1, spec=device) for number in numbers],
        DEVICE_TEMPLATES: [],
        DEVICE_CLASSES: [thing(DEVICE_CLASSES, "gpu.nvidia.com", 1)],
        GROUPS: [
            thing(GROUPS, f"g{number}", 1, spec={"minMember": PODS_PER_GROUP})
            for number in range(count // PODS_PER_GROUP)
        ],
    }
    return [listed(kind, *objects_of_kind) for kind, objects_of_kind in objects.items()]
