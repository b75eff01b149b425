"""Offers of the region: sizes, zones, quotas, retail price list or price file."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.azure.catalog import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.providers.azure.client import AzureClient
from gpu_autoscaler.providers.azure.options import OWNER, AzureOptions
from gpu_autoscaler.providers.azure.translate import REGIONAL_ZONE, Denied, InstanceType, parse_instance_type, zone_name
from gpu_autoscaler.providers.market import (
    Price,
    PriceFile,
    first_unavailable,
    matches_any,
    matching_kinds,
    offer_of,
    timestamp_if_stale,
)
from gpu_autoscaler.providers.spot_ceilings import SpotCeilings

TYPES_KEPT = timedelta(hours=1)  # availability changes monthly
PRICES_KEPT = timedelta(minutes=5)  # spot prices follow demand
NAMES_COUNT_MAX = 15  # sizes per filter of the price list
QUOTA_OF: Mapping[CapacityType, str] = {CapacityType.ON_DEMAND: "cores", CapacityType.SPOT: "lowPriorityCores"}

log = structlog.get_logger()


class Quota(msgspec.Struct, frozen=True):
    """vCPU limit, and vCPUs in use."""

    limit: int
    used: int


class _Sold(msgspec.Struct, frozen=True):
    patterns: tuple[str, ...]
    kinds: Mapping[str, InstanceType]
    zones_by_type: Mapping[str, frozenset[str]] | None  # None: unknown, so every zone
    read_at: datetime


class AzureMarket:
    """Offers of the region. Prices of the price file override the cloud's."""

    def __init__(self, client: AzureClient, options: AzureOptions) -> None:
        """Raises ConfigError for the price file."""
        self._client = client
        self._ceilings = SpotCeilings(options.spot_ceilings)
        self._file_prices = PriceFile(OWNER, options.prices_path)
        self._sold: _Sold | None = None
        self._prices: dict[tuple[str, CapacityType], int] = {}
        self._prices_read_at: datetime | None = None

    async def offers(self, patterns: Sequence[str], zones: Sequence[str], now: datetime) -> list[Offer]:
        """Return the offers of matching sizes in these zones; those without quota are marked unavailable. Raises
        TransientError."""
        quotas = await self.quotas()
        sold = await self._read_sold(tuple(patterns), now)
        await self._read_prices(sorted(sold.kinds), now)
        return [
            offer_of(
                kind,
                zone,
                capacity_type,
                price,
                first_unavailable(
                    quota_shortfall(kind, capacity_type, quotas),
                    self._ceilings.check(kind.name, capacity_type, price.micro_usd_per_hour),
                ),
            )
            for kind in sold.kinds.values()
            for zone in zones
            if sold.zones_by_type is None or zone in sold.zones_by_type.get(kind.name, ())
            for capacity_type in QUOTA_OF
            if kind.is_spot_sold or capacity_type is CapacityType.ON_DEMAND
            for price in [self._price(kind.name, zone, capacity_type, now)]
        ]

    async def quotas(self) -> Mapping[str, Quota]:
        """Return vCPU quotas by name in lower case; none if reading them is not allowed. Raises TransientError."""
        try:
            return {
                usage["name"]["value"].lower(): Quota(int(usage["limit"]), int(usage["currentValue"]))
                async for usage in self._client.pages("Usage_List")
            }
        except Denied as exc:
            log.warning("quota lookup denied", error=str(exc), effect="exhausted quotas surface as launch refusals")
            return {}

    async def kinds(self, patterns: Sequence[str], now: datetime) -> Mapping[str, InstanceType]:
        """Return matching sizes. Raises TransientError."""
        return (await self._read_sold(tuple(patterns), now)).kinds

    def _price(self, name: str, zone: str, capacity_type: CapacityType, now: datetime) -> Price:
        filed = self._file_prices.price(name, zone, capacity_type, now)
        if filed is not None:
            return filed
        return Price(
            self._prices.get((name, capacity_type)), "retail prices", timestamp_if_stale(self._prices_read_at, now)
        )

    async def _read_sold(self, patterns: tuple[str, ...], now: datetime) -> _Sold:
        known = self._sold
        if known is not None and known.patterns == patterns and now - known.read_at < TYPES_KEPT:
            return known
        region = self._client.region
        try:
            query = {"$filter": f"location eq '{region}'"}
            skus = [
                sku
                async for sku in self._client.pages("ResourceSkus_List", query=query)
                if sku.get("resourceType") == "virtualMachines" and matches_any(sku["name"], patterns)
            ]
        except Denied as exc:
            log.warning("size lookup denied", error=str(exc), effect="the built-in table is used")
            self._sold = _Sold(patterns, matching_kinds(KNOWN_INSTANCE_TYPES, patterns), None, now)
        else:
            kinds = {sku["name"]: kind for sku in skus if (kind := parse_instance_type(sku)) is not None}
            zones = {sku["name"]: zones_sold(sku, region) for sku in skus}
            self._sold = _Sold(patterns, dict(sorted(kinds.items())), zones, now)
        return self._sold

    async def _read_prices(self, names: Sequence[str], now: datetime) -> None:
        """Read hourly prices; a size without one is not launched. Failures are logged."""
        if self._prices_read_at is not None and now - self._prices_read_at < PRICES_KEPT:
            return
        unpriced_names = [
            name
            for name in names
            if None in (self._file_prices.everywhere(name, capacity_type) for capacity_type in QUOTA_OF)
        ]
        prices: dict[tuple[str, CapacityType], int] = {}
        try:
            for start in range(0, len(unpriced_names), NAMES_COUNT_MAX):
                batch = unpriced_names[start : start + NAMES_COUNT_MAX]
                async for item in self._client.prices(price_filter(self._client.region, batch)):
                    parsed = price_of(item)
                    if parsed is not None:
                        key, price = parsed
                        prices[key] = max(prices.get(key, 0), price)  # the most expensive, so that no limit is exceeded
        except (TransientError, PermanentError) as exc:
            log.warning("price lookup failed", error=str(exc), effect="offers without a price are not used")
            return
        self._prices, self._prices_read_at = prices, now


