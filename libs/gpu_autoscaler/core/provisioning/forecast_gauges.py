"""The forecast for the next half hour in numbers, for displays and metrics only. The plan uses `forecast_step.py`."""

from datetime import UTC, datetime, timedelta

import msgspec

from gpu_autoscaler.core.next_change import has_lasted_longer
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.demand_history import DemandHistory, confidence_ratio, forecast_rises
from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.state import ClusterState

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Older samples are not used.
_SAMPLE_AGE_SECONDS_MAX = 300.0


def is_recent(history: DemandHistory, as_of: datetime) -> bool:
    """True if the history has a sample of the last minutes."""
    if not history.levels:
        return False
    return not has_lasted_longer(_EPOCH + timedelta(minutes=history.levels[-1][0]), _SAMPLE_AGE_SECONDS_MAX, as_of)


class ForecastGauges(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Forecast for the next half hour. None: no forecast, no recent samples, or no history of this hour."""

    utilization_ratio: float | None = None  # forecast demand by present and booting GPUs; may exceed 1
    confidence_ratio: float | None = None  # lowest of all GPU models; None: too few scores


NO_FORECAST = ForecastGauges()


def forecast_gauges(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> ForecastGauges:
    """Return the forecast for the next half hour, of all GPU models together."""
    if not policy.forecast.is_on:
        return NO_FORECAST
    demand_count: int | None = None
    confidences: list[float | None] = []
    for kind, history in state.demand_history.items():
        if not is_recent(history, as_of):
            continue
        forecast = forecast_rises(history.hours, hour(as_of), policy.forecast)
        level = history.levels[-1][1]
        if forecast is None and level:
            return NO_FORECAST  # one missing model makes the sum meaningless
        if forecast is not None:
            demand_count = (demand_count or 0) + level + forecast.long_rise_count
            confidences.append(confidence_ratio(state.forecast_scores.get(kind, ()), hour(as_of), policy.forecast))
    views = node_views(state, as_of)
    gpu_count = sum(view.allocatable.gpu_count for view in views if view.is_usable or view.is_booting)
    known = [confidence for confidence in confidences if confidence is not None]
    return ForecastGauges(
        utilization_ratio=None if demand_count is None or not gpu_count else demand_count / gpu_count,
        confidence_ratio=min(known) if known and len(known) == len(confidences) else None,
    )
