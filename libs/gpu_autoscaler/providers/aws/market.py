"""Offers of the region: instance types, zones, spot price history, price list or price file."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError, TransientError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.advisor import Bands
from gpu_autoscaler.providers.aws.catalog import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.aws.options import OWNER, AwsOptions
from gpu_autoscaler.providers.aws.quotas import KnownQuotas
from gpu_autoscaler.providers.aws.reservations import Reservation, reserved_offer
from gpu_autoscaler.providers.aws.translate import InstanceType, is_denied, parse_instance_type
from gpu_autoscaler.providers.market import (
    Price,
    PriceFile,
    first_unavailable,
    matching_kinds,
    offer_of,
    timestamp_if_stale,
)
from gpu_autoscaler.providers.spot_ceilings import SpotCeilings

TYPES_KEPT = timedelta(hours=1)  # availability and on-demand prices change monthly
NAMES_COUNT_MAX = 50  # types per request
# A spot price applies until the next one; the history of one hour includes the current one.
SPOT_HISTORY = timedelta(hours=1)

_NO_BANDS = Bands()

log = structlog.get_logger()


class _Types(msgspec.Struct, frozen=True):
    patterns: tuple[str, ...]
    kinds: Mapping[str, InstanceType]
    zones_by_type: Mapping[str, frozenset[str]] | None  # None: unknown, so every zone
    on_demand_micro_usd: Mapping[str, int]
    read_at: datetime


class AwsMarket:
    """Offers of the region. Prices of the price file override the cloud's."""

    def __init__(self, client: AwsClient, options: AwsOptions, bands: Bands = _NO_BANDS) -> None:
        """Raises ConfigError for the price file."""
        self._bands = bands
        self._ceilings = SpotCeilings(options.spot_ceilings)
        self._client = client
        self._file_prices = PriceFile(OWNER, options.prices_path)
        self._quotas = KnownQuotas(client)
        self._types: _Types | None = None
        # Cached per type, so that an interrupted first read of many types resumes.
        self._on_demand_read: dict[str, tuple[datetime, int | None]] = {}

    async def offers(
        self, patterns: Sequence[str], zones: Sequence[str], now: datetime, reserved: Sequence[Reservation] = ()
    ) -> list[Offer]:
        """Return the offers of matching types and of reservations in these zones. Raises TransientError."""
        patterns = tuple(dict.fromkeys((*patterns, *(reservation.instance_type for reservation in reserved))))
        types = await self._read_types(patterns, now)
        spot = await self._spot_prices(sorted(types.kinds), now)
        await self._quotas.refresh(now)
        return [
            offer_of(
                kind,
                zone,
                capacity_type,
                price,
                first_unavailable(
                    self._quotas.shortfall(kind, capacity_type),
                    self._ceilings.check(kind.name, capacity_type, price.micro_usd_per_hour),
                ),
                interruption_ratio=self._bands.ratio(kind.name, now) if capacity_type is CapacityType.SPOT else None,
            )
            for kind in types.kinds.values()
            for zone in zones
            if types.zones_by_type is None or zone in types.zones_by_type.get(kind.name, ())
            for capacity_type in kind.capacity_types
            for price in [self._price(kind.name, zone, capacity_type, spot, now)]
        ] + [
            reserved_offer(
                reservation, types.kinds[reservation.instance_type], self._reserved_price(reservation, types)
            )
            for reservation in reserved
            if reservation.zone in zones and reservation.instance_type in types.kinds
        ]

    def _reserved_price(self, reservation: Reservation, types: _Types) -> int | None:
        """Return the agreed price from the price file, else the on-demand price at which AWS bills it."""
        agreed = self._file_prices.everywhere(reservation.instance_type, CapacityType.RESERVED)
        return types.on_demand_micro_usd.get(reservation.instance_type) if agreed is None else agreed

    async def spot_types(self, patterns: Sequence[str], now: datetime) -> list[str]:
        """Return matching types sold as spot, by name. Raises TransientError."""
        types = await self._read_types(tuple(patterns), now)
        return sorted(name for name, kind in types.kinds.items() if CapacityType.SPOT in kind.capacity_types)

    def _price(
        self, name: str, zone: str, capacity_type: CapacityType, spot: Mapping[tuple[str, str], int], now: datetime
    ) -> Price:
        filed = self._file_prices.price(name, zone, capacity_type, now)
        if filed is not None:
            return filed
        if capacity_type is CapacityType.SPOT:
            return Price(spot.get((name, zone)), "spot price history")
        read_at, price = self._on_demand_read.get(name, (None, None))
        return Price(price, "price list", timestamp_if_stale(read_at, now))

    async def _read_types(self, patterns: tuple[str, ...], now: datetime) -> _Types:
        known = self._types
        if known is None or known.patterns != patterns or now - known.read_at >= TYPES_KEPT:
            kinds = await self._kinds(patterns)
            zones = await self._zones_by_type(sorted(kinds))
            known = self._types = _Types(patterns, kinds, zones, await self._on_demand_prices(sorted(kinds), now), now)
        return known

    async def _kinds(self, patterns: Sequence[str]) -> dict[str, InstanceType]:
        """Return matching types; from the built-in table if listing them is not allowed."""
        filters = [{"Name": "instance-type", "Values": list(patterns)}]
        described: list[Mapping[str, Any]] = []
        try:
            async for page in self._client.pages("DescribeInstanceTypes", Filters=filters):
                described += page["InstanceTypes"]
        except TransientError as exc:
            if not is_denied(exc):
                raise
            log.warning("instance type lookup failed", error=str(exc), effect="the built-in table is used")
            return matching_kinds(KNOWN_INSTANCE_TYPES, patterns)
        kinds = [kind for kind in map(parse_instance_type, described) if kind is not None]
        return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.name)}

    async def _zones_by_type(self, names: Sequence[str]) -> Mapping[str, frozenset[str]] | None:
        zones_by_type: dict[str, set[str]] = {}
        try:
            for batch in _batches(names):
                filters = [{"Name": "instance-type", "Values": batch}]
                async for page in self._client.pages(
                    "DescribeInstanceTypeOfferings", LocationType="availability-zone", Filters=filters
                ):
                    for offering in page["InstanceTypeOfferings"]:
                        zones_by_type.setdefault(offering["InstanceType"], set()).add(offering["Location"])
        except TransientError as exc:
            if not is_denied(exc):
                raise
            log.warning("zone lookup failed", error=str(exc), effect="each type is offered in every zone")
            return None
        return {name: frozenset(zones) for name, zones in zones_by_type.items()}

    async def _on_demand_prices(self, names: Sequence[str], now: datetime) -> dict[str, int]:
        """Return on-demand prices; a type without one is not launched. Failures are logged."""
        for name in names:
            known = self._on_demand_read.get(name)
            is_fresh = known is not None and now - known[0] < TYPES_KEPT
            if is_fresh or self._file_prices.everywhere(name, CapacityType.ON_DEMAND) is not None:
                continue
            filters = _product_filters(name, self._client.region)
            try:
                page = await self._client.call("GetProducts", ServiceCode="AmazonEC2", Filters=filters)
            except AutoscalerError as exc:
                log.warning(
                    "on-demand price lookup failed", error=str(exc), effect="offers without a price are not used"
                )
                break
            prices = [price for product in page["PriceList"] if (price := _on_demand_price(product)) is not None]
            # The filters match one product; of several take the most expensive, so that no limit is exceeded.
            self._on_demand_read[name] = (now, max(prices, default=None))
        return {name: price for name, (_, price) in self._on_demand_read.items() if price is not None}

    async def _spot_prices(self, names: Sequence[str], now: datetime) -> dict[tuple[str, str], int]:
        latest: dict[tuple[str, str], tuple[datetime, int]] = {}
        try:
            for batch in _batches(names):
                async for page in self._client.pages(
                    "DescribeSpotPriceHistory",
                    InstanceTypes=batch,
                    ProductDescriptions=["Linux/UNIX"],
                    StartTime=now - SPOT_HISTORY,
                    EndTime=now,
                ):
                    for entry in page["SpotPriceHistory"]:
                        key = (entry["InstanceType"], entry["AvailabilityZone"])
                        dated_price = (entry["Timestamp"], round(float(entry["SpotPrice"]) * MICRO_USD_PER_USD))
                        latest[key] = max(latest.get(key, dated_price), dated_price)
        except TransientError as exc:
            if not is_denied(exc):
                raise
            log.warning("spot price lookup failed", error=str(exc), effect="spot offers without a price are not used")
        return {key: price for key, (_, price) in latest.items()}


def _batches(names: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), NAMES_COUNT_MAX):
        yield list(names[start : start + NAMES_COUNT_MAX])


def _product_filters(name: str, region: str) -> list[dict[str, str]]:
    """Linux, no extra software, shared tenancy, not reserved. Source: AWS Price List API, "GetProducts"."""
    fields = {
        "instanceType": name,
        "regionCode": region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    return [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in fields.items()]


def _on_demand_price(product: str) -> int | None:
    """Return a product's on-demand price in micro-dollars per hour; None without an hourly price."""
    terms = msgspec.json.decode(product).get("terms", {}).get("OnDemand", {})
    for term in terms.values():
        for dimension in term.get("priceDimensions", {}).values():
            usd = dimension.get("pricePerUnit", {}).get("USD")
            if usd is not None and dimension.get("unit") == "Hrs" and float(usd) > 0:
                return round(float(usd) * MICRO_USD_PER_USD)
    return None
