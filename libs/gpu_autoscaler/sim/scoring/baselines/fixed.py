"""A fleet that is bought once and never changes, sized for the usual peak.

`sized_for` knows all jobs in advance: the fleet for the instant whose demand is exceeded for `1 - quantile` of the
time, plus one node for each shape that would fit nowhere; on demand, so that nothing is reclaimed.
"""

from collections.abc import Iterable, Sequence

from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.sim.scoring.baselines.demand import PodDemand, cheapest_fleet, fits_on, pod_demands_of
from gpu_autoscaler.sim.scoring.baselines.observation import Observation
from gpu_autoscaler.sim.scoring.baselines.protocol import Action, Buy
from gpu_autoscaler.sim.scoring.scenario import Scenario

QUANTILE = 0.95
STEP_SECONDS = 300.0


class FixedFleet:
    """Buys the whole fleet in its first step."""

    name = "fixed fleet"
    scan_seconds = 3600.0

    def __init__(self, fleet: Sequence[Offer]) -> None:
        self._fleet = fleet
        self._is_bought = False

    def step(self, observation: Observation) -> Iterable[Action]:  # noqa: ARG002 - it ignores the cluster
        """Buy once."""
        if self._is_bought:
            return ()
        self._is_bought = True
        return [Buy(offer=offer, token=f"fixed-{number}") for number, offer in enumerate(self._fleet)]


def sized_for(scenario: Scenario, quantile: float = QUANTILE) -> tuple[Offer, ...]:
    """Return the fleet for the scenario: every shape fits, and the demand of this quantile of the time."""
    offers = [offer for offer in scenario.offers if offer.capacity_type is CapacityType.ON_DEMAND]
    pods = pod_demands_of(scenario)
    until = scenario.hours * 3600.0
    instants = [step * STEP_SECONDS for step in range(int(until // STEP_SECONDS) + 1)]
    fleets = sorted(
        (cheapest_fleet([pod for pod in pods if pod.is_running_at(at)], offers) for at in instants), key=price_of
    )
    fleet = list(fleets[min(len(fleets) - 1, int(quantile * len(fleets)))])
    for pod in sorted(pods, key=PodDemand.size, reverse=True):
        if not any(fits_on(pod, offer) for offer in fleet):
            fleet += cheapest_fleet([pod], offers)
    return tuple(fleet)


def price_of(fleet: Iterable[Offer]) -> int:
    """Return the price of the fleet for one hour, in micro-dollars."""
    return sum(offer.price_micro_usd_per_hour or 0 for offer in fleet)
