"""What is for sale in the region, and at which price: types, zones, spot history, price list or a file of prices."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError, TransientError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.advisor import Bands
from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.aws.known_kinds import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.providers.aws.quotas import KnownQuotas
from gpu_autoscaler.providers.aws.reservations import Reservation, reserved_offer
from gpu_autoscaler.providers.aws.translate import Kind, is_denied, kind_of
from gpu_autoscaler.providers.bars import Barred, by_quota, first_of
from gpu_autoscaler.providers.ceilings import SpotCeilings
from gpu_autoscaler.providers.prices import Price, file_price, timestamp_if_stale

TYPES_KEPT = timedelta(hours=1)  # what is sold where, and on-demand prices, change by the month
NAMES_COUNT_MAX = 50  # of types in one request
# A spot price stands until the next one; the history of an hour has the one that stands now.
SPOT_HISTORY = timedelta(hours=1)

_NO_BANDS = Bands()
_NO_CEILINGS = SpotCeilings()

log = structlog.get_logger()


class _Types(msgspec.Struct, frozen=True):
    patterns: tuple[str, ...]
    kinds: Mapping[str, Kind]
    zones_by_type: Mapping[str, frozenset[str]] | None  # None: not told, so every zone
    on_demand_micro_usd: Mapping[str, int]
    read_at: datetime


class AwsMarket:
    """Offers of the region. Prices of a file go before the cloud's own."""

    def __init__(
        self,
        calls: AwsClient,
        file_prices: Mapping[str, int],
        filed_at: datetime | None = None,
        bands: Bands = _NO_BANDS,
        ceilings: SpotCeilings = _NO_CEILINGS,
    ) -> None:
        """`file_prices`: micro-dollars an hour by offer key, or by `type/*/capacity type`, as of `filed_at`."""
        self._bands = bands
        self._ceilings = ceilings
        self._calls = calls
        self._filed_at = filed_at
        self._file_prices = file_prices
        self._quotas = KnownQuotas(calls)
        self._types: _Types | None = None
        # Kept one by one: a first look at many types that takes too long goes on where it was.
        self._on_demand_told: dict[str, tuple[datetime, int | None]] = {}

    async def offers(
        self, patterns: Sequence[str], zones: Sequence[str], now: datetime, reserved: Sequence[Reservation] = ()
    ) -> list[Offer]:
        """Return what is sold of the types that match, and is reserved, in these zones. Raises TransientError."""
        patterns = tuple(dict.fromkeys((*patterns, *(one.instance_type for one in reserved))))
        types = await self._read_types(patterns, now)
        spot = await self._spot_prices(sorted(types.kinds), now)
        await self._quotas.refresh(now)
        return [
            Offer(
                instance_type=kind.name,
                zone=zone,
                capacity_type=capacity_type,
                resources=kind.resources,
                gpu_model=kind.gpu_model,
                gpu_memory_bytes=kind.gpu_memory_bytes,
                price_micro_usd_per_hour=said.micro_usd_per_hour,
                price_source=said.source,
                priced_at=said.read_at,
                interruption_ratio=self._bands.ratio(kind.name, now) if capacity_type is CapacityType.SPOT else None,
                barred_because=bar.because,
                barred_by=bar.by,
            )
            for kind in types.kinds.values()
            for zone in zones
            if types.zones_by_type is None or zone in types.zones_by_type.get(kind.name, ())
            for capacity_type in kind.capacity_types
            for said in [self._price(kind.name, zone, capacity_type, spot, now)]
            for bar in [self._bar(kind, capacity_type, said.micro_usd_per_hour)]
        ] + [
            reserved_offer(one, types.kinds[one.instance_type], self._reserved_price(one, types))
            for one in reserved
            if one.zone in zones and one.instance_type in types.kinds
        ]

    def _bar(self, kind: Kind, capacity_type: CapacityType, price_micro_usd: int | None) -> Barred:
        quota = by_quota(self._quotas.bar(kind, capacity_type))
        return first_of(quota, self._ceilings.bar(kind.name, capacity_type, price_micro_usd))

    def _reserved_price(self, one: Reservation, types: _Types) -> int | None:
        """A file may say what was agreed; else it is billed as on demand."""
        said = self._file_prices.get(f"{one.instance_type}/*/{CapacityType.RESERVED}")
        return types.on_demand_micro_usd.get(one.instance_type) if said is None else said

    async def spot_types(self, patterns: Sequence[str], now: datetime) -> list[str]:
        """Return the types that match and are sold as spot, by name. Raises TransientError."""
        types = await self._read_types(tuple(patterns), now)
        return sorted(name for name, kind in types.kinds.items() if CapacityType.SPOT in kind.capacity_types)

    def _price(
        self, name: str, zone: str, capacity_type: CapacityType, spot: Mapping[tuple[str, str], int], now: datetime
    ) -> Price:
        filed = file_price(self._file_prices, self._filed_at, (name, zone, capacity_type), now)
        if filed is not None:
            return filed
        if capacity_type is CapacityType.SPOT:
            return Price(spot.get((name, zone)), "spot price history")
        read_at, price = self._on_demand_told.get(name, (None, None))
        return Price(price, "price list", timestamp_if_stale(read_at, now))

    async def _read_types(self, patterns: tuple[str, ...], now: datetime) -> _Types:
        known = self._types
        if known is None or known.patterns != patterns or now - known.read_at >= TYPES_KEPT:
            kinds = await self._kinds(patterns)
            zones = await self._zones_by_type(sorted(kinds))
            known = self._types = _Types(patterns, kinds, zones, await self._on_demand_prices(sorted(kinds), now), now)
        return known

    async def _kinds(self, patterns: Sequence[str]) -> dict[str, Kind]:
        """Every type that matches; from the bundled table where the cloud does not let us ask."""
        filters = [{"Name": "instance-type", "Values": list(patterns)}]
        told: list[Mapping[str, Any]] = []
        try:
            async for page in self._calls.pages("DescribeInstanceTypes", Filters=filters):
                told += page["InstanceTypes"]
        except TransientError as exc:
            if not is_denied(exc):
                raise
            log.warning("instance types not told, the bundled table stands in for them", error=str(exc))
            return {
                name: kind
                for name, kind in KNOWN_INSTANCE_TYPES.items()
                if any(fnmatchcase(name, pattern) for pattern in patterns)
            }
        kinds = [kind for kind in map(kind_of, told) if kind is not None]
        return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.name)}

    async def _zones_by_type(self, names: Sequence[str]) -> Mapping[str, frozenset[str]] | None:
        found: dict[str, set[str]] = {}
        try:
            for some in _portions(names):
                filters = [{"Name": "instance-type", "Values": some}]
                async for page in self._calls.pages(
                    "DescribeInstanceTypeOfferings", LocationType="availability-zone", Filters=filters
                ):
                    for offering in page["InstanceTypeOfferings"]:
                        found.setdefault(offering["InstanceType"], set()).add(offering["Location"])
        except TransientError as exc:
            if not is_denied(exc):
                raise
            log.warning("what is sold where is not told, each type is taken for sold everywhere", error=str(exc))
            return None
        return {name: frozenset(zones) for name, zones in found.items()}

    async def _on_demand_prices(self, names: Sequence[str], now: datetime) -> dict[str, int]:
        """Prices of the price list; what it does not tell has none, and is not bought. A failure is told."""
        for name in names:
            told = self._on_demand_told.get(name)
            is_fresh = told is not None and now - told[0] < TYPES_KEPT
            if is_fresh or f"{name}/*/{CapacityType.ON_DEMAND}" in self._file_prices:
                continue
            filters = _product_filters(name, self._calls.region)
            try:
                page = await self._calls.call("GetProducts", ServiceCode="AmazonEC2", Filters=filters)
            except AutoscalerError as exc:
                log.warning("on-demand prices not told, offers without a price are not bought", error=str(exc))
                break
            found = [price for product in page["PriceList"] if (price := _on_demand_price(product)) is not None]
            # One, as the filters are; of several the dearest, so that no limit is passed.
            self._on_demand_told[name] = (now, max(found, default=None))
        return {name: price for name, (_, price) in self._on_demand_told.items() if price is not None}

    async def _spot_prices(self, names: Sequence[str], now: datetime) -> dict[tuple[str, str], int]:
        latest: dict[tuple[str, str], tuple[datetime, int]] = {}
        try:
            for some in _portions(names):
                async for page in self._calls.pages(
                    "DescribeSpotPriceHistory",
                    InstanceTypes=some,
                    ProductDescriptions=["Linux/UNIX"],
                    StartTime=now - SPOT_HISTORY,
                    EndTime=now,
                ):
                    for one in page["SpotPriceHistory"]:
                        key = (one["InstanceType"], one["AvailabilityZone"])
                        told = (one["Timestamp"], round(float(one["SpotPrice"]) * MICRO_USD_PER_USD))
                        latest[key] = max(latest.get(key, told), told)
        except TransientError as exc:
            if not is_denied(exc):
                raise
            log.warning("spot prices not told, spot without a price is not bought", error=str(exc))
        return {key: price for key, (_, price) in latest.items()}


def _portions(names: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), NAMES_COUNT_MAX):
        yield list(names[start : start + NAMES_COUNT_MAX])


def _product_filters(name: str, region: str) -> list[dict[str, str]]:
    """Linux, nothing installed, shared hardware, not of a reservation. Source: AWS Price List API, "GetProducts"."""
    wanted = {
        "instanceType": name,
        "regionCode": region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    return [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]


def _on_demand_price(product: str) -> int | None:
    """Return micro-dollars an hour of a product of the price list, None where it has no price by the hour."""
    terms = msgspec.json.decode(product).get("terms", {}).get("OnDemand", {})
    for term in terms.values():
        for dimension in term.get("priceDimensions", {}).values():
            usd = dimension.get("pricePerUnit", {}).get("USD")
            if usd is not None and dimension.get("unit") == "Hrs" and float(usd) > 0:
                return round(float(usd) * MICRO_USD_PER_USD)
    return None
