"""Baselines with knowledge of all jobs: a fleet bought once, sized for the usual peak, and a lower bound of the cost.

The fixed fleet covers the instant whose demand is exceeded for `1 - quantile` of the time, plus one node for each shape
that would fit nowhere; on demand, so that nothing is reclaimed. The bound is computed, not run: none can be cheaper
in the same scenario. Its waiting is the start of a pod only, as if a node were ready for each arrival; no nodes are
chosen, so node-hours and GPU utilization are unknown.
"""

from collections.abc import Iterable, Sequence

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.sim.cluster.controllers import START_SECONDS
from gpu_autoscaler.sim.scoring.baselines.demand import (
    PodDemand,
    cheapest_fleet,
    fits_on,
    floor_micro_usd,
    pod_demands_of,
)
from gpu_autoscaler.sim.scoring.baselines.observation import Observation
from gpu_autoscaler.sim.scoring.baselines.protocol import Action, Buy
from gpu_autoscaler.sim.scoring.metrics import ALL, Score, class_of, waiting_of
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


def score_omniscient(scenario: Scenario) -> Score:
    """Return the bound for the scenario."""
    pods = pod_demands_of(scenario)
    start_seconds = sum(START_SECONDS) / 2.0
    names = [ALL, *(class_of(arrival.request) for arrival in scenario.arrivals)]
    counts = {name: names.count(name) if name != ALL else len(scenario.arrivals) for name in names}
    gpu_seconds = sum((pod.to_seconds - pod.from_seconds) * pod.resources.gpu_count for pod in pods)
    return Score(
        world=scenario.name,
        system="omniscient (a bound)",
        hours=round(max([scenario.hours, *(pod.to_seconds / 3600.0 for pod in pods)]), 3),
        cost_usd=round(floor_micro_usd(pods, scenario.offers) / MICRO_USD_PER_USD, 2),
        waiting={name: waiting_of([start_seconds] * count) for name, count in sorted(counts.items())},
        node_hours=None,
        gpu_hours_bought=None,
        gpu_hours_used=round(gpu_seconds / 3600.0, 3),
        lost_gpu_hours=0.0,
        evicted_count=0,
        interrupted_count=0,
        jobs_count=len(scenario.arrivals),
        failed_count=0,
        unfinished_count=0,
    )
