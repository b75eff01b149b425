"""Baselines with knowledge of all jobs: a fleet bought once, sized for the usual peak, and a lower bound of the cost.

The fixed fleet covers the instant whose demand is exceeded for `1 - quantile` of the time, plus one node for each shape
that would fit nowhere; on demand, so that nothing is reclaimed. The bound is computed, not run: none can be cheaper
in the same scenario. Its waiting is the start of a pod only, as if a node were ready for each arrival; no nodes are
chosen, so node-hours and GPU utilization are unknown.
"""

from collections.abc import Iterable, Sequence

import msgspec

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.gpu import gpu_model_name
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources, parse_quantity, parse_quantity_milli
from gpu_autoscaler.sim.cluster.controllers import START_SECONDS
from gpu_autoscaler.sim.scoring.baselines.observation import Action, Buy, Observation
from gpu_autoscaler.sim.scoring.metrics import ALL, Score, class_of, waiting_of
from gpu_autoscaler.sim.scoring.scenario import Scenario, ServiceReplicas

BOUND = "omniscient (a bound)"
_Shape = tuple[Resources, str | None, bool]
_QUARTERS = range(5)
# Weights of GPUs, CPU and memory, in quarters with sum one.
_WEIGHTS = tuple((gpu / 4, cpu / 4, (4 - gpu - cpu) / 4) for gpu in _QUARTERS for cpu in _QUARTERS if gpu + cpu <= 4)


class PodDemand(msgspec.Struct, frozen=True, kw_only=True):
    """One pod, from its request to its end without waiting."""

    from_seconds: float
    to_seconds: float
    resources: Resources
    gpu_model: str | None
    allows_spot: bool  # spot is allowed

    def is_running_at(self, at_seconds: float) -> bool:
        return self.from_seconds <= at_seconds < self.to_seconds

    def size(self) -> tuple[int, int, int]:
        """Sort key for packing, largest first."""
        return self.resources.gpu_count, self.resources.cpu_milli, self.resources.memory_bytes


def pod_demands_of(scenario: Scenario) -> tuple[PodDemand, ...]:
    """Return every pod of the scenario."""
    jobs = [
        pod
        for arrival in scenario.arrivals
        for pod in [demand_of_job(arrival.at_seconds, arrival.request)] * arrival.request.members
    ]
    replicas = [
        pod
        for service in scenario.services
        for pod in [demand_of_replica(service, scenario.hours)] * service.replicas_count
    ]
    return (*jobs, *replicas)


def fits_on(pod: PodDemand, offer: Offer) -> bool:
    """True if the pod fits on an empty node of this offer."""
    is_right = pod.gpu_model in (None, offer.gpu_model)
    may_run = pod.allows_spot or offer.capacity_type is not CapacityType.SPOT
    return is_right and may_run and pod.resources.fits_in(offer.resources)


