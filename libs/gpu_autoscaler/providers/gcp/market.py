"""Prices and preemption rates of the groups' offers: billing catalog, capacity history or price file."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.gcp.catalog import UnitPrices, part_of, price_of
from gpu_autoscaler.providers.gcp.client import GcpClient
from gpu_autoscaler.providers.gcp.groups import Group
from gpu_autoscaler.providers.gcp.options import OWNER, GcpOptions
from gpu_autoscaler.providers.gcp.reservations import GcpReservations
from gpu_autoscaler.providers.gcp.translate import GPUS_ALL_REGIONS, InstanceType, denied_kind, quota_metric
from gpu_autoscaler.providers.market import Price, PriceFile, Unavailable, first_unavailable, offer_of
from gpu_autoscaler.providers.shared_reads import KeptReads

KEPT = timedelta(hours=1)  # on-demand prices change monthly, spot prices once a day (Compute Engine, "Spot VMs")
SPOT_KEPT = timedelta(minutes=5)  # so that an outdated price is used briefly only
QUOTAS_KEPT = timedelta(minutes=10)  # docs/decisions.md#quotas
RECORDS_COUNT = 7  # newest records of the capacity history: the current risk, not that of a quarter ago

log = structlog.get_logger()


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """Spot data of the capacity history; None where it has none."""

    price_micro_usd_per_hour: int | None = None
    interruption_ratio: float | None = None


class GcpMarket:
    """Offers of groups. Prices of the price file override the cloud's."""

    def __init__(self, client: GcpClient, options: GcpOptions) -> None:
        """Raises ConfigError for the price file."""
        self._client = client
        self._file_prices = PriceFile(OWNER, options.prices_path)
        self._catalogs = KeptReads[None, UnitPrices](KEPT)
        self._spots = KeptReads[str, Spot](SPOT_KEPT)  # by offer key
        self._reservations = GcpReservations(client)
        self._quotas = KeptReads[str | None, Mapping[str, float]](QUOTAS_KEPT)  # by region, None: the project's

    async def offers(self, groups: Sequence[Group], now: datetime) -> list[Offer]:
        """Return the groups' offers, each once; those without quota are marked unavailable. Raises TransientError."""
        offers: dict[str, Offer] = {}
        for group in groups:
            key, kind = group.offer_key, group.kind
            if key is None or kind is None or key in offers:
                continue
            spot = await self._spot_of(key, kind, group, now)
            price = await self._price(kind, group, spot, now)
            paid_from, unavailable = await self._availability(kind, group, now)
            offers[key] = offer_of(
                kind,
                group.zone,
                group.capacity_type,
                price,
                unavailable,
                paid_from=paid_from,
                paid_until=_runs_until(group, now),
                interruption_ratio=spot.interruption_ratio,
            )
        return [offers[key] for key in sorted(offers)]

    async def quotas(self, region: str, now: datetime) -> Mapping[str, float]:
        """Return the region's quota limits by metric. Raises TransientError."""
        return await self._quotas.get(region, now, lambda: self._read_quotas(region))

    async def project_quota(self, now: datetime) -> float | None:
        """Return how many on-demand GPUs the project may have in all regions; None if unlimited. Raises
        TransientError."""
        return (await self._quotas.get(None, now, lambda: self._read_quotas(None))).get(GPUS_ALL_REGIONS)

    async def _read_quotas(self, region: str | None) -> Mapping[str, float]:
        call = self._client.call("projects.get") if region is None else self._client.call("regions.get", region=region)
        answer = await call
        return {quota["metric"]: float(quota["limit"]) for quota in answer.get("quotas", ())}

    async def _availability(
        self, kind: InstanceType, group: Group, now: datetime
    ) -> tuple[Instant | None, Unavailable]:
        """Return since when it is paid for, and whether reservation or quota rule it out."""
        if group.reservation is not None:
            return await self._reservations.availability(group.zone, group.reservation, now)
        return None, first_unavailable(await self._quota_shortfall(kind, group, now))

    async def _quota_shortfall(self, kind: InstanceType, group: Group, now: datetime) -> str | None:
        """Return which quota is smaller than one machine: such an order could never succeed."""
        metric, region = quota_metric(kind, group.capacity_type), group.zone.rpartition("-")[0]
        limits: list[tuple[str, float | None]] = []
        try:
            if metric is not None:
                limits.append((f"{metric} of {region}", (await self.quotas(region, now)).get(metric)))
            if kind.accelerator is not None and group.capacity_type is not CapacityType.SPOT:
                limits.append((f"{GPUS_ALL_REGIONS} of the project", await self.project_quota(now)))
        except AutoscalerError as exc:
            if denied_kind(exc) != "permission":
                raise
        for name, limit in limits:
            if limit is not None and limit < kind.resources.gpu_count:
                return f"quota {name} is {limit:g}, and a machine needs {kind.resources.gpu_count} GPUs"
        return None

    async def _price(self, kind: InstanceType, group: Group, spot: Spot, now: datetime) -> Price:
        filed = self._file_prices.price(kind.name, group.zone, group.capacity_type, now)
        if filed is not None:
            return filed
        if spot.price_micro_usd_per_hour is not None:
            return Price(spot.price_micro_usd_per_hour, "capacity history")
        prices = await self._catalogs.get(None, now, self._read_catalog)
        # Reserved capacity is billed as on-demand.
        billed_as = CapacityType.SPOT if group.capacity_type is CapacityType.SPOT else CapacityType.ON_DEMAND
        return Price(price_of(kind, billed_as, group.zone.rpartition("-")[0], prices), "billing catalog")

    async def _read_catalog(self) -> UnitPrices:
        prices: dict[tuple[str, str, CapacityType], int] = {}
        try:
            async for page in self._client.pages("services.skus.list", query={"pageSize": "5000"}):
                for sku in page.get("skus", ()):
                    prices |= part_of(sku)
        except AutoscalerError as exc:
            if denied_kind(exc) != "permission":
                raise
            log.warning("price lookup failed", error=str(exc), effect="offers without a price are not used")
        return prices

    async def _spot_of(self, key: str, kind: InstanceType, group: Group, now: datetime) -> Spot:
        if group.capacity_type is not CapacityType.SPOT:
            return Spot()
        return await self._spots.get(key, now, lambda: self._read_spot(kind.name, group.zone))

    async def _read_spot(self, machine_type: str, zone: str) -> Spot:
        body = {
            "types": ["PREEMPTION", "PRICE"],
            "instanceProperties": {"machineType": machine_type, "scheduling": {"provisioningModel": "SPOT"}},
            "locationPolicy": {"location": f"zones/{zone}"},
        }
        try:
            history = await self._client.call("advice.capacityHistory", region=zone.rpartition("-")[0], body=body)
        except AutoscalerError as exc:
            if denied_kind(exc) is None:
                raise
            log.warning("capacity history lookup failed", machine_type=machine_type, zone=zone, error=str(exc))
            return Spot()
        return spot_of(history)


