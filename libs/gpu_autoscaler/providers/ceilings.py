"""The most that an hour of spot may cost, by type, where the settings say so. Knows no cloud.

Without a setting a cloud's own ceiling stands, which is the on-demand price. One that is set is sent with each launch
where the cloud takes one, so that an instance is taken as well when its price passes it, and holds purchases back
before: at what the cloud would refuse nothing is asked for.
"""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import Bar, CapacityType, Offer
from gpu_autoscaler.providers.bars import OPEN, Barred
from gpu_autoscaler.providers.findings import Finding, warning, ok

# Below a tenth of a cent EC2 takes none (EC2 API Reference, "SpotMarketOptions", `MaxPrice`); Azure reads five decimals
# (Azure documentation, "Use Azure Spot Virtual Machines", pricing); both read 2026-11-22.
LEAST_MICRO_USD = 1_000
_STEP_MICRO_USD = 10


class SpotCeilings:
    """The ceilings of a cloud's settings, `type=US dollars an hour` each, patterns among the types."""

    def __init__(self, told: Sequence[str] = ()) -> None:
        """`told` has no mistakes (`ceiling_violations`)."""
        self._micro_usd = [(pattern, micro_usd) for pattern, micro_usd in map(_read, told) if micro_usd is not None]

    def of(self, instance_type: str) -> int | None:
        """Return micro-dollars an hour; of several that match the least. None: the cloud's own ceiling."""
        found = (micro_usd for pattern, micro_usd in self._micro_usd if fnmatchcase(instance_type, pattern))
        return min(found, default=None)

    def bar(self, instance_type: str, capacity_type: CapacityType, price_micro_usd: int | None) -> Barred:
        """Return what keeps an offer at this price, if so; one without a price is not bought anyway."""
        ceiling = self.of(instance_type) if capacity_type is CapacityType.SPOT else None
        if ceiling is None or price_micro_usd is None or price_micro_usd <= ceiling:
            return OPEN
        said = f"it costs ${usd_text(price_micro_usd)} an hour, above its ceiling of ${usd_text(ceiling)}"
        return Barred(Bar.CEILING, f"{said} (spot_ceilings)")


def ceiling_violations(setting: str, told: Sequence[str]) -> Iterator[str]:
    """Say what is wrong with each entry of the setting."""
    for one in told:
        pattern, micro_usd = _read(one)
        if not pattern or micro_usd is None:
            yield f"{setting}: {one!r} is not type=US dollars an hour, e.g. g5.*=0.60"
        elif micro_usd < LEAST_MICRO_USD:
            yield f"{setting}: {one!r} is below {usd_text(LEAST_MICRO_USD)}, the least that a cloud takes"


def ceiling_findings(told: Sequence[str], setting: str, offers: Sequence[Offer]) -> Iterator[Finding]:
    """Say of each ceiling whether it is of anything that is sold, and what it keeps from being bought now."""
    spot = [offer for offer in offers if offer.capacity_type is CapacityType.SPOT]
    for pattern in (_read(one)[0] for one in told):
        under = [offer for offer in spot if fnmatchcase(offer.instance_type, pattern)]
        kept_count = sum(1 for offer in under if offer.barred_by is Bar.CEILING)
        if not under:
            yield warning(f"{setting} {pattern}", "names nothing that is sold as spot", "correct it, or leave it out")
        elif kept_count:
            said = f"keeps {kept_count} of {len(under)} offers from being bought at their price of now"
            yield warning(f"{setting} {pattern}", said, "raise it, if they are wanted")
        else:
            yield ok(f"{setting} {pattern}", f"is above the price of {len(under)} offers")


def usd_text(micro_usd: int) -> str:
    """Return US dollars with five decimals, as clouds read a ceiling."""
    return f"{micro_usd / MICRO_USD_PER_USD:.5f}"


def _read(one: str) -> tuple[str, int | None]:
    """Return pattern and micro-dollars, rounded down to what a cloud can be told; None for what is no amount."""
    pattern, _, amount = one.partition("=")
    try:
        usd = float(amount)
    except ValueError:
        return pattern.strip(), None
    if not math.isfinite(usd):
        return pattern.strip(), None
    return pattern.strip(), round(usd * MICRO_USD_PER_USD) // _STEP_MICRO_USD * _STEP_MICRO_USD