def cheapest_fleet(pods: Iterable[PodDemand], offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Return nodes that fit all pods at once: largest pods first, each on the fullest node, else on a new node where
    its share of GPUs (or CPU) is cheapest.
    """
    nodes: list[tuple[Offer, Resources]] = []
    for pod in sorted(pods, key=PodDemand.size, reverse=True):
        open_nodes = [
            (free.gpu_count, free.cpu_milli, number)
            for number, (offer, free) in enumerate(nodes)
            if fits_on(pod, offer) and pod.resources.fits_in(free)
        ]
        if open_nodes:
            number = min(open_nodes)[2]
            offer, free = nodes[number]
            nodes[number] = (offer, free - pod.resources)
            continue
        fitting = [offer for offer in offers if fits_on(pod, offer)]
        if not fitting:
            raise ValueError(f"no offer fits {pod.resources}")
        offer = min(
            fitting, key=lambda offer: (_share_micro_usd(pod, offer), offer.price_micro_usd_per_hour or 0, offer.key)
        )
        nodes.append((offer, offer.resources - pod.resources))
    return tuple(offer for offer, _ in nodes)


def _share_micro_usd(pod: PodDemand, offer: Offer) -> float:
    """Return the price of the pod's share of the node for one hour: the largest share of GPUs, CPU or memory."""
    requests, capacity = pod.resources, offer.resources
    shares = [requests.cpu_milli / capacity.cpu_milli, requests.memory_bytes / capacity.memory_bytes]
    if capacity.gpu_count:
        # A pod without GPUs still uses up a GPU node once the CPU is full.
        shares.append(requests.gpu_count / capacity.gpu_count)
    return max(shares) * (offer.price_micro_usd_per_hour or 0)


def floor_micro_usd(pods: Sequence[PodDemand], offers: Sequence[Offer]) -> float:
    """Return a lower bound of the cost of the work, for any plan and any waiting.

    Each pod pays for its share of a node, on the cheapest offer for it, while it runs. A share is the weighted mean of
    its shares of GPUs, CPU and memory. The pods of a node never use more than all of each, so their shares never sum to
    more than one node, and no plan is cheaper. That holds for any weights; the best of a grid is used.
    """
    hours: dict[_Shape, float] = {}
    example: dict[_Shape, PodDemand] = {}
    for pod in pods:
        key = (pod.resources, pod.gpu_model, pod.allows_spot)
        hours[key] = hours.get(key, 0.0) + (pod.to_seconds - pod.from_seconds) / 3600.0
        example[key] = pod
    fitting = {key: [offer for offer in offers if fits_on(pod, offer)] for key, pod in example.items()}
    return max(
        sum(
            hours[key] * min(_weighted_micro_usd(pod.resources, offer, weights) for offer in fitting[key])
            for key, pod in example.items()
        )
        for weights in _WEIGHTS
    )


def _weighted_micro_usd(requests: Resources, offer: Offer, weights: tuple[float, float, float]) -> float:
    """Return the price of a weighted share of the node for one hour; without GPUs only CPU and memory are shared."""
    of_gpu, of_cpu, of_memory = weights
    capacity, price = offer.resources, offer.price_micro_usd_per_hour or 0
    share = of_cpu * requests.cpu_milli / capacity.cpu_milli + of_memory * requests.memory_bytes / capacity.memory_bytes
    if capacity.gpu_count:
        return price * (share + of_gpu * requests.gpu_count / capacity.gpu_count)
    return price * (share / (of_cpu + of_memory) if of_cpu + of_memory else requests.cpu_milli / capacity.cpu_milli)


def demand_of_job(at_seconds: float, request: JobRequested) -> PodDemand:
    """Return what each member of the job needs."""
    gpus, resources = request.gpu_requirements, request.resources
    assert request.run_seconds is not None, "a scenario's jobs have durations"  # noqa: S101 - a bug of the scenario
    return PodDemand(
        from_seconds=at_seconds,
        to_seconds=at_seconds + request.run_seconds,
        resources=Resources(
            cpu_milli=parse_quantity_milli(resources.cpu),
            memory_bytes=parse_quantity(resources.memory),
            gpu_count=gpus.gpu_count,
            ephemeral_storage_bytes=parse_quantity(resources.ephemeral_storage),
            pod_count=1,
        ),
        gpu_model=gpu_model_name(gpus.gpu_types[0]) if gpus.gpu_types else None,  # a scenario's jobs name at most one
        allows_spot=request.preemptible,
    )


def demand_of_replica(replicas: ServiceReplicas, hours: float) -> PodDemand:
    """Return what each replica needs; it ends with the hours of the scenario."""
    return PodDemand(
        from_seconds=replicas.at_seconds,
        to_seconds=hours * 3600.0,
        resources=Resources(cpu_milli=1000, memory_bytes=2 * 2**30, gpu_count=replicas.gpu_count, pod_count=1),
        gpu_model=None,
        allows_spot=True,
    )


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
        system=BOUND,
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
