"""Node objects of simulated machines as kubelets and the node life cycle write them: registration, readiness, removal.

Called by `cloud` only. Nodes deleted by somebody else stay deleted.
"""

from datetime import datetime

from gpu_autoscaler.model import labels
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.controllers.nodes import LEASE_NAMESPACE
from gpu_autoscaler.simcluster.device_plugin import shown_gpus
from gpu_autoscaler.simcluster.instances import Machine
from gpu_autoscaler.simcluster.kinds import LEASES, NODES
from gpu_autoscaler.simcluster.objects import Json, set_condition, stamp_micro
from gpu_autoscaler.simcluster.offers import capacity_of

LEASE_RENEW_SECONDS = 10.0  # kubelet renews at a quarter of nodeLeaseDurationSeconds, 40 s by default
LEASE_SECONDS = 40
KUBELET_VERSION = "v1.36.3"
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB, by NVIDIA's GPU feature discovery

_PRESSURES = (
    ("MemoryPressure", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
)


def register(api: Api, machine: Machine, now: datetime) -> None:
    """Create the node: labels and taints of the order, not ready, no GPUs yet."""
    node: Json = {
        "metadata": {"name": machine.node_name, "labels": _labels(machine)},
        "spec": {
            "providerID": machine.provider_id,
            "taints": [
                {"key": taint.key, "effect": taint.effect, **({"value": taint.value} if taint.value else {})}
                for taint in machine.taints
            ],
        },
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": machine.internal_ip},
                {"type": "Hostname", "address": machine.node_name},
            ],
            "capacity": _amounts(capacity_of(machine.kind)),
            "allocatable": _amounts(machine.offer.resources),
            "nodeInfo": _node_info(machine),
        },
    }
    for name, reason, message in _PRESSURES:
        set_condition(node, now, name, status="False", reason=reason, message=message)
    set_condition(
        node, now, "Ready", status="False", reason="KubeletNotReady", message="container runtime network not ready"
    )
    if api.find(NODES, machine.node_name) is None:
        api.create(NODES, None, node)
    renew_lease(api, machine, now)


def make_ready(api: Api, machine: Machine, now: datetime) -> None:
    """Mark the node ready and remove the taint that kept pods off."""
    _say_ready(api, machine, now, status="True", reason="KubeletReady", message="kubelet is posting ready status")


def show_gpus(api: Api, machine: Machine) -> None:
    """Make the GPUs allocatable, as the device plugin does some time after the node is ready."""
    kind = machine.kind
    memory_mib = (kind.gpu_memory_gib or 0) * 1024
    gpus = shown_gpus(kind.gpu_count, kind.gpu_model, memory_mib * 2**20, _labels(machine))

    def change(node: Json) -> None:
        for amounts in (node["status"]["capacity"], node["status"]["allocatable"]):
            amounts.update(gpus)
        node["metadata"].setdefault("labels", {}).update(
            {labels.GPU_PRODUCT: machine.telemetry.product.replace(" ", "-"), GPU_MEMORY_LABEL: str(memory_mib)}
        )

    api.modify(NODES, machine.node_name, change)


def shut_down(api: Api, machine: Machine, now: datetime) -> None:
    """Mark the node as shutting down, as a kubelet with graceful node shutdown does; its pods end."""
    _say_ready(api, machine, now, status="False", reason="KubeletNotReady", message="node is shutting down")


def forget(api: Api, machine: Machine) -> None:
    """Delete node and lease of a machine that is gone, as the cloud's node life-cycle controller does."""
    if api.find(NODES, machine.node_name) is not None:
        api.delete(NODES, machine.node_name)
    if api.find(LEASES, f"{LEASE_NAMESPACE}/{machine.node_name}") is not None:
        api.delete(LEASES, f"{LEASE_NAMESPACE}/{machine.node_name}")


def renew_lease(api: Api, machine: Machine, now: datetime) -> None:
    """Write the node's heartbeat."""
    spec = {"holderIdentity": machine.node_name, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": stamp_micro(now)}
    if api.modify(LEASES, f"{LEASE_NAMESPACE}/{machine.node_name}", lambda lease: lease.update(spec=spec)) is None:
        api.create(LEASES, LEASE_NAMESPACE, {"metadata": {"name": machine.node_name}, "spec": spec})


def _say_ready(api: Api, machine: Machine, now: datetime, **said: str) -> None:
    api.modify(NODES, machine.node_name, lambda node: set_condition(node, now, "Ready", **said))


def _labels(machine: Machine) -> dict[str, str]:
    """Return the order's labels, then those of the machine."""
    known = {
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/os": "linux",
        labels.HOSTNAME: machine.node_name,
        labels.INSTANCE_TYPE: machine.offer.instance_type,
        labels.ZONE: machine.offer.zone,
        labels.REGION: machine.region,
        labels.POOL: machine.pool,
        labels.CAPACITY_TYPE: str(machine.offer.capacity_type),
        labels.GPU_MODEL: machine.offer.gpu_model,
        labels.ACTION_ID: machine.action_id,
        labels.INSTALLATION: machine.installation,
    }
    return dict(machine.labels) | {key: value for key, value in known.items() if value}


def _amounts(resources: Resources) -> dict[str, str]:
    """Return the resources that a kubelet reports before any device plugin registers."""
    return {
        "cpu": f"{resources.cpu_milli}m" if resources.cpu_milli % 1000 else str(resources.cpu_milli // 1000),
        "memory": f"{resources.memory_bytes // 1024}Ki",
        "ephemeral-storage": str(resources.ephemeral_storage_bytes),
        "pods": str(resources.pod_count),
    }


def _node_info(machine: Machine) -> dict[str, str]:
    return {
        "architecture": "amd64",
        "bootID": "",
        "containerRuntimeVersion": "containerd://2.1.5",
        "kernelVersion": "6.12.0",
        "kubeProxyVersion": "",
        "kubeletVersion": KUBELET_VERSION,
        "machineID": machine.instance_id,
        "operatingSystem": "linux",
        "osImage": "Simulated Linux",
        "systemUUID": machine.instance_id,
    }
