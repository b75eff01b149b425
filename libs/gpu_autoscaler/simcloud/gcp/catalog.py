"""Catalog of the fake: Google Cloud's machine types in three zones, at fixture prices, which are no quotes.

Sizes: Compute Engine, "GPU machine types" and "General-purpose machine family" (read 2026-11-21). Prices are the sum of
cores, memory and GPUs, as Google's.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.translate import InstanceType as MachineType
from gpu_autoscaler.providers.gcp.translate import build_instance_type, quota_metric
from gpu_autoscaler.simcluster.offers import InstanceType

REGION = "europe-west4"
ZONES = tuple(f"{REGION}-{letter}" for letter in "abc")
NANO_USD_PER_MICRO_USD = 1000

# Fixtures: micro-dollars per hour of one core, GiB and GPU; spot is a share that varies by zone.
CORE_MICRO_USD, GIBIBYTE_MICRO_USD = 25_000, 3_000
GPU_MICRO_USD = {
    "nvidia-tesla-t4": 350_000,
    "nvidia-l4": 560_000,
    "nvidia-tesla-a100": 2_930_000,
    "nvidia-a100-80gb": 3_930_000,
    "nvidia-h100-80gb": 5_500_000,
}
SPOT_RATIO_BY_ZONE = dict(zip(ZONES, (0.35, 0.37, 0.40), strict=True))
SPOT_RATIO = 0.40  # of the price catalog, which has no zones
# GPU names in SKU descriptions.
GPU_WORDS = {
    "nvidia-tesla-t4": "Nvidia Tesla T4 GPU",
    "nvidia-l4": "Nvidia L4 GPU",
    "nvidia-tesla-a100": "Nvidia Tesla A100 GPU",
    "nvidia-a100-80gb": "Nvidia Tesla A100 80GB GPU",
    "nvidia-h100-80gb": "Nvidia H100 80GB GPU",
}

# name, vCPUs, memory GiB, GPUs, GPU, its GiB, boot seconds; GPUs of N1 come from the template
_ROWS: tuple[tuple[str, int, int, int, str, int, float], ...] = (
    ("n1-standard-4", 4, 15, 1, "nvidia-tesla-t4", 16, 90),
    ("n1-standard-8", 8, 30, 1, "nvidia-tesla-t4", 16, 90),
    ("n1-standard-32", 32, 120, 4, "nvidia-tesla-t4", 16, 120),
    ("g2-standard-4", 4, 16, 1, "nvidia-l4", 24, 90),
    ("g2-standard-8", 8, 32, 1, "nvidia-l4", 24, 90),
    ("g2-standard-48", 48, 192, 4, "nvidia-l4", 24, 120),
    ("a2-highgpu-2g", 24, 170, 2, "nvidia-tesla-a100", 40, 150),
    ("a2-highgpu-8g", 96, 680, 8, "nvidia-tesla-a100", 40, 210),
    ("a2-ultragpu-8g", 96, 1360, 8, "nvidia-a100-80gb", 80, 210),
    ("a3-highgpu-8g", 208, 1872, 8, "nvidia-h100-80gb", 80, 240),
    ("e2-standard-8", 8, 32, 0, "", 0, 60),
)

KINDS: Mapping[str, MachineType] = {
    name: build_instance_type(
        name, vcpu_count=vcpus, memory_mib=gibibytes * 1024, gpu_count=gpus, accelerator=gpu if gpus else None
    )
    for name, vcpus, gibibytes, gpus, gpu, _, _ in _ROWS
}


def on_demand_micro_usd(kind: MachineType) -> int:
    """Return the hourly on-demand price."""
    gpus = GPU_MICRO_USD[kind.accelerator] * kind.resources.gpu_count if kind.accelerator else 0
    return kind.vcpu_count * CORE_MICRO_USD + kind.memory_mib // 1024 * GIBIBYTE_MICRO_USD + gpus


def spot_micro_usd(kind: MachineType, zone: str) -> int:
    """Return the hourly spot price in this zone."""
    return round(on_demand_micro_usd(kind) * SPOT_RATIO_BY_ZONE.get(zone, SPOT_RATIO))


TYPES = tuple(
    InstanceType(
        name=name,
        vcpu_count=vcpus,
        memory_gib=gibibytes,
        gpu_count=gpus,
        gpu_model=KINDS[name].gpu_model,
        gpu_memory_gib=gpu_gibibytes or None,
        price_usd_per_hour=on_demand_micro_usd(KINDS[name]) / MICRO_USD_PER_USD,
        boot_seconds=boot_seconds,
    )
    for name, vcpus, gibibytes, gpus, _, gpu_gibibytes, boot_seconds in _ROWS
)


def machine_type(name: str, zone: str) -> dict[str, Any] | None:
    """Return a machine type in the format of `machineTypes.get`, None if it is not offered."""
    kind = KINDS.get(name)
    if kind is None or zone not in ZONES:
        return None
    described: dict[str, Any] = {
        "name": name,
        "guestCpus": kind.vcpu_count,
        "memoryMb": kind.memory_mib,
        "zone": zone,
        "isSharedCpu": False,
    }
    if kind.accelerator is not None and not is_added(name):
        described["accelerators"] = [
            {"guestAcceleratorType": kind.accelerator, "guestAcceleratorCount": kind.resources.gpu_count}
        ]
    return described


def is_added(name: str) -> bool:
    """Return whether a template adds the GPUs."""
    return name.startswith("n1-")


def skus() -> list[dict[str, Any]]:
    """Return the price catalog: core and memory of each family, and each GPU, on-demand and spot."""
    entries = []
    for family in sorted({name.partition("-")[0].upper() for name in KINDS}):
        plain = f"{family} Predefined Instance" if family == "N1" else f"{family} Instance"
        entries += _skus_of(f"{plain} Core running in Netherlands", "CPU", "h", CORE_MICRO_USD)
        entries += _skus_of(f"{plain} Ram running in Netherlands", "RAM", "GiBy.h", GIBIBYTE_MICRO_USD)
    for gpu, words in GPU_WORDS.items():
        entries += _skus_of(f"{words} running in Netherlands", "GPU", "h", GPU_MICRO_USD[gpu])
    entries += _skus_of("Storage PD Capacity in Netherlands", "PDStandard", "GiBy.mo", 40_000)
    return [{"name": f"services/6F81-5844-456A/skus/{number}", **sku} for number, sku in enumerate(entries)]


def _skus_of(description: str, group: str, unit: str, micro_usd: int) -> list[dict[str, Any]]:
    words, _, where = description.partition(" running ")
    spot = f"{words} attached to Spot Preemptible VMs" if group == "GPU" else f"Spot Preemptible {words}"
    return [
        _sku(description, group, unit, "OnDemand", micro_usd * NANO_USD_PER_MICRO_USD),
        _sku(f"{spot} running {where}", group, unit, "Preemptible", round(micro_usd * SPOT_RATIO * 1000)),
        _sku(f"Commitment v1: {words} in Netherlands for 1 Year", group, unit, "Commit1Yr", micro_usd * 600),
    ]


def _sku(description: str, group: str, unit: str, usage: str, nano_usd: int) -> dict[str, Any]:
    price = {"currencyCode": "USD", "units": str(nano_usd // 10**9), "nanos": nano_usd % 10**9}
    expression = {"usageUnit": unit, "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}]}
    return {
        "description": description,
        "category": {"resourceFamily": "Compute", "resourceGroup": group, "usageType": usage},
        "serviceRegions": [REGION],
        "pricingInfo": [{"pricingExpression": expression}],
    }


def quota_metrics() -> list[str]:
    """Return the quota metrics of a region, in their order."""
    bought = (CapacityType.ON_DEMAND, CapacityType.SPOT)
    described = {quota_metric(kind, capacity_type) for kind in KINDS.values() for capacity_type in bought}
    return sorted(metric for metric in described if metric is not None)


def capacity_history(name: str, zone: str, now: datetime, ratio: float) -> dict[str, Any]:
    """Return three days of spot history of a machine type in a zone; the newest price is multiplied by `ratio`."""
    usual = spot_micro_usd(KINDS[name], zone) * 1000
    days = [now - timedelta(days=number) for number in range(3)]
    intervals = [{"startTime": _stamp(day - timedelta(days=1)), "endTime": _stamp(day)} for day in days]
    money = [
        {"currencyCode": "USD", "units": str(price // 10**9), "nanos": price % 10**9}
        for price in (round(usual * ratio), usual, usual)
    ]
    return {
        "priceHistory": [
            {"interval": interval, "listPrice": price} for interval, price in zip(intervals, money, strict=True)
        ],
        "preemptionHistory": [{"interval": interval, "preemptionRate": 0.04} for interval in intervals],
    }


def _stamp(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds")
