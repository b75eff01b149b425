"""A fleet that is bought once and never changes: what a team has that sized its cluster for its usual peak.

Sized by who knows all jobs beforehand (`sized_for`): at the instant whose demand is exceeded for `1 - quantile` of the
time, plus one node for each shape that would otherwise fit nowhere; on-demand, so that nothing is taken back.
"""

from collections.abc import Iterable, Sequence

from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.sim.baselines.protocol import Act, Buy
from gpu_autoscaler.sim.baselines.sight import Sight
from gpu_autoscaler.sim.baselines.wishes import Wish, cheapest_fleet, fits_on, wishes_of
from gpu_autoscaler.sim.scene import Scene

QUANTILE = 0.95
STEP_SECONDS = 300.0


class FixedFleet:
    """Buys everything at its first look."""

    name = "fixed fleet"
    scan_seconds = 3600.0

    def __init__(self, fleet: Sequence[Offer]) -> None:
        self._fleet = fleet
        self._is_bought = False

    def look(self, sight: Sight) -> Iterable[Act]:  # noqa: ARG002 - nothing that happens matters to it
        """Buy once."""
        if self._is_bought:
            return ()
        self._is_bought = True
        return [Buy(offer=offer, token=f"fixed-{number}") for number, offer in enumerate(self._fleet)]


def sized_for(scene: Scene, quantile: float = QUANTILE) -> tuple[Offer, ...]:
    """Return the fleet for the scene: all of its shapes fit, and its demand does for this share of the time."""
    offers = [offer for offer in scene.offers if offer.capacity_type is CapacityType.ON_DEMAND]
    wishes = wishes_of(scene)
    until = scene.hours * 3600.0
    instants = [step * STEP_SECONDS for step in range(int(until // STEP_SECONDS) + 1)]
    fleets = sorted(
        (cheapest_fleet([wish for wish in wishes if wish.is_wanted_at(at)], offers) for at in instants), key=price_of
    )
    fleet = list(fleets[min(len(fleets) - 1, int(quantile * len(fleets)))])
    for wish in sorted(wishes, key=Wish.size, reverse=True):
        if not any(fits_on(wish, offer) for offer in fleet):
            fleet += cheapest_fleet([wish], offers)
    return tuple(fleet)


def price_of(fleet: Iterable[Offer]) -> int:
    """Return what an hour of the fleet costs, in micro-dollars."""
    return sum(offer.price_micro_usd_per_hour or 0 for offer in fleet)
