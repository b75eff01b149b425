"""Resources that a GPU operator exposes for a node's GPUs, by the node's labels: whole GPUs, MIG slices or replicas.

Written for simulated clouds and not shared with the core, which is tested against it. Names of configurations: NVIDIA
mig-parted, "config.yaml"; GPU operator, "Time-Slicing GPUs" (read 2026-11-21).
"""

import re
from collections.abc import Mapping

from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import can_partition, max_slices, mig_profiles_of
from gpu_autoscaler.model.resources import GPU_RESOURCE, MIG_RESOURCE_PREFIX, SHARED_GPU_RESOURCE

_REPLICAS = re.compile(r"(?:time-slicing|mps)-(\d+)")
_COUNTED = re.compile(r"(\d+)x([1-7]g\.\d+gb)")


def shown_gpus(
    gpu_count: int, gpu_model: str | None, gpu_memory_bytes: int | None, node_labels: Mapping[str, str]
) -> dict[str, str]:
    """Return the resources under the mixed strategy; an unknown configuration, or one that the GPU does not support,
    leaves the GPUs whole."""
    whole = {GPU_RESOURCE: str(gpu_count)}
    replicas = _REPLICAS.fullmatch(node_labels.get(labels.DEVICE_PLUGIN_CONFIG, ""))
    if replicas is not None:
        return {GPU_RESOURCE: "0", SHARED_GPU_RESOURCE: str(gpu_count * int(replicas[1]))}
    config, profiles = node_labels.get(labels.MIG_CONFIG, ""), mig_profiles_of(gpu_model, gpu_memory_bytes)
    name = config.removeprefix("all-")
    counts = {name: max_slices(profiles, name)} if name != config else _counted(config)
    if not can_partition(profiles, [name for name, count in counts.items() for _ in range(count)]):
        return whole
    slices = {f"{MIG_RESOURCE_PREFIX}{name}": str(count * gpu_count) for name, count in counts.items()}
    return {GPU_RESOURCE: "0", **slices}


def _counted(config: str) -> dict[str, int]:
    parts = [_COUNTED.fullmatch(part) for part in config.split("_")]
    return {part[2]: int(part[1]) for part in parts if part is not None} if all(parts) else {}
