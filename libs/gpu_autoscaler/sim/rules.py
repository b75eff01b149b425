"""What else a run's policy says: at which pace nodes go, how old they get, how much is kept free, and when.

Each part is drawn by itself, so that a new one leaves the seeds that were kept as they were.
"""

import random

from gpu_autoscaler.core.policies.ahead import ForecastPolicy, Headroom, Size
from gpu_autoscaler.core.policies.health import GpuHealthPolicy
from gpu_autoscaler.core.policies.removal import RemovalBudget, RemovalCause, RemovalPolicy

_WEEK_SECONDS = 7 * 24 * 3600.0
_BUDGETS: tuple[tuple[RemovalBudget, ...], ...] = (
    (),
    (),
    # Nobody goes for a while each hour, and of those that are used little only one at a time.
    (
        RemovalBudget(nodes_count_max=0, schedule="20 * * * *", duration_seconds=900.0),
        RemovalBudget(causes=(RemovalCause.UNDERUSED,), nodes_count_max=1),
    ),
    (RemovalBudget(causes=(RemovalCause.EXPIRED, RemovalCause.DRIFTED), nodes_ratio_max=0.25),),
)
# They hold for some of a run's first hours, and not while it comes to rest.
_HEADROOMS: tuple[tuple[Headroom, ...], ...] = (
    (),
    (),
    (),
    (Headroom(name="morning", free_gpu_count=2, schedule="50 0 * * *", duration_seconds=2700.0, lead_seconds=600.0),),
)
_SIZES: tuple[tuple[Size, ...], ...] = (
    (),
    (),
    (),
    (Size(name="rush", nodes_count_min=3, schedule="15 1 * * *", duration_seconds=1500.0, lead_seconds=600.0),),
    (Size(name="lull", nodes_count_max=8, schedule="30 0 * * *", duration_seconds=1800.0),),
)


def removal_of(seed: int) -> RemovalPolicy:
    """What makes nodes due to go, and how many at a time."""
    chance = random.Random(f"{seed}/removal")
    return RemovalPolicy(
        budgets=chance.choice(_BUDGETS),
        expire_seconds_max=chance.choice((None, _WEEK_SECONDS, 4500.0, 9000.0)),
        expire_overtime_seconds=chance.choice((1800.0, 24 * 3600.0)),
        sick_seconds_max=chance.choice((600.0, 1200.0)),
        forced_drain_seconds=chance.choice((300.0, 3600.0)),
        replacement_seconds_min=chance.choice((1800.0, 6 * 3600.0)),
        gpu=GpuHealthPolicy(evidence_seconds=random.Random(f"{seed}/health").choice((120.0, 600.0))),
    )


def headrooms_of(seed: int) -> tuple[Headroom, ...]:
    """What is kept free."""
    return random.Random(f"{seed}/headrooms").choice(_HEADROOMS)


def sizes_of(seed: int) -> tuple[Size, ...]:
    """Bounds that hold for a while."""
    return random.Random(f"{seed}/sizes").choice(_SIZES)


def forecast_of(seed: int) -> ForecastPolicy:
    """Whether demand is foreseen."""
    return ForecastPolicy(is_on=random.Random(f"{seed}/forecast").random() < 1 / 6)
