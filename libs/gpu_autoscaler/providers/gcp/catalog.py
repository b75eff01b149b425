"""Prices of the public billing catalog, and the built-in table of GPU machine types.

Google prices a machine by its cores, memory and GPUs, each with a SKU; a machine of which a part matches no description
has no price, which is reported. The table is used if machine types may not be read; it lacks types to which a template
adds GPUs (N1). Sources: Cloud Billing API v1, "services.skus.list"; Google Cloud, "SKUs: Compute Engine" (not looked up
again); Compute Engine, "GPU machine types", "Accelerator-optimized machine family" (read 2026-11-21).
"""

import re
from collections.abc import Mapping
from typing import Any

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.translate import InstanceType, build_instance_type

NANO_USD_PER_USD = 10**9
NANO_PER_MICRO = 1000
# Nano-dollars per hour of one core, GiB or GPU, by region, part and capacity type.
UnitPrices = Mapping[tuple[str, str, CapacityType], int]

_USAGE = {"OnDemand": CapacityType.ON_DEMAND, "Preemptible": CapacityType.SPOT}
_MACHINE = re.compile(r"^(?:Spot Preemptible )?([A-Z][0-9]+)(?: Predefined)? Instance (Core|Ram) running in ")
_GPU = re.compile(r"^Nvidia (?:Tesla )?([A-Za-z0-9 ]+?) GPU (?:attached to Spot Preemptible VMs )?running in ")


def part_of(sku: Mapping[str, Any]) -> dict[tuple[str, str, CapacityType], int]:
    """Return the price of the SKU's part in each of its regions; empty for SKUs of other products."""
    capacity_type = _USAGE.get(sku.get("category", {}).get("usageType", ""))
    part, price = _part(sku.get("description", "")), _nano_usd(sku)
    if capacity_type is None or part is None or price is None:
        return {}
    return {(region, part, capacity_type): price for region in sku.get("serviceRegions", ())}


def price_of(kind: InstanceType, capacity_type: CapacityType, region: str, prices: UnitPrices) -> int | None:
    """Return micro-dollars per hour of the whole machine; None if any part has no price."""
    family = kind.name.partition("-")[0]
    parts: list[tuple[str, float]] = [(f"{family}/core", kind.vcpu_count), (f"{family}/ram", kind.memory_mib / 1024)]
    if kind.accelerator is not None:
        parts.append((_gpu_part(kind.accelerator.replace("-", " ")), kind.resources.gpu_count))
    total = 0.0
    for part, count in parts:
        price = prices.get((region, part, capacity_type))
        if price is None:
            return None
        total += price * count
    return round(total / NANO_PER_MICRO)


def _part(description: str) -> str | None:
    machine = _MACHINE.match(description)
    if machine:
        return f"{machine[1].lower()}/{machine[2].lower()}"
    gpu = _GPU.match(description)
    return _gpu_part(gpu[1]) if gpu else None


def _gpu_part(words: str) -> str:
    """Return one name for both `Tesla A100 80GB` and `nvidia a100 80gb`."""
    return "gpu/" + "-".join(sorted({word.lower() for word in words.split()} - {"nvidia", "tesla"}))


def _nano_usd(sku: Mapping[str, Any]) -> int | None:
    """Return the hourly price of the last usage tier, by the newest pricing info."""
    infos = sku.get("pricingInfo", ())
    expression = infos[-1].get("pricingExpression", {}) if infos else {}
    rates = expression.get("tieredRates", ())
    if not rates or expression.get("usageUnit") not in ("h", "GiBy.h"):
        return None
    price = rates[-1].get("unitPrice", {})
    if price.get("currencyCode") != "USD":
        return None
    return int(price.get("units", 0)) * NANO_USD_PER_USD + int(price.get("nanos", 0)) or None


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

KNOWN_INSTANCE_TYPES: dict[str, InstanceType] = {
    name: build_instance_type(name, vcpu_count=vcpus, memory_mib=gibibytes * 1024, gpu_count=gpus, accelerator=gpu)
    for name, vcpus, gibibytes, gpus, gpu in _ROWS
}
