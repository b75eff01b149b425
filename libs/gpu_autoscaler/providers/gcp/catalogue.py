"""Prices of the public catalogue: Google prices a machine by its cores, its memory and its GPUs, each a SKU of its own.

Sources: Cloud Billing API v1, "services.skus.list" (`Sku`, `PricingInfo`); the descriptions of Compute Engine's SKUs,
which name family and GPU in words (Google Cloud, "SKUs: Compute Engine", not looked up again). A description in other
words matches nothing, and then the machine has no price, which is told; it never has a part of one.
"""

import re
from collections.abc import Mapping
from typing import Any

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.translate import Kind

NANO_USD_PER_USD = 10**9
NANO_PER_MICRO = 1000
# Nano-dollars an hour of one core, GiB or GPU, by region, part and capacity type.
UnitPrices = Mapping[tuple[str, str, CapacityType], int]

_USAGE = {"OnDemand": CapacityType.ON_DEMAND, "Preemptible": CapacityType.SPOT}
_MACHINE = re.compile(r"^(?:Spot Preemptible )?([A-Z][0-9]+)(?: Predefined)? Instance (Core|Ram) running in ")
_GPU = re.compile(r"^Nvidia (?:Tesla )?([A-Za-z0-9 ]+?) GPU (?:attached to Spot Preemptible VMs )?running in ")


def part_of(sku: Mapping[str, Any]) -> dict[tuple[str, str, CapacityType], int]:
    """Return what the SKU prices, in each of its regions; nothing for SKUs of other things."""
    capacity_type = _USAGE.get(sku.get("category", {}).get("usageType", ""))
    part, price = _part(sku.get("description", "")), _nano_usd(sku)
    if capacity_type is None or part is None or price is None:
        return {}
    return {(region, part, capacity_type): price for region in sku.get("serviceRegions", ())}


def price_of(kind: Kind, capacity_type: CapacityType, region: str, prices: UnitPrices) -> int | None:
    """Return micro-dollars an hour of the whole machine, None where any part of it has no price."""
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
    """Return one name for `Tesla A100 80GB` and `nvidia a100 80gb`."""
    return "gpu/" + "-".join(sorted({word.lower() for word in words.split()} - {"nvidia", "tesla"}))


def _nano_usd(sku: Mapping[str, Any]) -> int | None:
    """Return the price of most use, by the hour; of several kept prices the newest."""
    infos = sku.get("pricingInfo", ())
    expression = infos[-1].get("pricingExpression", {}) if infos else {}
    rates = expression.get("tieredRates", ())
    if not rates or expression.get("usageUnit") not in ("h", "GiBy.h"):
        return None
    price = rates[-1].get("unitPrice", {})
    if price.get("currencyCode") != "USD":
        return None
    return int(price.get("units", 0)) * NANO_USD_PER_USD + int(price.get("nanos", 0)) or None
