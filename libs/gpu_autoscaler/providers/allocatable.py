"""Estimate of the resources that a machine leaves to pods after kubelet and node agents, before a first node exists.

Kubelet CPU and memory as Amazon's EKS images reserve them (awslabs/amazon-eks-ami, nodeadm's kubelet defaults; not
looked up again). The share of the agents on each GPU node is our own figure. Observed allocatable amounts replace the
estimate once a node has joined.
"""

from gpu_autoscaler.model.resources import Resources

DISK_BYTES = 100 * 2**30  # root disk of launch templates and machine files; our recommendation
PODS_PER_NODE = 110  # kubelet's default maxPods
_KUBELET_MEMORY_BYTES = (255 + 11 * PODS_PER_NODE + 100) * 2**20  # reserved, per pod, eviction threshold
_AGENTS_CPU_MILLI = 300
_AGENTS_MEMORY_BYTES = 512 * 2**20


def allocatable(total: Resources) -> Resources:
    """Return what pods can use of a machine with these resources."""
    reserved = Resources(
        cpu_milli=_kubelet_cpu_milli(total.cpu_milli / 1000) + _AGENTS_CPU_MILLI,
        memory_bytes=_KUBELET_MEMORY_BYTES + _AGENTS_MEMORY_BYTES,
        ephemeral_storage_bytes=total.ephemeral_storage_bytes // 10,  # kubelet evicts below a tenth of the disk
    )
    return total - reserved


def machine_resources(vcpu_count: int, memory_bytes: float, gpu_count: int) -> Resources:
    """Return what pods can use of a machine of this size. `memory_bytes`: what its operating system sees."""
    total = Resources(
        cpu_milli=vcpu_count * 1000,
        memory_bytes=int(memory_bytes),
        gpu_count=gpu_count,
        ephemeral_storage_bytes=DISK_BYTES,
        pod_count=PODS_PER_NODE,
    )
    return allocatable(total)


def _kubelet_cpu_milli(vcpu_count: float) -> int:
    """Return 6 % of the first core, 1 % of the second, 0.5 % of the next two and 0.25 % of the rest."""
    tiers = ((1.0, 60.0), (1.0, 10.0), (2.0, 5.0), (float("inf"), 2.5))
    left, milli = vcpu_count, 0.0
    for width, per_core_milli in tiers:
        taken = min(left, width)
        milli += taken * per_core_milli
        left -= taken
    return round(milli)
