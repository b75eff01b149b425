"""Kubernetes objects and names as each cloud gives them, at their usual size."""

import json

import msgspec

from gpu_autoscaler.model.ids import ProviderId, derive_id

_STAMP = "2026-11-21T12:00:00Z"


class Cloud(msgspec.Struct, frozen=True, kw_only=True):
    """Names as a cloud and its Kubernetes service give them; `{n}` is a number, `{h}` a digest of it."""

    name: str
    provider_id: str
    node_name: str
    instance_type: str
    zone: str
    labels: dict[str, str]  # besides those of every cloud

    def _filled(self, text: str, number: int) -> str:
        digest = f"{number * 2654435761 % 2**64:016x}"
        return text.format(n=f"{number:06x}", h=digest, i=f"{number // 250 % 250}-{number % 250}")

    def id_of(self, number: int) -> ProviderId:
        """Return the provider id of the instance of this number."""
        return ProviderId(self._filled(self.provider_id, number))

    def node_of(self, number: int) -> str:
        """Return the name of its node."""
        return self._filled(self.node_name, number)


CLOUDS = (
    Cloud(
        name="aws",
        provider_id="aws:///us-east-1a/i-0{h}",
        node_name="ip-10-0-{i}.us-east-1.compute.internal",
        instance_type="p4d.24xlarge",
        zone="us-east-1a",
        labels={
            "eks.amazonaws.com/capacityType": "SPOT",
            "eks.amazonaws.com/nodegroup": "gpu-a100-spot",
            "eks.amazonaws.com/nodegroup-image": "ami-0123456789abcdef0",
            "topology.ebs.csi.aws.com/zone": "us-east-1a",
            "topology.k8s.aws/zone-id": "use1-az1",
            "k8s.io/cloud-provider-aws": "0123456789abcdef0123456789abcdef",
        },
    ),
    Cloud(
        name="gcp",
        provider_id="gce://machine-learning-platform-prod/us-central1-a/gpa-0123456789ab-{h}-a1b2c3",
        node_name="gpa-0123456789ab-{h}-a1b2c3",
        instance_type="a2-highgpu-8g",
        zone="us-central1-a",
        labels={
            "cloud.google.com/gke-accelerator": "nvidia-tesla-a100",
            "cloud.google.com/gke-accelerator-count": "8",
            "cloud.google.com/gke-boot-disk": "pd-balanced",
            "cloud.google.com/gke-container-runtime": "containerd",
            "cloud.google.com/gke-nodepool": "gpu-a100-spot",
            "cloud.google.com/gke-spot": "true",
            "cloud.google.com/machine-family": "a2",
            "topology.gke.io/zone": "us-central1-a",
        },
    ),
    Cloud(
        name="azure",
        provider_id=(
            "azure:///subscriptions/01234567-89ab-cdef-0123-456789abcdef/resourceGroups/"
            "mc_machine-learning_cluster-prod_westeurope/providers/Microsoft.Compute/virtualMachineScaleSets/"
            "aks-gpua100spot-12345678-vmss/virtualMachines/aks-gpua100spot-12345678-vmss_{h}"
        ),
        node_name="aks-gpua100spot-12345678-vmss{n}",
        instance_type="Standard_ND96asr_v4",
        zone="westeurope-1",
        labels={
            "agentpool": "gpua100spot",
            "kubernetes.azure.com/accelerator": "nvidia",
            "kubernetes.azure.com/cluster": "mc_machine-learning_cluster-prod_westeurope",
            "kubernetes.azure.com/node-image-version": "AKSUbuntu-2204gen2containerd-202611.10.0",
            "kubernetes.azure.com/nodepool-type": "VirtualMachineScaleSets",
            "kubernetes.azure.com/os-sku": "Ubuntu",
            "kubernetes.azure.com/scalesetpriority": "spot",
            "kubernetes.azure.com/storageprofile": "managed",
            "topology.disk.csi.azure.com/zone": "westeurope-1",
        },
    ),
)


def uid(kind: str, number: int) -> str:
    """Return a uid as Kubernetes gives them."""
    digest = derive_id(kind, number)
    return f"{digest[:8]}-{digest[8:12]}-4{digest[13:16]}-9{digest[17:20]}-{digest[20:]}"


_TOLERATIONS = [
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
    {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
]
_TERM = {"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-A100-SXM4-40GB"]}]}


def _pod_labels(number: int) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "llm-finetune",
        "app.kubernetes.io/instance": f"llm-finetune-{number:05d}",
        "app.kubernetes.io/managed-by": "Helm",
        "batch.kubernetes.io/controller-uid": uid("job", number),
        "batch.kubernetes.io/job-name": f"llm-finetune-{number:05d}",
        "batch.kubernetes.io/job-completion-index": "0",
        "gpu-autoscaler.io/job-id": f"job-{derive_id('job', number)[:12]}",
        "team": "research",
    }


