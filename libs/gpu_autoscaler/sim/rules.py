"""Parts of a run's policy: pace of removal, node expiry, headroom, size schedules and forecast.

Each part has its own generator, so a new part keeps recorded seeds stable.
"""

import random

from gpu_autoscaler.core.policies.ahead import ForecastPolicy, Headroom, ScheduledLimit
from gpu_autoscaler.core.policies.health import GpuHealthPolicy
from gpu_autoscaler.core.policies.removal import DisruptionBudget, RemovalCause, RemovalPolicy

_WEEK_SECONDS = 7 * 24 * 3600.0
_BUDGETS: tuple[tuple[DisruptionBudget, ...], ...] = (
    (),
    (),
    # A time each hour without removals, and underused nodes one at a time.
    (
        DisruptionBudget(nodes_count_max=0, schedule="20 * * * *", duration_seconds=900.0),
        DisruptionBudget(causes=(RemovalCause.UNDERUSED,), nodes_count_max=1),
    ),
    (DisruptionBudget(causes=(RemovalCause.EXPIRED, RemovalCause.DRIFTED), nodes_ratio_max=0.25),),
)
# They are active in the first hours of a run only, not during quiescence.
_HEADROOMS: tuple[tuple[Headroom, ...], ...] = (
    (),
    (),
    (),
    (Headroom(name="morning", free_gpu_count=2, schedule="50 0 * * *", duration_seconds=2700.0, lead_seconds=600.0),),
)
_SIZES: tuple[tuple[ScheduledLimit, ...], ...] = (
    (),
    (),
    (),
    (ScheduledLimit(name="rush", nodes_count_min=3, schedule="15 1 * * *", duration_seconds=1500.0, lead_seconds=600.0),),
    (ScheduledLimit(name="lull", nodes_count_max=8, schedule="30 0 * * *", duration_seconds=1800.0),),
)


def removal_of(seed: int) -> RemovalPolicy:
    """Return the removal policy. The strings that seed `Random` are part of each seed's meaning."""
    chance = random.Random(f"{seed}/removal")
    return RemovalPolicy(
        disruption_budgets=chance.choice(_BUDGETS),
        expire_seconds_max=chance.choice((None, _WEEK_SECONDS, 4500.0, 9000.0)),
        expire_grace_seconds=chance.choice((1800.0, 24 * 3600.0)),
        unhealthy_seconds_max=chance.choice((600.0, 1200.0)),
        forced_drain_seconds=chance.choice((300.0, 3600.0)),
        replacement_cooldown_seconds=chance.choice((1800.0, 6 * 3600.0)),
        gpu_health=GpuHealthPolicy(evidence_seconds=random.Random(f"{seed}/health").choice((120.0, 600.0))),
    )


def headrooms_of(seed: int) -> tuple[Headroom, ...]:
    """Return the headrooms."""
    return random.Random(f"{seed}/headrooms").choice(_HEADROOMS)


def scheduled_limits_of(seed: int) -> tuple[ScheduledLimit, ...]:
    """Return the size schedules."""
    return random.Random(f"{seed}/sizes").choice(_SIZES)


def forecast_of(seed: int) -> ForecastPolicy:
    """Return whether demand is forecast."""
    return ForecastPolicy(is_on=random.Random(f"{seed}/forecast").random() < 1 / 6)
