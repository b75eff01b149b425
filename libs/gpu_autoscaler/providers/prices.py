"""What a price is to every driver: the amount, whose word it is, and of when, where that is long ago."""

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.model.offers import CapacityType

LATELY = timedelta(hours=2)  # drivers read each source at least every hour: what is younger needs no date


class Price(msgspec.Struct, frozen=True):
    """Micro-dollars an hour; None: the source does not tell it."""

    micro_usd_per_hour: int | None
    source: str
    read_at: datetime | None = None  # None: lately


def file_price(
    prices: Mapping[str, int], filed_at: datetime | None, offer: tuple[str, str, CapacityType], now: datetime
) -> Price | None:
    """Return what the file says of type, zone and capacity type, or of the type in every zone; None: nothing."""
    name, zone, capacity_type = offer
    for key in (f"{name}/{zone}/{capacity_type}", f"{name}/*/{capacity_type}"):
        if key in prices:
            return Price(prices[key], "file of prices", timestamp_if_stale(filed_at, now))
    return None


def timestamp_if_stale(read_at: datetime | None, now: datetime) -> datetime | None:
    """When it was, if it should have been heard of since."""
    return read_at if read_at is not None and now - read_at > LATELY else None
