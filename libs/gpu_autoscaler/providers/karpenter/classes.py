"""What stands around a NodeClaim: the class that it is made from, and what Karpenter says of it in events."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import Kind, NotFound
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.providers.karpenter.options import NodeClass
from gpu_autoscaler.providers.karpenter.translate import INSUFFICIENT, NOT_READY
from gpu_autoscaler.providers.karpenter.wire import NodeClassObject

NOT_THERE = "NodeClassNotFound"
_FAILURES = (INSUFFICIENT, NOT_READY)


class Classes:
    """Reads the node class of the settings. Which path its kind has is asked of the server once."""

    def __init__(self, kube: KubeClient, node_class: NodeClass) -> None:
        self._kube = kube
        self._wanted = node_class
        self._kind: Kind[NodeClassObject] | None = None

    async def read(self) -> NodeClassObject | None:
        """Return the class, None where it is not there. Raises TransientError, PermanentError without the right."""
        try:
            return await self._kube.get(await self._kind_of(), "", self._wanted.name)
        except NotFound:
            return None

    async def lacking(self) -> tuple[str, str] | None:
        """Return why nothing can be made from the class: a word and a sentence. None: nothing is known against it."""
        asked = "/".join(self._wanted)
        try:
            found = await self.read()
        except PermanentError:
            return None  # we may not look: Karpenter will say
        if found is None:
            return NOT_THERE, f"there is no {asked}; make it, or name another in karpenter.node_class"
        ready = next((condition for condition in found.status.conditions if condition.type == "Ready"), None)
        if ready is not None and ready.status == "False":
            return NOT_READY, f"{asked} is not ready: {ready.reason}: {ready.message}"
        return None

    async def event_of(self, claim_name: str) -> tuple[str, str] | None:
        """Return the last failure that Karpenter has published of a claim. Raises PermanentError without the right."""
        selector = quote(f"involvedObject.kind=NodeClaim,involvedObject.name={claim_name}")
        answer = await self._kube.read(f"/api/v1/namespaces/default/events?fieldSelector={selector}")
        events: list[Mapping[str, Any]] = answer.get("items") or []
        said = [event for event in events if event.get("reason") in _FAILURES]
        return (str(said[-1]["reason"]), str(said[-1].get("message", ""))) if said else None

    async def _kind_of(self) -> Kind[NodeClassObject]:
        if self._kind is None:
            group = await self._served(f"/apis/{self._wanted.group}")
            api = f"/apis/{group['preferredVersion']['groupVersion']}"
            resources: list[Mapping[str, Any]] = (await self._served(api)).get("resources") or []
            plurals = [
                str(resource["name"])
                for resource in resources
                if resource["kind"] == self._wanted.kind and "/" not in resource["name"]
            ]
            if not plurals:
                raise TransientError(f"{api} serves no {self._wanted.kind}; see karpenter.node_class")
            self._kind = Kind(plural=plurals[0], api=api, type=NodeClassObject)
        return self._kind

    async def _served(self, path: str) -> Mapping[str, Any]:
        try:
            return await self._kube.read(path)
        except NotFound as exc:
            raise TransientError(
                f"{path} is not served: Karpenter's provider is not installed, or karpenter.node_class names another"
            ) from exc
