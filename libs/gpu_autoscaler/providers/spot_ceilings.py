"""Spot price ceilings of the settings, by instance type. Shared by all drivers.

Without a setting the cloud's own ceiling applies: the on-demand price. A configured ceiling is sent with each launch
where the cloud accepts one, so the cloud reclaims the instance when its price exceeds the ceiling. Offers priced above
their ceiling are not ordered.
"""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer, UnavailabilityCause
from gpu_autoscaler.providers.market import AVAILABLE, Unavailable
from gpu_autoscaler.providers.preflight import Finding, ok, warning

# EC2 accepts no ceiling below a tenth of a cent (EC2 API Reference, "SpotMarketOptions", `MaxPrice`); Azure reads five
# decimals (Azure documentation, "Use Azure Spot Virtual Machines", pricing); both read 2026-11-22.
LEAST_MICRO_USD = 1_000
_STEP_MICRO_USD = 10


class SpotCeilings:
    """Ceilings of the settings as `type=US dollars per hour`; types may be patterns."""

    def __init__(self, entries: Sequence[str] = ()) -> None:
        """`entries` must be valid (`ceiling_violations`)."""
        self._micro_usd = [(pattern, micro_usd) for pattern, micro_usd in map(_read, entries) if micro_usd is not None]

    def of(self, instance_type: str) -> int | None:
        """Return the lowest matching ceiling in micro-dollars per hour; None: the cloud's own ceiling applies."""
        ceilings = (micro_usd for pattern, micro_usd in self._micro_usd if fnmatchcase(instance_type, pattern))
        return min(ceilings, default=None)

    def check(self, instance_type: str, capacity_type: CapacityType, price_micro_usd: int | None) -> Unavailable:
        """Return whether the price exceeds the ceiling. An offer without a price is not launched anyway."""
        ceiling = self.of(instance_type) if capacity_type is CapacityType.SPOT else None
        if ceiling is None or price_micro_usd is None or price_micro_usd <= ceiling:
            return AVAILABLE
        message = f"price ${usd_text(price_micro_usd)} per hour exceeds the ceiling of ${usd_text(ceiling)}"
        return Unavailable(UnavailabilityCause.CEILING, f"{message} (spot_ceilings)")


def ceiling_violations(setting: str, entries: Sequence[str]) -> Iterator[str]:
    """Yield a violation for each invalid entry."""
    for entry in entries:
        pattern, micro_usd = _read(entry)
        if not pattern or micro_usd is None:
            yield f"{setting}: {entry!r} is not type=US dollars per hour, e.g. g5.*=0.60"
        elif micro_usd < LEAST_MICRO_USD:
            yield f"{setting}: {entry!r} is below {usd_text(LEAST_MICRO_USD)}, the lowest ceiling that clouds accept"


def ceiling_findings(entries: Sequence[str], setting: str, offers: Sequence[Offer]) -> Iterator[Finding]:
    """Yield for each ceiling whether it matches any offer, and how many offers it excludes now."""
    spot = [offer for offer in offers if offer.capacity_type is CapacityType.SPOT]
    for pattern in (_read(entry)[0] for entry in entries):
        matching = [offer for offer in spot if fnmatchcase(offer.instance_type, pattern)]
        excluded_count = sum(1 for offer in matching if offer.unavailable_by is UnavailabilityCause.CEILING)
        if not matching:
            yield warning(f"{setting} {pattern}", "matches no spot offer", "correct or remove it")
        elif excluded_count:
            message = f"excludes {excluded_count} of {len(matching)} offers at their current price"
            yield warning(f"{setting} {pattern}", message, "raise it if these offers are wanted")
        else:
            yield ok(f"{setting} {pattern}", f"is above the price of {len(matching)} offers")


def usd_text(micro_usd: int) -> str:
    """Return US dollars with five decimals, as clouds read a ceiling."""
    return f"{micro_usd / MICRO_USD_PER_USD:.5f}"


def _read(entry: str) -> tuple[str, int | None]:
    """Return pattern and micro-dollars, rounded down to the precision of clouds; None if the amount is invalid."""
    pattern, _, amount = entry.partition("=")
    try:
        usd = float(amount)
    except ValueError:
        return pattern.strip(), None
    if not math.isfinite(usd):
        return pattern.strip(), None
    return pattern.strip(), round(usd * MICRO_USD_PER_USD) // _STEP_MICRO_USD * _STEP_MICRO_USD
