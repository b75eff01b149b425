"""What a member of work needs, as people write it: for wishes that are neither a job nor a pod."""

import msgspec


class DemandShape(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Room for one member. Quantities are Kubernetes': `8`, `500m`, `64Gi`."""

    gpu_count: int
    gpu_type: str | None = None  # a GPU model by name; None: any
    gpu_memory_gb: float | None = None  # of one GPU, in GiB; None: any
    cpu: str = "1"
    memory: str = "4Gi"
    ephemeral_storage: str = "10Gi"
