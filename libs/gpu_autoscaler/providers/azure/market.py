"""What is for sale in the region, and at which price: sizes and zones, quotas, the retail price list or a file."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.azure.calls import AzureClient
from gpu_autoscaler.providers.azure.known_kinds import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.providers.azure.translate import REGIONAL_ZONE, Denied, Kind, kind_of, zone_name
from gpu_autoscaler.providers.bars import by_quota, first_of
from gpu_autoscaler.providers.ceilings import SpotCeilings
from gpu_autoscaler.providers.prices import Price, file_price, timestamp_if_stale

KINDS_KEPT = timedelta(hours=1)  # what is sold where changes by the month
PRICES_KEPT = timedelta(minutes=5)  # those of spot change with demand: nothing is bought long at the old one
NAMES_COUNT_MAX = 15  # of sizes in one filter of the price list
QUOTA_OF: Mapping[CapacityType, str] = {CapacityType.ON_DEMAND: "cores", CapacityType.SPOT: "lowPriorityCores"}
_NO_CEILINGS = SpotCeilings()

log = structlog.get_logger()


class Quota(msgspec.Struct, frozen=True):
    """vCPUs that may run at once, and that do."""

    limit: int
    used: int


class _Sold(msgspec.Struct, frozen=True):
    patterns: tuple[str, ...]
    kinds: Mapping[str, Kind]
    zones_by_type: Mapping[str, frozenset[str]] | None  # None: not told, so every zone
    read_at: datetime


class AzureMarket:
    """Offers of the region. Prices of a file go before the cloud's own."""

    def __init__(
        self,
        calls: AzureClient,
        file_prices: Mapping[str, int],
        filed_at: datetime | None = None,
        ceilings: SpotCeilings = _NO_CEILINGS,
    ) -> None:
        """`file_prices`: micro-dollars an hour by offer key, or by `type/*/capacity type`, as of `filed_at`."""
        self._calls = calls
        self._ceilings = ceilings
        self._file_prices = file_prices
        self._filed_at = filed_at
        self._sold: _Sold | None = None
        self._prices: dict[tuple[str, CapacityType], int] = {}
        self._prices_read_at: datetime | None = None

    async def offers(self, patterns: Sequence[str], zones: Sequence[str], now: datetime) -> list[Offer]:
        """Return what is sold of the sizes that match, in these zones; what no quota has room for is barred.

        Raises TransientError.
        """
        quotas = await self.quotas()
        sold = await self._read_sold(tuple(patterns), now)
        await self._read_prices(sorted(sold.kinds), now)
        return [
            Offer(
                instance_type=kind.name,
                zone=zone,
                capacity_type=capacity_type,
                resources=kind.resources,
                gpu_model=kind.gpu_model,
                gpu_memory_bytes=kind.gpu_memory_bytes,
                price_micro_usd_per_hour=price.micro_usd_per_hour,
                price_source=price.source,
                priced_at=price.read_at,
                barred_because=bar.because,
                barred_by=bar.by,
            )
            for kind in sold.kinds.values()
            for zone in zones
            if sold.zones_by_type is None or zone in sold.zones_by_type.get(kind.name, ())
            for capacity_type in (CapacityType.ON_DEMAND, CapacityType.SPOT)
            if kind.is_spot_sold or capacity_type is CapacityType.ON_DEMAND
            for price in [self._price(kind.name, zone, capacity_type, now)]
            for quota in [by_quota(quota_bar(kind, capacity_type, quotas))]
            for bar in [first_of(quota, self._ceilings.bar(kind.name, capacity_type, price.micro_usd_per_hour))]
        ]

    async def quotas(self) -> Mapping[str, Quota]:
        """Return vCPUs by name of quota, in lower case; none where we may not look. Raises TransientError."""
        try:
            return {
                one["name"]["value"].lower(): Quota(int(one["limit"]), int(one["currentValue"]))
                async for one in self._calls.pages("Usage_List")
            }
        except Denied as exc:
            log.warning("quotas not told, one that is used up shows as a refusal", error=str(exc))
            return {}

    async def kinds(self, patterns: Sequence[str], now: datetime) -> Mapping[str, Kind]:
        """Return the sizes that match. Raises TransientError."""
        return (await self._read_sold(tuple(patterns), now)).kinds

    def _price(self, name: str, zone: str, capacity_type: CapacityType, now: datetime) -> Price:
        filed = file_price(self._file_prices, self._filed_at, (name, zone, capacity_type), now)
        if filed is not None:
            return filed
        return Price(
            self._prices.get((name, capacity_type)), "retail prices", timestamp_if_stale(self._prices_read_at, now)
        )

    async def _read_sold(self, patterns: tuple[str, ...], now: datetime) -> _Sold:
        known = self._sold
        if known is not None and known.patterns == patterns and now - known.read_at < KINDS_KEPT:
            return known
        region = self._calls.region
        try:
            query = {"$filter": f"location eq '{region}'"}
            told = [
                one
                async for one in self._calls.pages("ResourceSkus_List", query=query)
                if one.get("resourceType") == "virtualMachines" and _matches(one["name"], patterns)
            ]
        except Denied as exc:
            log.warning("sizes not told, the bundled table stands in for them", error=str(exc))
            kinds = {name: kind for name, kind in KNOWN_INSTANCE_TYPES.items() if _matches(name, patterns)}
            self._sold = _Sold(patterns, kinds, None, now)
        else:
            made = {one["name"]: kind for one in told if (kind := kind_of(one)) is not None}
            zones = {one["name"]: zones_sold(one, region) for one in told}
            self._sold = _Sold(patterns, dict(sorted(made.items())), zones, now)
        return self._sold

    async def _read_prices(self, names: Sequence[str], now: datetime) -> None:
        """Read what an hour costs; a size that the list lacks has no price, and is not bought. A failure is told."""
        if self._prices_read_at is not None and now - self._prices_read_at < PRICES_KEPT:
            return
        wanted = [
            name
            for name in names
            if any(f"{name}/*/{one}" not in self._file_prices for one in (CapacityType.ON_DEMAND, CapacityType.SPOT))
        ]
        found: dict[tuple[str, CapacityType], int] = {}
        try:
            for start in range(0, len(wanted), NAMES_COUNT_MAX):
                some = wanted[start : start + NAMES_COUNT_MAX]
                async for item in self._calls.prices(price_filter(self._calls.region, some)):
                    priced = price_of(item)
                    if priced is not None:
                        key, price = priced
                        found[key] = max(found.get(key, 0), price)  # of several the dearest: no limit is passed
        except (TransientError, PermanentError) as exc:
            log.warning("prices not told, offers without one are not bought", error=str(exc))
            return
        self._prices, self._prices_read_at = found, now


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def quota_bar(kind: Kind, capacity_type: CapacityType, quotas: Mapping[str, Quota]) -> str | None:
    """Return which quota has no room for one more; one that is not told does not limit. Spot has one for all
    families."""
    names = [QUOTA_OF[capacity_type].lower()]
    if capacity_type is CapacityType.ON_DEMAND:
        names.append(kind.family.lower())
    for name in names:
        told = quotas.get(name)
        if told is not None and told.used + kind.vcpu_count > told.limit:
            return (
                f"quota {name} is {told.limit} vCPUs, of which {told.used} are in use, and one {kind.name} has"
                f" {kind.vcpu_count}; request an increase in the portal"
            )
    return None