def quota_shortfall(kind: InstanceType, capacity_type: CapacityType, quotas: Mapping[str, Quota]) -> str | None:
    """Return why quotas rule out one more machine; unknown quotas do not. Spot has one quota for all families."""
    names = [QUOTA_OF[capacity_type].lower()]
    if capacity_type is CapacityType.ON_DEMAND:
        names.append(kind.family.lower())
    for name in names:
        quota = quotas.get(name)
        if quota is not None and quota.used + kind.vcpu_count > quota.limit:
            return (
                f"quota {name} is {quota.limit} vCPUs with {quota.used} in use, and one {kind.name} needs"
                f" {kind.vcpu_count}; request an increase in the Azure portal"
            )
    return None


def zones_sold(sku: Mapping[str, Any], region: str) -> frozenset[str]:
    """Return the zones that offer the size to this subscription, including the region itself if it does."""
    zones = {zone for place in sku.get("locationInfo", ()) for zone in place.get("zones", ())}
    is_sold_in_region = True
    for restriction in sku.get("restrictions", ()):
        if restriction.get("type") == "Location":
            is_sold_in_region, zones = False, set()
        zones -= set(restriction.get("restrictionInfo", {}).get("zones") or ())
    zone_names = {zone_name(region, [zone]) for zone in zones}
    return frozenset(zone_names | {REGIONAL_ZONE} if is_sold_in_region else zone_names)


def price_filter(region: str, names: Sequence[str]) -> str:
    """Return the filter of the price list. Source: Azure documentation, "Azure Retail Prices overview" (2026-11-22)."""
    either = " or ".join(f"armSkuName eq '{name}'" for name in names)
    return (
        f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armRegionName eq '{region}'"
        f" and ({either})"
    )


def price_of(item: Mapping[str, Any]) -> tuple[tuple[str, CapacityType], int] | None:
    """Return size, purchase option and micro-dollars per hour; None for Windows, or if not hourly."""
    product, sku = item.get("productName", ""), item.get("skuName", "")
    usd = float(item.get("retailPrice", 0.0))
    if item.get("unitOfMeasure") != "1 Hour" or item.get("currencyCode", "USD") != "USD" or usd <= 0:
        return None
    if "Windows" in product or sku.endswith("Low Priority"):
        return None
    capacity_type = CapacityType.SPOT if sku.endswith(" Spot") else CapacityType.ON_DEMAND
    return (item["armSkuName"], capacity_type), round(usd * MICRO_USD_PER_USD)
