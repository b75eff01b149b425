"""GPU machine types as they were sold when this was written: what stands in where the cloud may not be asked.

Source: Compute Engine, "GPU machine types" and "Accelerator-optimized machine family" (read 2026-11-21). Types to which
a template adds GPUs (N1) are not here: their GPUs stand in the template, and their sizes are always asked for.
"""

from gpu_autoscaler.providers.gcp.translate import Kind, build_instance_type

AS_OF = "2026-11-21"

# name, vCPUs, memory GiB, GPUs, GPU
_ROWS = (
    ("a2-highgpu-1g", 12, 85, 1, "nvidia-tesla-a100"),
    ("a2-highgpu-2g", 24, 170, 2, "nvidia-tesla-a100"),
    ("a2-highgpu-4g", 48, 340, 4, "nvidia-tesla-a100"),
    ("a2-highgpu-8g", 96, 680, 8, "nvidia-tesla-a100"),
    ("a2-megagpu-16g", 96, 1360, 16, "nvidia-tesla-a100"),
    ("a2-ultragpu-1g", 12, 170, 1, "nvidia-a100-80gb"),
    ("a2-ultragpu-2g", 24, 340, 2, "nvidia-a100-80gb"),
    ("a2-ultragpu-4g", 48, 680, 4, "nvidia-a100-80gb"),
    ("a2-ultragpu-8g", 96, 1360, 8, "nvidia-a100-80gb"),
    ("a3-highgpu-1g", 26, 234, 1, "nvidia-h100-80gb"),
    ("a3-highgpu-2g", 52, 468, 2, "nvidia-h100-80gb"),
    ("a3-highgpu-4g", 104, 936, 4, "nvidia-h100-80gb"),
    ("a3-highgpu-8g", 208, 1872, 8, "nvidia-h100-80gb"),
    ("a3-megagpu-8g", 208, 1872, 8, "nvidia-h100-mega-80gb"),
    ("a3-ultragpu-8g", 224, 2952, 8, "nvidia-h200-141gb"),
    ("a4-highgpu-8g", 224, 3968, 8, "nvidia-b200"),
    ("g2-standard-4", 4, 16, 1, "nvidia-l4"),
    ("g2-standard-8", 8, 32, 1, "nvidia-l4"),
    ("g2-standard-12", 12, 48, 1, "nvidia-l4"),
    ("g2-standard-16", 16, 64, 1, "nvidia-l4"),
    ("g2-standard-24", 24, 96, 2, "nvidia-l4"),
    ("g2-standard-32", 32, 128, 1, "nvidia-l4"),
    ("g2-standard-48", 48, 192, 4, "nvidia-l4"),
    ("g2-standard-96", 96, 384, 8, "nvidia-l4"),
)

KNOWN_INSTANCE_TYPES: dict[str, Kind] = {
    name: build_instance_type(name, vcpu_count=vcpus, memory_mib=gibibytes * 1024, gpu_count=gpus, accelerator=gpu)
    for name, vcpus, gibibytes, gpus, gpu in _ROWS
}
