"""Quota metric of a machine's GPUs.

Source: Compute Engine API v1, `Quota.metric` (discovery document of 2026-11-06). It has only a spot metric for H100
and none for later models: their quotas are by GPU family, reported by Cloud Quotas, and surface as launch refusals.
"""

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.translate import GPU_BY_ACCELERATOR, InstanceType

# Limits all on-demand GPUs of the project (Compute Engine, "GPU quotas"). Whether spot counts is undocumented, so spot
# is not limited by it.
GPUS_ALL_REGIONS = "GPUS_ALL_REGIONS"


def quota_metric(kind: InstanceType, capacity_type: CapacityType) -> str | None:
    """Return the region's quota metric; None without GPUs, or for GPUs without a metric."""
    if capacity_type is CapacityType.RESERVED:
        return None  # counted at reservation time
    accelerator, _ = GPU_BY_ACCELERATOR.get(kind.accelerator or "", (None, 0))
    if accelerator is None or accelerator.quota_metric is None:
        return None
    if capacity_type is CapacityType.SPOT:
        return f"PREEMPTIBLE_{accelerator.quota_metric}"
    return None if accelerator.is_spot_only else accelerator.quota_metric