def pod_object(cloud: Cloud, number: int, phase: str, node: int | None = None) -> bytes:
    """A pod of a training job with the labels, tolerations and affinity that charts give it."""
    name, is_bound = f"llm-finetune-{number:05d}-worker-0-x7k2p", phase != "waiting"
    refused = (
        "0/1000 nodes are available: 412 Insufficient nvidia.com/gpu, 588 node(s) had untolerated taint "
        "{nvidia.com/gpu: present}. preemption: 0/1000 nodes are available: 1000 No preemption victims found for pod."
    )
    scheduled = {"type": "PodScheduled", "status": "True" if is_bound else "False", "lastTransitionTime": _STAMP}
    ready = {"type": "Ready", "status": "True" if phase == "running" else "False", "lastTransitionTime": _STAMP}
    limits = {"cpu": "12", "memory": "128Gi", "nvidia.com/gpu": "1"}
    spec = {
        "nodeName": cloud.node_of(number if node is None else node) if is_bound else "",
        "schedulerName": "default-scheduler",
        "terminationGracePeriodSeconds": 120,
        "containers": [{"name": "main", "image": "r/train:1", "resources": {"requests": limits, "limits": limits}}],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "tolerations": _TOLERATIONS,
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]}}
        },
    }
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": uid("job", number), "controller": True}
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "research-training",
            "uid": uid("pod", number),
            "resourceVersion": str(1_000_000_000 + number),
            "creationTimestamp": _STAMP,
            "labels": _pod_labels(number),
            "annotations": {"gpu-autoscaler.io/checkpointed-at": _STAMP},
            "ownerReferences": [owner],
        },
        "spec": spec,
        "status": {
            "phase": {"waiting": "Pending", "bound": "Pending"}.get(phase, phase.capitalize()),
            "startTime": _STAMP if is_bound else None,
            "conditions": [
                scheduled if is_bound else {**scheduled, "reason": "Unschedulable", "message": refused},
                ready,
            ],
        },
    }
    return json.dumps(document).encode()


def node_object(cloud: Cloud, number: int) -> bytes:
    """A node with the labels of kubelet, cloud, GPU feature discovery and ours."""
    name = cloud.node_of(number)
    own = {
        "beta.kubernetes.io/arch": "amd64",
        "beta.kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "node.kubernetes.io/instance-type": cloud.instance_type,
        "topology.kubernetes.io/region": cloud.zone[:-1],
        "topology.kubernetes.io/zone": cloud.zone,
        "gpu-autoscaler.io/action-id": derive_id("buy", number),
        "gpu-autoscaler.io/pool": "gpu-a100",
        "gpu-autoscaler.io/capacity-type": "spot",
        **{f"nvidia.com/{key}": value for key, value in _GPU_LABELS.items()},
        **cloud.labels,
    }
    amounts = {"cpu": "95690m", "memory": "1158Gi", "nvidia.com/gpu": "8", "pods": "110", "ephemeral-storage": "900Gi"}
    document = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": uid("node", number),
            "resourceVersion": str(1_000_000_000 + number),
            "creationTimestamp": _STAMP,
            "labels": own,
            "annotations": {},
            "finalizers": ["gpu-autoscaler.io/termination"],
        },
        "spec": {
            "providerID": cloud.id_of(number),
            "taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}],
        },
        "status": {
            "allocatable": amounts,
            "capacity": amounts,
            "addresses": [{"type": "InternalIP", "address": f"10.0.{number // 250}.{number % 250}"}],
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": _STAMP}],
        },
    }
    return json.dumps(document).encode()


# NVIDIA GPU feature discovery, "Generated Labels" (read 2026-11-21).
_GPU_LABELS = {
    "cuda.driver-version.full": "580.95.05",
    "cuda.driver-version.major": "580",
    "cuda.runtime-version.full": "13.0",
    "gfd.timestamp": "1795262400",
    "gpu.compute.major": "8",
    "gpu.compute.minor": "0",
    "gpu.count": "8",
    "gpu.deploy.container-toolkit": "true",
    "gpu.deploy.dcgm-exporter": "true",
    "gpu.deploy.device-plugin": "true",
    "gpu.deploy.driver": "true",
    "gpu.deploy.gpu-feature-discovery": "true",
    "gpu.deploy.mig-manager": "true",
    "gpu.deploy.operator-validator": "true",
    "gpu.family": "ampere",
    "gpu.machine": "p4d.24xlarge",
    "gpu.memory": "40960",
    "gpu.present": "true",
    "gpu.product": "NVIDIA-A100-SXM4-40GB",
    "gpu.replicas": "1",
    "gpu.sharing-strategy": "none",
    "mig.capable": "true",
    "mig.config": "all-disabled",
    "mig.config.state": "success",
    "mig.strategy": "single",
}
