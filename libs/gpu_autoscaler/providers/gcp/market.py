"""What the groups' machines cost and how often spot is taken: the catalogue, the capacity history, or a file."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.bars import Barred, by_quota
from gpu_autoscaler.providers.gcp.calls import GcpClient
from gpu_autoscaler.providers.gcp.catalogue import UnitPrices, part_of, price_of
from gpu_autoscaler.providers.gcp.groups import Group
from gpu_autoscaler.providers.gcp.quotas import GPUS_ALL_REGIONS, quota_metric
from gpu_autoscaler.providers.gcp.reservations import GcpReservations
from gpu_autoscaler.providers.gcp.translate import Kind, denied_kind
from gpu_autoscaler.providers.prices import Price, file_price

KEPT = timedelta(hours=1)  # prices on demand change by the month, those of spot once a day (Compute Engine, "Spot VMs")
SPOT_KEPT = timedelta(minutes=5)  # so that nothing is bought long at a price of yesterday
QUOTAS_KEPT = timedelta(minutes=10)  # as often as CHECKLIST has quotas rechecked
RECORDS_COUNT = 7  # of the capacity history, the newest: the risk that is, and not that of a quarter ago

log = structlog.get_logger()


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """What the capacity history tells of spot, each None where it says nothing."""

    price_micro_usd_per_hour: int | None = None
    interruption_ratio: float | None = None


class GcpMarket:
    """Offers of groups. Prices of a file go before the cloud's own."""

    def __init__(self, calls: GcpClient, file_prices: Mapping[str, int], filed_at: datetime | None = None) -> None:
        """`file_prices`: micro-dollars an hour by offer key, or by `type/*/capacity type`, as of `filed_at`."""
        self._calls = calls
        self._file_prices = file_prices
        self._filed_at = filed_at
        self._catalogue: tuple[datetime, UnitPrices] | None = None
        self._spot: dict[str, tuple[datetime, Spot]] = {}  # by offer key
        self._reservations = GcpReservations(calls)
        self._project_quota: tuple[datetime, float | None] | None = None
        self._quotas: dict[str, tuple[datetime, Mapping[str, float]]] = {}  # by region: limit by metric

    async def offers(self, groups: Sequence[Group], now: datetime) -> list[Offer]:
        """Return what the groups sell, each offer once; what no quota lets us have is barred. Raises TransientError."""
        found: dict[str, Offer] = {}
        for group in groups:
            key, kind = group.offer_key, group.kind
            if key is None or kind is None or key in found:
                continue
            spot = await self._spot_of(key, kind, group, now)
            price = await self._price(kind, group, spot, now)
            paid_from, bar = await self._bar(kind, group, now)
            found[key] = Offer(
                instance_type=kind.name,
                zone=group.zone,
                capacity_type=group.capacity_type,
                resources=kind.resources,
                gpu_model=kind.gpu_model,
                gpu_memory_bytes=kind.gpu_memory_bytes,
                price_micro_usd_per_hour=price.micro_usd_per_hour,
                price_source=price.source,
                priced_at=price.read_at,
                paid_from=paid_from,
                paid_until=_runs_until(group, now),
                barred_because=bar.because,
                barred_by=bar.by,
                interruption_ratio=spot.interruption_ratio,
            )
        return [found[key] for key in sorted(found)]

    async def quotas(self, region: str, now: datetime) -> Mapping[str, float]:
        """Return the limit of each quota of the region, by metric. Raises TransientError."""
        known = self._quotas.get(region)
        if known is None or now - known[0] >= QUOTAS_KEPT:
            told = await self._calls.call("regions.get", region=region)
            limits = {quota["metric"]: float(quota["limit"]) for quota in told.get("quotas", ())}
            known = self._quotas[region] = (now, limits)
        return known[1]

    async def project_quota(self, now: datetime) -> float | None:
        """Return how many GPUs the project may have on demand in all regions, None where none is told.

        Raises TransientError.
        """
        if self._project_quota is None or now - self._project_quota[0] >= QUOTAS_KEPT:
            told = await self._calls.call("projects.get")
            limits = {quota["metric"]: float(quota["limit"]) for quota in told.get("quotas", ())}
            self._project_quota = (now, limits.get(GPUS_ALL_REGIONS))
        return self._project_quota[1]

    async def _bar(self, kind: Kind, group: Group, now: datetime) -> tuple[Instant | None, Barred]:
        """Return since when it is paid for, and why nothing can be had now: its reservation, or a quota."""
        if group.reservation is not None:
            return await self._reservations.bar(group.zone, group.reservation, now)
        return None, by_quota(await self._quota_bar(kind, group, now))

    async def _quota_bar(self, kind: Kind, group: Group, now: datetime) -> str | None:
        """Return which quota is smaller than one machine: such an order could never be met."""
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
                return f"quota {name} is {limit:g}, and a machine has {kind.resources.gpu_count} GPUs"
        return None

    async def _price(self, kind: Kind, group: Group, spot: Spot, now: datetime) -> Price:
        offer = (kind.name, group.zone, group.capacity_type)
        filed = file_price(self._file_prices, self._filed_at, offer, now)
        if filed is not None:
            return filed
        if spot.price_micro_usd_per_hour is not None:
            return Price(spot.price_micro_usd_per_hour, "capacity history")
        prices = await self._read_catalogue(now)
        # What is reserved is billed as on demand.
        as_sold = CapacityType.SPOT if group.capacity_type is CapacityType.SPOT else CapacityType.ON_DEMAND
        return Price(price_of(kind, as_sold, group.zone.rpartition("-")[0], prices), "billing catalogue")

    async def _read_catalogue(self, now: datetime) -> UnitPrices:
        if self._catalogue is None or now - self._catalogue[0] >= KEPT:
            prices: dict[tuple[str, str, CapacityType], int] = {}
            try:
                async for page in self._calls.pages("services.skus.list", query={"pageSize": "5000"}):
                    for sku in page.get("skus", ()):
                        prices |= part_of(sku)
            except AutoscalerError as exc:
                if denied_kind(exc) != "permission":
                    raise
                log.warning("prices not told, offers without a price are not bought", error=str(exc))
            self._catalogue = (now, prices)
        return self._catalogue[1]

    async def _spot_of(self, key: str, kind: Kind, group: Group, now: datetime) -> Spot:
        if group.capacity_type is not CapacityType.SPOT:
            return Spot()
        known = self._spot.get(key)
        if known is None or now - known[0] >= SPOT_KEPT:
            known = self._spot[key] = (now, await self._read_spot(kind.name, group.zone))
        return known[1]

    async def _read_spot(self, machine_type: str, zone: str) -> Spot:
        body = {
            "types": ["PREEMPTION", "PRICE"],
            "instanceProperties": {"machineType": machine_type, "scheduling": {"provisioningModel": "SPOT"}},
            "locationPolicy": {"location": f"zones/{zone}"},
        }
        try:
            told = await self._calls.call("advice.capacityHistory", region=zone.rpartition("-")[0], body=body)
        except AutoscalerError as exc:
            if denied_kind(exc) is None:
                raise
            log.warning("capacity history not told", machine_type=machine_type, zone=zone, error=str(exc))
            return Spot()
        return spot_of(told)


def _runs_until(group: Group, now: datetime) -> datetime | None:
    """Return until when an instance of now runs for sure, to the hour, so that offers do not change all the time."""
    if group.run_seconds is None:
        return None
    return (now + timedelta(seconds=group.run_seconds)).replace(minute=0, second=0, microsecond=0)


def spot_of(told: Mapping[str, Any]) -> Spot:
    """Return the newest list price, and the share taken in the newest records."""
    prices, taken = _newest_first(told.get("priceHistory", ())), _newest_first(told.get("preemptionHistory", ()))
    rates = [float(one["preemptionRate"]) for one in taken[:RECORDS_COUNT] if "preemptionRate" in one]
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
    return price or None  # a price of nothing is no price
