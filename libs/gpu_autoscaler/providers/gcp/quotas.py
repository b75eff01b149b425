"""Quota metric of a machine's GPUs.

Source: Compute Engine API v1, `Quota.metric` (discovery document of 2026-11-06). It has only a spot metric for H100, and
none for later models: their quotas are by GPU family, reported by Cloud Quotas, and surface as launch refusals.
"""

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.translate import Kind

# Limits all on-demand GPUs of the project (Compute Engine, "GPU quotas"). Whether spot counts is undocumented, so spot
# is not limited by it.
GPUS_ALL_REGIONS = "GPUS_ALL_REGIONS"
_METRICS = {
    "nvidia-tesla-t4": "NVIDIA_T4_GPUS",
    "nvidia-tesla-p4": "NVIDIA_P4_GPUS",
    "nvidia-tesla-p100": "NVIDIA_P100_GPUS",
    "nvidia-tesla-v100": "NVIDIA_V100_GPUS",
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
    "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
    "nvidia-l4": "NVIDIA_L4_GPUS",
}
_SPOT_ALONE = {"nvidia-h100-80gb": "NVIDIA_H100_GPUS"}


def quota_metric(kind: Kind, capacity_type: CapacityType) -> str | None:
    """Return the region's quota metric; None without GPUs, or for GPUs without a metric."""
    if capacity_type is CapacityType.RESERVED:
        return None  # counted at reservation time
    accelerator = kind.accelerator or ""
    if capacity_type is not CapacityType.SPOT:
        return _METRICS.get(accelerator)
    metric = _METRICS.get(accelerator) or _SPOT_ALONE.get(accelerator)
    return None if metric is None else f"PREEMPTIBLE_{metric}"
