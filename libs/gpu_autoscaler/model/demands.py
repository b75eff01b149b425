"""The shape of reported demand: what one member needs, as people write it."""

import msgspec


class DemandShape(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Capacity for one member. Quantities as in Kubernetes: `8`, `500m`, `64Gi`."""

    gpu_count: int
    gpu_type: str | None = None  # a GPU model by name; None: any
    gpu_memory_gb: float | None = None  # of one GPU, in GiB; None: any
    cpu: str = "1"
    memory: str = "4Gi"
    ephemeral_storage: str = "10Gi"
