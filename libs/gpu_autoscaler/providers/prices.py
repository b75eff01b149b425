"""A price with its source, and its date if it is stale. Shared by all drivers."""

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.model.offers import CapacityType

LATELY = timedelta(hours=2)  # drivers read each source at least hourly: younger prices need no date


class Price(msgspec.Struct, frozen=True):
    """Micro-dollars per hour; None: the source has none."""

    micro_usd_per_hour: int | None
    source: str
    read_at: datetime | None = None  # None: recently


def file_price(
    prices: Mapping[str, int], filed_at: datetime | None, offer: tuple[str, str, CapacityType], now: datetime
) -> Price | None:
    """Return the file's price for type, zone and capacity type, or for the type in every zone; None: neither."""
    name, zone, capacity_type = offer
    for key in (f"{name}/{zone}/{capacity_type}", f"{name}/*/{capacity_type}"):
        if key in prices:
            return Price(prices[key], "price file", timestamp_if_stale(filed_at, now))
    return None


def timestamp_if_stale(read_at: datetime | None, now: datetime) -> datetime | None:
    """Return the timestamp if it is older than the source's refresh interval."""
    return read_at if read_at is not None and now - read_at > LATELY else None
