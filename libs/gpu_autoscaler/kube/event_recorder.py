"""Records Kubernetes Events; a repeated announcement increases the count of its Event. Used by the announcer."""

import hashlib
from datetime import datetime
from typing import Any

from gpu_autoscaler.core.explain.kube_events import Announcement
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import Conflict, NotFound
from gpu_autoscaler.kube.wire import policy

COMPONENT = "gpu-autoscaler"
NAMESPACE_OF_NODES = "default"  # of Events about cluster-scoped objects, as for kubelets


class EventRecorder:
    """Writes announcements as `v1` Events. Source: Kubernetes API reference v1.36, "Event"; k8s.io/client-go,
    tools/events and tools/record (read 2026-11-21)."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube

    async def record(self, announcement: Announcement, now: datetime) -> None:
        """Create the Event, or increase its count and update its message; `is_once` Events are not counted again.
        Raises TransientError, PermanentError."""
        namespace = announcement.namespace or NAMESPACE_OF_NODES
        path = f"/api/v1/namespaces/{namespace}/events"
        # The name is derived from the topic, so that a restarted or second process increases the same count.
        digest = hashlib.sha256("/".join(announcement.topic).encode()).hexdigest()[:16]
        name, at = f"{announcement.name}.{digest}", f"{now:%Y-%m-%dT%H:%M:%SZ}"
        try:
            await self._kube.create(path, _event(announcement, namespace=namespace, name=name, at=at))
        except Conflict:
            if announcement.is_once:
                return
            known = await self._kube.read(f"{path}/{name}")
            changes = {"count": int(known.get("count") or 0) + 1, "lastTimestamp": at, "message": announcement.message}
            await self._kube.patch(f"{path}/{name}", changes)
        except NotFound:
            return  # its namespace was deleted


_API_OF = {policy.KIND: f"{policy.GROUP}/{policy.VERSION}"}


def _event(announcement: Announcement, *, namespace: str, name: str, at: str) -> dict[str, Any]:
    involved = {
        "apiVersion": _API_OF.get(announcement.kind, "v1"),
        "kind": announcement.kind,
        "name": announcement.name,
        "uid": announcement.uid,
    }
    if announcement.namespace:
        involved["namespace"] = announcement.namespace
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": involved,
        "reason": announcement.reason,
        "message": announcement.message,
        "type": "Warning" if announcement.is_warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
