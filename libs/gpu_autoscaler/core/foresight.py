"""What the forecast says in two figures: how full the cluster is to be in half an hour, and how sure that is.

For screens and metrics alone; what is decided by a forecast stands in `core/forecast.py`.
"""

from datetime import UTC, datetime, timedelta

import msgspec

from gpu_autoscaler.core.hours import hour
from gpu_autoscaler.core.nodes.life import node_views
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.rises import confidence_ratio, forecast_rises
from gpu_autoscaler.core.state import ClusterState

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A sample that is older says nothing about now.
_SAMPLE_AGE_MAX = timedelta(minutes=5)


class ForecastGauges(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Unknown is None: no forecast is on, nothing was sampled lately, or this hour was never seen."""

    utilization_ratio: float | None = None  # GPUs asked for then, of those there or on their way; above 1: more
    confidence_ratio: float | None = None  # of the kind that is foreseen worst; None: too few hours were scored


NO_FORECAST = ForecastGauges()


def foresight(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> ForecastGauges:
    """Return what is foreseen for the half hour to come, all kinds of GPU together."""
    if not policy.forecast.is_on:
        return NO_FORECAST
    wanted_count: int | None = None
    confidences: list[float | None] = []
    for kind, history in state.demand_history.items():
        if not history.levels or as_of - (_EPOCH + timedelta(minutes=history.levels[-1][0])) > _SAMPLE_AGE_MAX:
            continue
        made = forecast_rises(history.hours, hour(as_of), policy.forecast)
        level = history.levels[-1][1]
        if made is None and level:
            return NO_FORECAST  # a part that is not foreseen makes the sum a guess
        if made is not None:
            wanted_count = (wanted_count or 0) + level + made.long_rise_count
            confidences.append(confidence_ratio(state.forecast_scores.get(kind, ()), hour(as_of), policy.forecast))
    views = node_views(state, as_of)
    there_count = sum(view.allocatable.gpu_count for view in views if view.is_usable or view.is_booting)
    known = [each for each in confidences if each is not None]
    return ForecastGauges(
        utilization_ratio=None if wanted_count is None or not there_count else wanted_count / there_count,
        confidence_ratio=min(known) if known and len(known) == len(confidences) else None,
    )