def _runs_until(group: Group, now: datetime) -> datetime | None:
    """Return until when an instance launched now runs, to the hour, so that offers do not change constantly."""
    if group.run_seconds is None:
        return None
    return (now + timedelta(seconds=group.run_seconds)).replace(minute=0, second=0, microsecond=0)


def spot_of(history: Mapping[str, Any]) -> Spot:
    """Return the newest list price, and the preemption rate of the newest records."""
    prices, preemptions = (
        _newest_first(history.get("priceHistory", ())),
        _newest_first(history.get("preemptionHistory", ())),
    )
    rates = [float(record["preemptionRate"]) for record in preemptions[:RECORDS_COUNT] if "preemptionRate" in record]
    return Spot(
        price_micro_usd_per_hour=_micro_usd(prices[0].get("listPrice", {})) if prices else None,
        interruption_ratio=sum(rates) / len(rates) if rates else None,
    )


def _newest_first(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(records, key=lambda record: str(record.get("interval", {}).get("startTime", "")), reverse=True)


def _micro_usd(money: Mapping[str, Any]) -> int | None:
    if money.get("currencyCode", "USD") != "USD":
        return None
    price = int(money.get("units", 0)) * MICRO_USD_PER_USD + int(money.get("nanos", 0)) // 1000
    return price or None  # a price of zero means that there is none
