"""Translates nodes to facts."""

from collections.abc import Mapping

from gpu_autoscaler.events.node import NodeGone, NodeObserved
from gpu_autoscaler.kube.translate.common import GPU_MODEL_LABELS, amounts, condition, honored, pairs
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.gpu import GPU_MODELS, gpu_model_name
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint

# Each node provisioner has its own label and values: Karpenter "Well-Known Labels", EKS managed node groups,
# GKE "Spot VMs", AKS "Spot node pool" (read 2026-11-21). Ours first.
CAPACITY_TYPE_LABELS: dict[str, dict[str, CapacityType]] = {
    labels.CAPACITY_TYPE: {item.value: item for item in CapacityType},
    "karpenter.sh/capacity-type": {item.value: item for item in CapacityType},
    "eks.amazonaws.com/capacityType": {
        "SPOT": CapacityType.SPOT,
        "ON_DEMAND": CapacityType.ON_DEMAND,
        "CAPACITY_BLOCK": CapacityType.RESERVED,
    },
    "cloud.google.com/gke-spot": {"true": CapacityType.SPOT},
    "kubernetes.azure.com/scalesetpriority": {"spot": CapacityType.SPOT, "regular": CapacityType.ON_DEMAND},
}
_MEBIBYTE = 2**20
# NVIDIA GPU feature discovery, "Generated Labels"; Karpenter "Well-Known Labels": both in MiB (read 2026-11-21).
_GPU_MEMORY_LABELS = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")


def node_observed(node: core.Node, *, epoch: int) -> NodeObserved:
    """Return the node as a fact. Raises PermanentError for an invalid quantity."""
    metadata, spec, status = node.metadata, node.spec, node.status
    if metadata.creation_timestamp is None:
        raise PermanentError(f"node {metadata.name} has no creationTimestamp")
    ready = condition(status.conditions, "Ready")
    is_ready = ready is not None and ready.status == "True"
    gpu_model = _gpu_model(metadata.labels)
    action_id = metadata.labels.get(labels.ACTION_ID) or metadata.annotations.get(labels.ACTION_ID)
    return NodeObserved(
        epoch=epoch,
        version=node.version,
        node_uid=NodeUid(metadata.uid),
        name=metadata.name,
        is_ready=is_ready,
        allocatable=amounts(status.allocatable, of=f"node {metadata.name}", is_capacity=True),
        created_at=metadata.creation_timestamp,
        provider_id=_provider_id(node),
        instance_type=metadata.labels.get(labels.INSTANCE_TYPE),
        zone=metadata.labels.get(labels.ZONE),
        capacity_type=_capacity_type(metadata.labels),
        gpu_model=gpu_model,
        gpu_memory_bytes=_gpu_memory_bytes(metadata.labels, gpu_model),
        is_cordoned=spec.unschedulable,
        ready_since=ready.last_transition_time if ready and is_ready else None,
        deleting_since=metadata.deletion_timestamp,
        has_finalizer=labels.TERMINATION_FINALIZER in metadata.finalizers,
        internal_ip=next((address.address for address in status.addresses if address.type == "InternalIP"), None),
        labels=pairs(metadata.labels),
        annotations=honored(metadata.annotations),
        taints=tuple(Taint(key=taint.key, effect=taint.effect, value=taint.value) for taint in spec.taints),
        action_id=ActionId(action_id) if action_id else None,
    )


def node_gone(node: core.Node, *, epoch: int) -> NodeGone:
    """Return the deletion of the node object as a fact."""
    return NodeGone(
        epoch=epoch,
        version=node.version,
        node_uid=NodeUid(node.metadata.uid),
        name=node.metadata.name,
        provider_id=_provider_id(node),
    )


def _provider_id(node: core.Node) -> ProviderId | None:
    return ProviderId(node.spec.provider_id) if node.spec.provider_id else None


def _capacity_type(node_labels: Mapping[str, str]) -> CapacityType | None:
    for key, values in CAPACITY_TYPE_LABELS.items():
        if (capacity_type := values.get(node_labels.get(key, ""))) is not None:
            return capacity_type
    return None


def _gpu_model(node_labels: Mapping[str, str]) -> str | None:
    names = (gpu_model_name(node_labels[key]) for key in GPU_MODEL_LABELS if key in node_labels)
    return next((name for name in names if name), None)


def _gpu_memory_bytes(node_labels: Mapping[str, str], gpu_model: str | None) -> int | None:
    for key in _GPU_MEMORY_LABELS:
        if node_labels.get(key, "").isdigit():
            return int(node_labels[key]) * _MEBIBYTE
    return GPU_MODELS[gpu_model].memory_bytes if gpu_model else None
