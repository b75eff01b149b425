"""What the markets of all clouds share: machines, prices with their source, and known reasons of unavailability."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer, UnavailabilityCause
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.files import read_text

LATELY = timedelta(hours=2)  # drivers read each source at least hourly: younger prices need no date


class MachineKind(msgspec.Struct, frozen=True, kw_only=True):
    """An instance type: allocatable resources, GPUs, and the vCPUs that quotas count."""

    name: str
    resources: Resources
    vcpu_count: int = 0
    gpu_model: str | None = None
    gpu_memory_bytes: int | None = None


class Price(msgspec.Struct, frozen=True):
    """Micro-dollars per hour; None: the source has none."""

    micro_usd_per_hour: int | None
    source: str | None
    read_at: datetime | None = None  # None: recently


class PriceFile:
    """Prices of the settings' file in US dollars per hour, by offer key or by `type/*/capacity type`. They override the
    cloud's."""

    def __init__(self, owner: str, path: str | None) -> None:
        """Raises ConfigError in the name of `owner`; None: no file."""
        self._filed_at = modified_at(path)
        self._micro_usd: dict[str, int] = {}
        if path is not None:
            try:
                prices = msgspec.json.decode(read_text(owner, path), type=dict[str, float])
            except msgspec.DecodeError as exc:
                message = f"{path}: is not a JSON object of prices in US dollars per hour: {exc}"
                raise ConfigError(owner, [message]) from exc
            self._micro_usd = {key: round(usd * MICRO_USD_PER_USD) for key, usd in prices.items()}

    def everywhere(self, name: str, capacity_type: CapacityType) -> int | None:
        """Return the price of the type in every zone; None: the file has none."""
        return self._micro_usd.get(f"{name}/*/{capacity_type}")

    def price(self, name: str, zone: str, capacity_type: CapacityType, now: datetime) -> Price | None:
        """Return the file's price for the offer, or for the type in every zone; None: neither."""
        price = self._micro_usd.get(f"{name}/{zone}/{capacity_type}", self.everywhere(name, capacity_type))
        return None if price is None else Price(price, "price file", timestamp_if_stale(self._filed_at, now))


def modified_at(path: str | None) -> datetime | None:
    """Return when the file was last written; None without a file."""
    return None if path is None else datetime.fromtimestamp(int(Path(path).stat().st_mtime), UTC)


def timestamp_if_stale(read_at: datetime | None, now: datetime) -> datetime | None:
    """Return the timestamp if it is older than the source's refresh interval."""
    return read_at if read_at is not None and now - read_at > LATELY else None


class Unavailable(msgspec.Struct, frozen=True):
    """Why an offer is known to be unavailable before it is ordered. Both are None if it is available."""

    by: UnavailabilityCause | None = None
    because: str | None = None


AVAILABLE = Unavailable()


def first_unavailable(quota_shortfall: str | None, other: Unavailable = AVAILABLE) -> Unavailable:
    """Return the quota shortage if there is one, else the other reason."""
    return other if quota_shortfall is None else Unavailable(UnavailabilityCause.QUOTA, quota_shortfall)


def offer_of(
    kind: MachineKind,
    zone: str,
    capacity_type: CapacityType,
    price: Price,
    unavailable: Unavailable = AVAILABLE,
    **terms: Any,  # noqa: ANN401 - other fields of Offer
) -> Offer:
    """Return the offer of this machine."""
    return Offer(
        instance_type=kind.name,
        zone=zone,
        capacity_type=capacity_type,
        resources=kind.resources,
        gpu_model=kind.gpu_model,
        gpu_memory_bytes=kind.gpu_memory_bytes,
        price_micro_usd_per_hour=price.micro_usd_per_hour,
        price_source=price.source,
        priced_at=price.read_at,
        unavailable_because=unavailable.because,
        unavailable_by=unavailable.by,
        **terms,
    )


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether the type's name matches one of these patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def matching_kinds(kinds: Mapping[str, Any], patterns: Iterable[str]) -> dict[str, Any]:
    """Return those of the built-in table whose names match."""
    return {name: kind for name, kind in kinds.items() if matches_any(name, patterns)}
