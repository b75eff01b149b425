"""Kubernetes Events of ours: the same thing said again is one Event that counts. Used by the announcer."""

import hashlib
from datetime import datetime
from typing import Any

from gpu_autoscaler.core.explain.kube_events import Announcement
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import Conflict, NotFound
from gpu_autoscaler.kube.wire import policy

COMPONENT = "gpu-autoscaler"
NAMESPACE_OF_NODES = "default"  # where Events of objects without a namespace stand, as kubelets' do


class EventWriter:
    """Writes announcements as `v1` Events.

    Source: Kubernetes API reference v1.36, "Event"; k8s.io/client-go, tools/events and tools/record (read 2026-11-21).
    """

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube

    async def say(self, said: Announcement, now: datetime) -> None:
        """Make the Event, or count it once more under its new words; what happened once is not counted again.

        Raises TransientError, PermanentError.
        """
        namespace = said.namespace or NAMESPACE_OF_NODES
        path = f"/api/v1/namespaces/{namespace}/events"
        # The name is what it is about, so that a restart, and a second of us, go on counting where the first one was.
        digest = hashlib.sha256("/".join(said.topic).encode()).hexdigest()[:16]
        name, at = f"{said.name}.{digest}", f"{now:%Y-%m-%dT%H:%M:%SZ}"
        try:
            await self._kube.create(path, _event(said, namespace=namespace, name=name, at=at))
        except Conflict:
            if said.is_once:
                return
            known = await self._kube.read(f"{path}/{name}")
            more = {"count": int(known.get("count") or 0) + 1, "lastTimestamp": at, "message": said.message}
            await self._kube.patch(f"{path}/{name}", more)
        except NotFound:
            return  # its namespace went meanwhile, and everybody in it


_API_OF = {policy.KIND: f"{policy.GROUP}/{policy.VERSION}"}


def _event(said: Announcement, *, namespace: str, name: str, at: str) -> dict[str, Any]:
    about = {"apiVersion": _API_OF.get(said.kind, "v1"), "kind": said.kind, "name": said.name, "uid": said.uid}
    if said.namespace:
        about["namespace"] = said.namespace
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": about,
        "reason": said.reason,
        "message": said.message,
        "type": "Warning" if said.is_warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
