"""ResourceSlices of nodes: GPUs that no device plugin counts.

Facts of such a node carry the version up to which its slices were seen, as in `related_objects.py` for pods.
"""

from collections.abc import Sequence

import msgspec

from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.kube.protocol import DEVICE_SLICES, Changed, Deleted, Listed, WatchItem
from gpu_autoscaler.kube.translate.devices import offered
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.kube.wire import core, devices
from gpu_autoscaler.model.gpu import GPU_MODELS, gpu_model_name


class DeviceSlices:
    """The devices that drivers offer, by node."""

    def __init__(self) -> None:
        self._slices: dict[str, devices.ResourceSlice] = {}  # by name
        self._nodes: dict[str, core.Node] = {}  # by name, as last seen
        self._published: dict[str, int] = {}  # node uid -> version of its last fact
        self._version = 0

    def is_about(self, item: WatchItem) -> bool:
        """Return True for ResourceSlices."""
        return item.kind is DEVICE_SLICES

    def take(self, item: WatchItem) -> Sequence[core.Node]:
        """Apply the item; return the nodes that it may change."""
        is_list = isinstance(item, Listed)
        names = {known.spec.node_name for known in self._slices.values()} if is_list else set[str]()
        match item:
            case Listed():
                known = [slice_ for slice_ in item.objects if isinstance(slice_, devices.ResourceSlice)]
                self._slices = {slice_.metadata.name: slice_ for slice_ in known}
                names |= {slice_.spec.node_name for slice_ in known}
                self._version = max(self._version, item.version)
            case Changed(object=devices.ResourceSlice() as slice_):
                self._slices[slice_.metadata.name] = slice_
                names = {slice_.spec.node_name}
                self._version = max(self._version, slice_.version)
            case Deleted(object=devices.ResourceSlice() as slice_):
                self._slices.pop(slice_.metadata.name, None)
                names = {slice_.spec.node_name}
                self._version = max(self._version, slice_.version)
        return [self._nodes[name] for name in sorted(names) if name in self._nodes]

    def observed(self, node: core.Node, *, epoch: int) -> NodeObserved:
        """Return the node as a fact, with the GPUs that a driver offers there where no plugin counts any."""
        self._nodes[node.metadata.name] = node
        fact = node_observed(node, epoch=epoch)
        here = [slice_ for slice_ in self._slices.values() if slice_.spec.node_name == node.metadata.name]
        gpus = offered(here)
        if not here and node.metadata.uid not in self._published:
            return fact
        self._published[node.metadata.uid] = version = max(fact.version, self._version)
        fact = msgspec.structs.replace(fact, version=version)
        if fact.allocatable.has_gpus or not (gpus.gpu_count or gpus.slices):
            return fact
        model = fact.gpu_model or (None if gpus.product is None else gpu_model_name(gpus.product))
        memory_bytes = fact.gpu_memory_bytes or (GPU_MODELS[model].memory_bytes if model in GPU_MODELS else None)
        capacity = msgspec.structs.replace(fact.allocatable, gpu_count=gpus.gpu_count, slices=gpus.slices)
        return msgspec.structs.replace(fact, allocatable=capacity, gpu_model=model, gpu_memory_bytes=memory_bytes)

    def gone(self, uid: str) -> int:
        """Forget the node; return the version of its last fact, 0 if there is none."""
        self._nodes = {name: node for name, node in self._nodes.items() if node.metadata.uid != uid}
        return self._published.pop(uid, 0)

    def absent_from(self, uids: frozenset[str]) -> list[core.Node]:
        """Return the nodes with facts at a version of their slices that are not among these."""
        absent = self._published.keys() - uids
        return [node for node in self._nodes.values() if node.metadata.uid in absent]
