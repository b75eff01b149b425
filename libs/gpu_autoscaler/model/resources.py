"""Amounts of resources that pods request and nodes have."""

import re
from collections import Counter

import msgspec

GPU_RESOURCE = "nvidia.com/gpu"  # the extended resource of NVIDIA's device plugin; integers only
# Replicas of a GPU that pods share by time-slicing or MPS, where the plugin names them differently from whole GPUs
# (NVIDIA k8s-device-plugin, "Shared Access to GPUs", `renameByDefault`; read 2026-11-21).
SHARED_GPU_RESOURCE = "nvidia.com/gpu.shared"
# Slices of GPUs in MIG mode, under the plugin's mixed strategy: `nvidia.com/mig-1g.5gb` (the same, "mig-strategy").
MIG_RESOURCE_PREFIX = "nvidia.com/mig-"

Slices = tuple[tuple[str, int], ...]


class Resources(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An amount of each resource; missing means none of it. Negative only as the result of a subtraction."""

    cpu_milli: int = 0  # thousandths of a CPU
    memory_bytes: int = 0  # memory in bytes
    gpu_count: int = 0
    ephemeral_storage_bytes: int = 0  # local storage in bytes
    pod_count: int = 0  # places for pods
    slices: Slices = ()  # parts of GPUs by the name of their resource, sorted: ("nvidia.com/mig-1g.5gb", 7)

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(
            cpu_milli=self.cpu_milli + other.cpu_milli,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            gpu_count=self.gpu_count + other.gpu_count,
            ephemeral_storage_bytes=self.ephemeral_storage_bytes + other.ephemeral_storage_bytes,
            pod_count=self.pod_count + other.pod_count,
            slices=_added(self.slices, other.slices, 1) if other.slices else self.slices,
        )

    def __sub__(self, other: "Resources") -> "Resources":
        return Resources(
            cpu_milli=self.cpu_milli - other.cpu_milli,
            memory_bytes=self.memory_bytes - other.memory_bytes,
            gpu_count=self.gpu_count - other.gpu_count,
            ephemeral_storage_bytes=self.ephemeral_storage_bytes - other.ephemeral_storage_bytes,
            pod_count=self.pod_count - other.pod_count,
            slices=_added(self.slices, other.slices, -1) if other.slices else self.slices,
        )

    @property
    def gpus(self) -> "Resources":
        """The whole GPUs and the GPU slices alone."""
        return Resources(gpu_count=self.gpu_count, slices=self.slices)

    def fits_in(self, free: "Resources") -> bool:
        """True when every amount is at most that of `free`."""
        return (
            self.gpu_count <= free.gpu_count
            and self.cpu_milli <= free.cpu_milli
            and self.memory_bytes <= free.memory_bytes
            and self.ephemeral_storage_bytes <= free.ephemeral_storage_bytes
            and self.pod_count <= free.pod_count
            and (not self.slices or _are_in(self.slices, free.slices))
        )

    @property
    def has_gpus(self) -> bool:
        """True with whole GPUs or GPU slices."""
        return self.gpu_count > 0 or bool(self.slices)

    def gpus_fit_in(self, free: "Resources") -> bool:
        """True when whole GPUs and GPU slices are at most those of `free`; ignores other resources."""
        return self.gpu_count <= free.gpu_count and (not self.slices or _are_in(self.slices, free.slices))


NO_RESOURCES = Resources()


def is_slice(resource: str) -> bool:
    """True for the resource name of a GPU slice."""
    return resource == SHARED_GPU_RESOURCE or resource.startswith(MIG_RESOURCE_PREFIX)


def _added(left: Slices, right: Slices, sign: int) -> Slices:
    total = Counter(dict(left))
    for name, count in right:
        total[name] += sign * count
    return tuple(sorted((name, count) for name, count in total.items() if count))


def _are_in(requested: Slices, free: Slices) -> bool:
    free_counts = dict(free)
    return all(count <= free_counts.get(name, 0) for name, count in requested)


_SUFFIX_MILLI = {"": 10**3, "m": 1} | {
    suffix: base**power * 1000
    for base, suffixes in ((2**10, ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")), (10**3, ("k", "M", "G", "T", "P", "E")))
    for power, suffix in enumerate(suffixes, 1)
}
_QUANTITY = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,2}))?([a-zA-Z]{0,2})")


def parse_quantity_milli(text: str) -> int:
    """Return a Kubernetes quantity in thousandths, rounded up: `500m` is 500, `2` is 2000, `1Gi` is 2**30 * 1000.

    Raises ValueError naming the text. Grammar: Kubernetes API reference, "Quantity".
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[4] not in _SUFFIX_MILLI:
        raise ValueError(f"not a Kubernetes quantity: {text!r} (examples: 500m, 2, 16Gi)")
    sign, number, exponent, suffix = match.groups()
    whole, _, fraction = number.partition(".")
    shift = int(exponent or 0) - len(fraction)
    numerator: int = int(whole + fraction) * _SUFFIX_MILLI[suffix] * int(10 ** max(shift, 0))
    rounded_up: int = -(-numerator // int(10 ** max(-shift, 0)))
    return -rounded_up if sign == "-" else rounded_up


def parse_quantity(text: str) -> int:
    """Return a Kubernetes quantity in whole units, rounded up: `16Gi` is 2**34, `500m` is 1. Raises ValueError."""
    return -(-parse_quantity_milli(text) // 1000)
