"""Offers of the simulated cloud: real instance types, in three zones, on-demand and spot, at fixture prices.

Prices are fixtures for tests and the demo, not quotes. Another catalog, such as the node shapes of a trace, is read
from a JSON file of `InstanceType`s.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.allocatable import PODS_PER_NODE, allocatable

ZONES = ("sim-a", "sim-b", "sim-c")
REGION = "sim"
DISK_BYTES = 500 * GIBIBYTE

# Fixture prices in USD per hour of one GPU, partly from the design's price table, else scaled from it.
GPU_USD_PER_HOUR = {
    ("A100", 40): 4.10,
    ("A100", 80): 5.12,
    ("A10G", 24): 1.10,
    ("H100", 80): 5.50,
    ("H200", 141): 7.00,
    ("L4", 24): 0.80,
    ("L40S", 48): 2.20,
    ("T4", 16): 0.526,
    ("V100", 16): 3.06,
}
# Formula: GPUs x their price + CPUs beyond four per GPU; spot is a share of on-demand that varies by zone.
VCPU_USD_PER_HOUR = 0.05
VCPUS_WITH_GPU = 4
SPOT_RATIO_BY_ZONE = {"sim-a": 0.35, "sim-b": 0.37, "sim-c": 0.40}


class InstanceType(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance type. In a file its sizes may be allocatable resources, as in a trace."""

    name: Annotated[str, Meta(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    vcpu_count: Annotated[float, Meta(gt=0)]
    memory_gib: Annotated[float, Meta(gt=0)]
    gpu_count: Annotated[int, Meta(ge=0, le=16)] = 0
    gpu_model: str | None = None
    gpu_memory_gib: Annotated[int, Meta(gt=0)] | None = None
    price_usd_per_hour: Annotated[float, Meta(gt=0)] | None = None  # None: by the formula
    spot_price_usd_per_hour: Annotated[float, Meta(gt=0)] | None = None  # in the first zone; None: by the formula
    boot_seconds: Annotated[float, Meta(gt=0, le=3600)] = 120.0
    is_allocatable: bool = False  # sizes are allocatable resources; nothing is reserved for the node


def _row(
    name: str, vcpus: int, gib: float, gpus: int, model: str, gpu_gib: int, boot: float, usd: float | None = None
) -> InstanceType:
    return InstanceType(
        name=name,
        vcpu_count=vcpus,
        memory_gib=gib,
        gpu_count=gpus,
        gpu_model=model,
        gpu_memory_gib=gpu_gib,
        boot_seconds=boot,
        price_usd_per_hour=usd,
    )


# Sizes: Amazon EC2 Instance Types Guide, "Specifications for Amazon EC2 accelerated computing instances" and
# "... general purpose instances" (only p4d, p4de and g6e were looked up).
# Boot seconds are fixtures: larger machines take longer.
INSTANCE_CATALOG = (
    _row("g4dn.xlarge", 4, 16, 1, "T4", 16, 90, 0.526),
    _row("g4dn.2xlarge", 8, 32, 1, "T4", 16, 90, 0.752),
    _row("g4dn.4xlarge", 16, 64, 1, "T4", 16, 90),
    _row("g4dn.8xlarge", 32, 128, 1, "T4", 16, 100),
    _row("g4dn.12xlarge", 48, 192, 4, "T4", 16, 120),
    _row("g5.xlarge", 4, 16, 1, "A10G", 24, 90),
    _row("g5.2xlarge", 8, 32, 1, "A10G", 24, 90),
    _row("g5.12xlarge", 48, 192, 4, "A10G", 24, 120),
    _row("g5.48xlarge", 192, 768, 8, "A10G", 24, 150),
    _row("g6.xlarge", 4, 16, 1, "L4", 24, 90),
    _row("g6.12xlarge", 48, 192, 4, "L4", 24, 120),
    _row("g6.48xlarge", 192, 768, 8, "L4", 24, 150, 17.60),
    _row("g6e.xlarge", 4, 32, 1, "L40S", 48, 90),
    _row("g6e.12xlarge", 48, 384, 4, "L40S", 48, 120),
    _row("g6e.48xlarge", 192, 1536, 8, "L40S", 48, 150),
    _row("p3.2xlarge", 8, 61, 1, "V100", 16, 100, 3.06),
    _row("p3.8xlarge", 32, 244, 4, "V100", 16, 120),
    _row("p3.16xlarge", 64, 488, 8, "V100", 16, 150),
    _row("p4d.24xlarge", 96, 1152, 8, "A100", 40, 210, 32.77),
    _row("p4de.24xlarge", 96, 1152, 8, "A100", 80, 210),
    _row("p5.48xlarge", 192, 2048, 8, "H100", 80, 240, 44.00),
    _row("p5en.48xlarge", 192, 2048, 8, "H200", 141, 240),
    InstanceType(name="m5.xlarge", vcpu_count=4, memory_gib=16, boot_seconds=60.0),
    InstanceType(name="m5.2xlarge", vcpu_count=8, memory_gib=32, boot_seconds=60.0),
    InstanceType(name="m5.4xlarge", vcpu_count=16, memory_gib=64, boot_seconds=60.0),
)
_SPOT_USD_PER_HOUR = {"g4dn.xlarge": 0.16, "p3.2xlarge": 1.20}  # of the design's price table


def load_catalog(path: Path) -> tuple[InstanceType, ...]:
    """Return the instance types of a JSON file: a list of objects with the fields of `InstanceType`.

    Raises ConfigError naming file and violations.
    """
    try:
        types = msgspec.json.decode(path.read_bytes(), type=tuple[InstanceType, ...])
    except OSError as exc:
        raise ConfigError(str(path), [f"cannot be read: {exc.strerror}"]) from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(str(path), [f"is not a list of instance types: {exc}"]) from exc
    violations = [
        f"{entry.name}: gpu_model and gpu_count must be given together"
        for entry in types
        if (entry.gpu_model is None) != (entry.gpu_count == 0)
    ]
    names = [entry.name for entry in types]
    violations += [f"{name}: occurs twice" for name in sorted(set(names)) if names.count(name) > 1]
    if violations:
        raise ConfigError(str(path), violations)
    return types


def offers_of(types: Iterable[InstanceType], zones: Iterable[str] = ZONES) -> tuple[Offer, ...]:
    """Return every type in every zone, on-demand and spot, sorted by key."""
    offers = [
        _offer(entry, zone, capacity_type)
        for entry in types
        for zone in zones
        for capacity_type in (CapacityType.ON_DEMAND, CapacityType.SPOT)
    ]
    return tuple(sorted(offers, key=lambda offer: offer.key))


def capacity_of(entry: InstanceType) -> Resources:
    """Return the machine's resources before node reservations."""
    return Resources(
        cpu_milli=round(entry.vcpu_count * 1000),
        memory_bytes=round(entry.memory_gib * GIBIBYTE),
        gpu_count=entry.gpu_count,
        ephemeral_storage_bytes=DISK_BYTES,
        pod_count=PODS_PER_NODE,
    )


def _offer(entry: InstanceType, zone: str, capacity_type: CapacityType) -> Offer:
    return Offer(
        instance_type=entry.name,
        zone=zone,
        capacity_type=capacity_type,
        resources=capacity_of(entry) if entry.is_allocatable else allocatable(capacity_of(entry)),
        gpu_model=entry.gpu_model,
        gpu_memory_bytes=None if entry.gpu_memory_gib is None else entry.gpu_memory_gib * GIBIBYTE,
        price_micro_usd_per_hour=_price_micro_usd(entry, zone, capacity_type),
        boot_seconds=float(entry.boot_seconds),
    )


def _price_micro_usd(entry: InstanceType, zone: str, capacity_type: CapacityType) -> int:
    per_gpu = GPU_USD_PER_HOUR.get((entry.gpu_model or "", entry.gpu_memory_gib or 0), 1.0)
    bare_vcpus = max(0.0, entry.vcpu_count - VCPUS_WITH_GPU * entry.gpu_count)
    usd = entry.price_usd_per_hour or entry.gpu_count * per_gpu + bare_vcpus * VCPU_USD_PER_HOUR
    if capacity_type is CapacityType.SPOT:
        first_ratio = SPOT_RATIO_BY_ZONE[ZONES[0]]
        given = entry.spot_price_usd_per_hour or _SPOT_USD_PER_HOUR.get(entry.name)
        spot = usd * first_ratio if given is None else given
        usd = spot * SPOT_RATIO_BY_ZONE.get(zone, first_ratio) / first_ratio
    return round(usd * MICRO_USD_PER_USD)
