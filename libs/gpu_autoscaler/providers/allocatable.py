"""What a machine leaves to pods, after what the kubelet and the agents of every node take. An estimate before purchase.

CPU and memory of the kubelet as Amazon's EKS images reserve them (awslabs/amazon-eks-ami, nodeadm's kubelet defaults;
not looked up again); the agents of every GPU node are our own figure. Learned promises replace it once a node is there.
"""

from gpu_autoscaler.model.resources import Resources

PODS_PER_NODE = 110  # kubelet's default maxPods
_KUBELET_MEMORY_BYTES = (255 + 11 * PODS_PER_NODE + 100) * 2**20  # reserve, a share for each pod, eviction threshold
_AGENTS_CPU_MILLI = 300
_AGENTS_MEMORY_BYTES = 512 * 2**20


def allocatable(whole: Resources) -> Resources:
    """Return what pods get of a machine that has this much."""
    kept = Resources(
        cpu_milli=_kubelet_cpu_milli(whole.cpu_milli / 1000) + _AGENTS_CPU_MILLI,
        memory_bytes=_KUBELET_MEMORY_BYTES + _AGENTS_MEMORY_BYTES,
        ephemeral_storage_bytes=whole.ephemeral_storage_bytes // 10,  # kubelet evicts below a tenth of the disk
    )
    return whole - kept


def _kubelet_cpu_milli(vcpu_count: float) -> int:
    """Return 6 % of the first core, 1 % of the second, 0.5 % of the next two, 0.25 % of the rest."""
    tiers = ((1.0, 60.0), (1.0, 10.0), (2.0, 5.0), (float("inf"), 2.5))
    left, milli = vcpu_count, 0.0
    for width, per_core_milli in tiers:
        taken = min(left, width)
        milli += taken * per_core_milli
        left -= taken
    return round(milli)
