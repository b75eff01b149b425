"""Who knows every job and its length beforehand. Not run, but computed: no system can be cheaper in the same world.

Cost: `wishes.py: floor_micro_usd`. Waiting: the start of a pod alone, as nodes would be ready for each arrival. Which
nodes those would be is not chosen, so node-hours and the use of GPUs are not known.
"""

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.sim.baselines.wishes import floor_micro_usd, wishes_of
from gpu_autoscaler.sim.scene import Scene
from gpu_autoscaler.sim.tally import ALL, Score, class_of, waiting_of
from gpu_autoscaler.sim.workloads import START_SECONDS


def score_omniscient(scene: Scene) -> Score:
    """Return the bound for the scene."""
    wishes = wishes_of(scene)
    start_seconds = sum(START_SECONDS) / 2.0
    names = [ALL, *(class_of(arrival.request) for arrival in scene.arrivals)]
    counts = {name: names.count(name) if name != ALL else len(scene.arrivals) for name in names}
    gpu_seconds = sum((wish.to_seconds - wish.from_seconds) * wish.resources.gpu_count for wish in wishes)
    return Score(
        world=scene.name,
        system="omniscient (a bound)",
        hours=round(max([scene.hours, *(wish.to_seconds / 3600.0 for wish in wishes)]), 3),
        cost_usd=round(floor_micro_usd(wishes, scene.offers) / MICRO_USD_PER_USD, 2),
        waiting={name: waiting_of([start_seconds] * count) for name, count in sorted(counts.items())},
        node_hours=None,
        gpu_hours_bought=None,
        gpu_hours_used=round(gpu_seconds / 3600.0, 3),
        lost_gpu_hours=0.0,
        evicted_count=0,
        interrupted_count=0,
        jobs_count=len(scene.arrivals),
        failed_count=0,
        unfinished_count=0,
    )
