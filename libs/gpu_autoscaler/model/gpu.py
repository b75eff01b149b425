"""GPU models by the one name we use for each, and how other people's labels map to it."""

import msgspec

GIBIBYTE = 2**30


class GpuModel(msgspec.Struct, frozen=True, gc=False):
    """A GPU model. Memory is None where the name is used for several sizes (A100, V100)."""

    name: str
    memory_bytes: int | None


# Memory as in NVIDIA's data sheets of each product, not looked up again. A100 and V100 were sold in two sizes,
# so the bare name fixes none; p4d.24xlarge carries the 40 GB one, p4de.24xlarge the 80 GB one.
GPU_MODELS = {
    model.name: model
    for model in (
        GpuModel("A10", 24 * GIBIBYTE),
        GpuModel("A100", None),
        GpuModel("A10G", 24 * GIBIBYTE),
        GpuModel("B200", 180 * GIBIBYTE),
        GpuModel("H100", 80 * GIBIBYTE),
        GpuModel("H200", 141 * GIBIBYTE),
        GpuModel("L4", 24 * GIBIBYTE),
        GpuModel("L40S", 48 * GIBIBYTE),
        GpuModel("P100", 16 * GIBIBYTE),
        GpuModel("T4", 16 * GIBIBYTE),
        GpuModel("V100", None),
    )
}


_PARTS = frozenset({"GRID", "MIG", "SHARED"})


def gpu_model_name(label: str) -> str | None:
    """Return our name for a label such as `NVIDIA-A100-SXM4-40GB`, `a100` or `Tesla T4`; None if it names none.

    `NVIDIA-A100-SXM4-40GB-MIG-1g.5gb` and `Tesla-T4-SHARED` name none: what such a node counts as GPUs are slices of
    them (strategy `single`) or replicas (NVIDIA k8s-device-plugin, "GPU Feature Discovery", "Shared Access to GPUs";
    read 2026-11-21), and work that asks for the model wants all of it. So does `GRID A100-8C`, a virtual GPU of 8 GB.

    Labels are those of NVIDIA's GPU feature discovery (`nvidia.com/gpu.product`), of Karpenter
    (`karpenter.k8s.aws/instance-gpu-name`) and people's own (`gpu-type`).
    """
    words = label.upper().replace("_", "-").replace(" ", "-").split("-")
    if not _PARTS.isdisjoint(words):
        return None
    return next((word for word in words if word in GPU_MODELS), None)
