"""What moto lacks: prices of the spot history and the price list, and vCPU quotas.

Prices are fixtures of the simulated catalog, not quotes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.simcloud.aws.wire import Call, elements
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, ZONES, offers_of

PAGE_PRODUCTS_COUNT = 100  # the price list's largest page


def usd_per_hour(instance_type: str, zone_number: int, capacity_type: CapacityType) -> float | None:
    """Return the fixture price in the n-th zone, None for a type that is not in the catalog."""
    zone = ZONES[zone_number % len(ZONES)]
    key = f"{instance_type}/{zone}/{capacity_type}"
    price = _PRICES.get(key)
    return None if price is None else price / MICRO_USD_PER_USD


_PRICES = {offer.key: offer.price_micro_usd_per_hour for offer in offers_of(INSTANCE_CATALOG)}


def spot_history(call: Call, zones: Sequence[str], now: datetime, ratio_of: Callable[[str], float]) -> str:
    """Return the last spot price of each requested type and zone."""
    items = []
    for instance_type in call.listed("InstanceType"):
        for number, zone in enumerate(zones):
            price = usd_per_hour(instance_type, number, CapacityType.SPOT)
            if price is not None:
                items.append(
                    {
                        "instanceType": instance_type,
                        "productDescription": "Linux/UNIX",
                        "spotPrice": f"{price * ratio_of(f'{instance_type}/{zone}/spot'):.6f}",
                        "timestamp": now.isoformat(),
                        "availabilityZone": zone,
                    }
                )
    return elements("spotPriceHistorySet", items) + "<nextToken></nextToken>"


def is_above_ceiling(call: Call, offer: str, zones: Sequence[str], ratio_of: Callable[[str], float]) -> bool:
    """Return whether spot costs more than the launch's ceiling. Source: EC2 API Reference, "SpotMarketOptions"."""
    return costs_more_than(usd_per_hour_max(call), offer, zones, ratio_of)


def usd_per_hour_max(call: Call) -> float | None:
    """Return the ceiling of a launch; None: none, so the on-demand price applies."""
    described = call.parameters.get("InstanceMarketOptions.SpotOptions.MaxPrice")
    return None if described is None else float(described)


def costs_more_than(most: float | None, offer: str, zones: Sequence[str], ratio_of: Callable[[str], float]) -> bool:
    """Return whether spot costs more than `most`; never without one, as on-demand is the ceiling then."""
    instance_type, zone, _ = offer.split("/")
    if most is None or zone not in zones:
        return False
    price = usd_per_hour(instance_type, zones.index(zone), CapacityType.SPOT)
    return price is not None and price * ratio_of(offer) > most


def placement_scores(region: str, scores: Mapping[str, int]) -> str:
    """Return the scores of zones for any request. Source: EC2 API Reference, "GetSpotPlacementScores"."""
    items = [{"region": region, "availabilityZoneId": zone_id, "score": score} for zone_id, score in scores.items()]
    return elements("spotPlacementScoreSet", items)


def products(call: Call, region: str) -> bytes:
    """Return the on-demand price list of types in the catalog, in pages. Source: AWS Price List API Reference."""
    request: dict[str, Any] = msgspec.json.decode(call.parameters["body"])
    wanted = {filter_data["Field"]: filter_data["Value"] for filter_data in request.get("Filters", ())}
    types = sorted({key.split("/", 1)[0] for key in _PRICES})
    if "instanceType" in wanted:
        types = [name for name in types if name == wanted["instanceType"]]
    start = int(request.get("NextToken") or 0)
    page = types[start : start + min(request.get("MaxResults", PAGE_PRODUCTS_COUNT), PAGE_PRODUCTS_COUNT)]
    answer: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": [_product(name, region) for name in page]}
    if start + len(page) < len(types):
        answer["NextToken"] = str(start + len(page))
    return msgspec.json.encode(answer if wanted.get("regionCode", region) == region else {"PriceList": []})


def _product(instance_type: str, region: str) -> str:
    price = usd_per_hour(instance_type, 0, CapacityType.ON_DEMAND)
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price:.10f}"}}
    return msgspec.json.encode(
        {
            "product": {
                "attributes": {"instanceType": instance_type, "regionCode": region, "operatingSystem": "Linux"}
            },
            "terms": {"OnDemand": {"SKU.TERM": {"priceDimensions": {"SKU.TERM.RATE": dimension}}}},
        }
    ).decode()


def exceeded_quota(call: Call, quota_vcpus: Mapping[str, int], running: Iterable[Any], count: int = 1) -> str | None:
    """Return the error of a launch that would exceed a quota, None if it fits."""
    wanted = call.parameters.get("InstanceType", "")
    is_spot = call.parameters.get("InstanceMarketOptions.MarketType") == "spot"
    for pattern, limit in quota_vcpus.items():
        if fnmatchcase(wanted, pattern):
            same = [
                instance.instance_type
                for instance in running
                if fnmatchcase(instance.instance_type, pattern) and (instance.lifecycle == "spot") == is_spot
            ]
            if sum(_VCPUS.get(name, 4) for name in [*same, *[wanted] * count]) > limit:
                return "MaxSpotInstanceCountExceeded" if is_spot else "VcpuLimitExceeded"
    return None


def quotas(quota_vcpus: Mapping[str, int]) -> bytes:
    """Return on-demand GPU quotas; unset ones are large. Source: Service Quotas API Reference."""
    described = {
        "L-DB2E81BA": ("Running On-Demand G and VT instances", "g"),
        "L-3819A6DF": ("All G and VT Spot Instance Requests", "g"),
        "L-417A185B": ("Running On-Demand P instances", "p"),
        "L-7212CCBC": ("All P4, P3 and P2 Spot Instance Requests", "p4"),
        "L-C4BD4855": ("All P5 Spot Instance Requests", "p5"),
    }
    listed = [
        {
            "ServiceCode": "ec2",
            "QuotaCode": code,
            "QuotaName": name,
            "Value": float(min((limit for key, limit in quota_vcpus.items() if key.startswith(family)), default=768)),
        }
        for code, (name, family) in described.items()
    ]
    return msgspec.json.encode({"Quotas": listed})


_VCPUS = {kind.name: int(kind.vcpu_count) for kind in INSTANCE_CATALOG}
