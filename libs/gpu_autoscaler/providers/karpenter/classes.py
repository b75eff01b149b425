"""The node class of NodeClaims, and Karpenter's events about claims."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import Kind, NotFound
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.providers.karpenter.options import NodeClass
from gpu_autoscaler.providers.karpenter.translate import INSUFFICIENT, NOT_READY
from gpu_autoscaler.providers.karpenter.wire import NodeClassObject

CLASS_NOT_FOUND = "NodeClassNotFound"
_FAILURES = (INSUFFICIENT, NOT_READY)


class NodeClasses:
    """Reads the node class of the settings. The API path of its kind is discovered once."""

    def __init__(self, kube: KubeClient, node_class: NodeClass) -> None:
        self._kube = kube
        self._node_class = node_class
        self._kind: Kind[NodeClassObject] | None = None

    async def read(self) -> NodeClassObject | None:
        """Return the class, None if it does not exist. Raises TransientError; PermanentError without permission."""
        try:
            return await self._kube.get(await self._kind_of(), "", self._node_class.name)
        except NotFound:
            return None

    async def problem(self) -> tuple[str, str] | None:
        """Return why nothing can be launched from the class, as code and sentence; None if nothing is known."""
        name = "/".join(self._node_class)
        try:
            node_class = await self.read()
        except PermanentError:
            return None  # not readable: Karpenter will report it
        if node_class is None:
            return CLASS_NOT_FOUND, f"node class {name} not found; create it, or correct karpenter.node_class"
        ready = next((condition for condition in node_class.status.conditions if condition.type == "Ready"), None)
        if ready is not None and ready.status == "False":
            return NOT_READY, f"node class {name} is not ready: {ready.reason}: {ready.message}"
        return None

    async def event_of(self, claim_name: str) -> tuple[str, str] | None:
        """Return the last failure that Karpenter published about a claim. Raises PermanentError without permission."""
        selector = quote(f"involvedObject.kind=NodeClaim,involvedObject.name={claim_name}")
        answer = await self._kube.read(f"/api/v1/namespaces/default/events?fieldSelector={selector}")
        events: list[Mapping[str, Any]] = answer.get("items") or []
        failures = [event for event in events if event.get("reason") in _FAILURES]
        return (str(failures[-1]["reason"]), str(failures[-1].get("message", ""))) if failures else None

    async def _kind_of(self) -> Kind[NodeClassObject]:
        if self._kind is None:
            group = await self._discover(f"/apis/{self._node_class.group}")
            api = f"/apis/{group['preferredVersion']['groupVersion']}"
            resources: list[Mapping[str, Any]] = (await self._discover(api)).get("resources") or []
            plurals = [
                str(resource["name"])
                for resource in resources
                if resource["kind"] == self._node_class.kind and "/" not in resource["name"]
            ]
            if not plurals:
                raise TransientError(f"{api} does not serve {self._node_class.kind}; check karpenter.node_class")
            self._kind = Kind(plural=plurals[0], api=api, type=NodeClassObject)
        return self._kind

    async def _discover(self, path: str) -> Mapping[str, Any]:
        try:
            return await self._kube.read(path)
        except NotFound as exc:
            raise TransientError(
                f"{path} is not served: install Karpenter's provider, or correct karpenter.node_class"
            ) from exc
