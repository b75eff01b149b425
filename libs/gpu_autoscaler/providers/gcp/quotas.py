"""Which quota a machine's GPUs count against.

Source: Compute Engine API v1, `Quota.metric` (discovery document of 2026-11-06). For H100 it names spot's alone, for
later ones none: their quotas are by GPU family, told by Cloud Quotas, and one of zero shows as a refusal.
"""

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.translate import Kind

# Of all GPUs that are bought on demand, wherever they are (Compute Engine, "GPU quotas"). Whether spot counts as well
# is not said, so it limits no spot.
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
    """Return the metric of the region's quota, None where the machine has no GPU, or one without a quota of a name."""
    if capacity_type is CapacityType.RESERVED:
        return None  # counted when it was reserved
    accelerator = kind.accelerator or ""
    if capacity_type is not CapacityType.SPOT:
        return _METRICS.get(accelerator)
    metric = _METRICS.get(accelerator) or _SPOT_ALONE.get(accelerator)
    return None if metric is None else f"PREEMPTIBLE_{metric}"
