"""Demand history of the day before, for large clusters with a forecast: on a first day nothing could be forecast."""

import random

from gpu_autoscaler.core.demand_levels import ANY_KIND
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.scaling import ScalingDemandSampled
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.sim.record import Record
from gpu_autoscaler.sim.timeline import ORIGIN

HISTORY_HOURS = 4  # from midnight on
STEPS = (-9, 0, 0, 10)  # change per minute
GPU_COUNT_MAX = 40
_MINUTES_A_DAY = 24 * 60


def remember_yesterday(record: Record, chance: random.Random) -> None:
    """Publish the demand samples of the previous day's first hours."""
    first = int(ORIGIN.timestamp()) // 60 - _MINUTES_A_DAY
    level = GPU_COUNT_MAX // 4
    for minute in range(first, first + HISTORY_HOURS * 60):
        level = min(max(level + chance.choice(STEPS), 0), GPU_COUNT_MAX)
        fact = ScalingDemandSampled(minute=minute, gpu_counts=((ANY_KIND, level),))
        record.publish(Envelope(id=FactId(fact.condition() or ""), source="/yesterday", time=ORIGIN, fact=fact))
