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
    heard_at: datetime | None = None  # None: lately


def price_of_file(
    prices: Mapping[str, int], filed_at: datetime | None, offer: tuple[str, str, CapacityType], now: datetime
) -> Price | None:
    """Return what the file says of type, zone and capacity type, or of the type in every zone; None: nothing."""
    name, zone, capacity_type = offer
    for key in (f"{name}/{zone}/{capacity_type}", f"{name}/*/{capacity_type}"):
        if key in prices:
            return Price(prices[key], "file of prices", if_old(filed_at, now))
    return None


def if_old(heard_at: datetime | None, now: datetime) -> datetime | None:
    """When it was, if it should have been heard of since."""
    return heard_at if heard_at is not None and now - heard_at > LATELY else None
