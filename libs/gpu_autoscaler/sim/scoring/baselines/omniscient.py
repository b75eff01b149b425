"""A bound computed with knowledge of all jobs: no system can be cheaper in the same scenario.

Cost: `floor_micro_usd`. Waiting: the start of a pod only, as if a node were ready for each arrival. No nodes are
chosen, so node-hours and GPU utilization are unknown.
"""

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.sim.cluster.controllers import START_SECONDS
from gpu_autoscaler.sim.scoring.baselines.demand import floor_micro_usd, pod_demands_of
from gpu_autoscaler.sim.scoring.metrics import ALL, Score, class_of, waiting_of
from gpu_autoscaler.sim.scoring.scenario import Scenario


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