def zones_sold(told: Mapping[str, Any], region: str) -> frozenset[str]:
    """Return the zones in which a size is sold to this subscription, the region itself among them if it is."""
    zones = {zone for place in told.get("locationInfo", ()) for zone in place.get("zones", ())}
    is_sold_in_region = True
    for restriction in told.get("restrictions", ()):
        if restriction.get("type") == "Location":
            is_sold_in_region, zones = False, set()
        zones -= set(restriction.get("restrictionInfo", {}).get("zones") or ())
    named = {zone_name(region, [zone]) for zone in zones}
    return frozenset(named | {REGIONAL_ZONE} if is_sold_in_region else named)


def price_filter(region: str, names: Sequence[str]) -> str:
    """Source: Azure documentation, "Azure Retail Prices overview" (read 2026-11-22)."""
    either = " or ".join(f"armSkuName eq '{name}'" for name in names)
    return (
        f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armRegionName eq '{region}'"
        f" and ({either})"
    )


def price_of(item: Mapping[str, Any]) -> tuple[tuple[str, CapacityType], int] | None:
    """Return size, purchase option and micro-dollars an hour of a price; None for Windows, or not by the hour."""
    product, sku = item.get("productName", ""), item.get("skuName", "")
    usd = float(item.get("retailPrice", 0.0))
    if item.get("unitOfMeasure") != "1 Hour" or item.get("currencyCode", "USD") != "USD" or usd <= 0:
        return None
    if "Windows" in product or sku.endswith("Low Priority"):
        return None
    capacity_type = CapacityType.SPOT if sku.endswith(" Spot") else CapacityType.ON_DEMAND
    return (item["armSkuName"], capacity_type), round(usd * MICRO_USD_PER_USD)
