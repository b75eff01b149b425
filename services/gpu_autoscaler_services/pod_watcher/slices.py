"""Slices of devices as last seen, for the nodes that they are on: GPUs that no device plugin counts.

What is said of such a node carries the version up to which its slices were seen, as `surroundings.py` does for pods.
"""

from collections.abc import Sequence

import msgspec

from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.kube import wire, wire_devices
from gpu_autoscaler.kube.protocol import DEVICE_SLICES, Changed, Deleted, Listed, WatchItem
from gpu_autoscaler.kube.translate.devices import offered
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.model.gpu import GPU_MODELS, gpu_model_name


class Slices:
    """What drivers offer, and on which nodes."""

    def __init__(self) -> None:
        self._slices: dict[str, wire_devices.ResourceSlice] = {}  # by name
        self._nodes: dict[str, wire.Node] = {}  # by name, as last seen
        self._told: dict[str, int] = {}  # by uid of the node: the version under which something was said of it
        self._version = 0

    def is_about(self, item: WatchItem) -> bool:
        """True for an item of this kind."""
        return item.kind is DEVICE_SLICES

    def take(self, item: WatchItem) -> Sequence[wire.Node]:
        """Remember what the item shows; return the nodes for which it may mean something."""
        names = {one.spec.node_name for one in self._slices.values()} if isinstance(item, Listed) else set[str]()
        match item:
            case Listed():
                known = [one for one in item.objects if isinstance(one, wire_devices.ResourceSlice)]
                self._slices = {one.metadata.name: one for one in known}
                names |= {one.spec.node_name for one in known}
                self._version = max(self._version, item.version)
            case Changed(object=wire_devices.ResourceSlice() as one):
                self._slices[one.metadata.name] = one
                names = {one.spec.node_name}
                self._version = max(self._version, one.version)
            case Deleted(object=wire_devices.ResourceSlice() as one):
                self._slices.pop(one.metadata.name, None)
                names = {one.spec.node_name}
                self._version = max(self._version, one.version)
        return [self._nodes[name] for name in sorted(names) if name in self._nodes]

    def observed(self, node: wire.Node, *, epoch: int) -> NodeObserved:
        """Return the node as a fact, with the GPUs that a driver offers there where no plugin counts any."""
        self._nodes[node.metadata.name] = node
        fact = node_observed(node, epoch=epoch)
        here = [one for one in self._slices.values() if one.spec.node_name == node.metadata.name]
        found = offered(here)
        if not here and node.metadata.uid not in self._told:
            return fact
        self._told[node.metadata.uid] = version = max(fact.version, self._version)
        fact = msgspec.structs.replace(fact, version=version)
        if fact.allocatable.has_gpus or not (found.gpu_count or found.slices):
            return fact
        model = fact.gpu_model or (None if found.product is None else gpu_model_name(found.product))
        memory_bytes = fact.gpu_memory_bytes or (GPU_MODELS[model].memory_bytes if model in GPU_MODELS else None)
        room = msgspec.structs.replace(fact.allocatable, gpu_count=found.gpu_count, slices=found.slices)
        return msgspec.structs.replace(fact, allocatable=room, gpu_model=model, gpu_memory_bytes=memory_bytes)

    def gone(self, uid: str) -> int:
        """Forget the node; return the version under which something was said of it last, zero where nothing was."""
        self._nodes = {name: node for name, node in self._nodes.items() if node.metadata.uid != uid}
        return self._told.pop(uid, 0)

    def absent_from(self, uids: frozenset[str]) -> list[wire.Node]:
        """The nodes of which something was said under a version of their slices, that are not among these."""
        return [node for node in self._nodes.values() if node.metadata.uid in self._told.keys() - uids]
