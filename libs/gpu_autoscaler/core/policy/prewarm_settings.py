"""Policy of capacity ahead of demand: headroom, scheduled limits, forecast."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policy.cron import Scheduled
from gpu_autoscaler.core.policy.ranges import Count, Ratio, Seconds, about

Lookback = Annotated[int, Meta(ge=24, le=56 * 24)]
_Name = Annotated[str, Meta(min_length=1, max_length=63)]


class Headroom(Scheduled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Free GPUs, so that new work starts without waiting for a boot."""

    name: Annotated[_Name, about("Name, as shown in reasons.", "#limits")]
    free_gpu_count: Annotated[Count, about("Number of GPUs that are free or booting.", "#limits")]
    gpu_model: Annotated[str | None, about("Model of the GPUs; unset: any.", "#limits")] = None
    lead_seconds: Annotated[
        Seconds, about("Nodes are bought this long before the schedule starts.", "#forecast-slots")
    ] = 1800.0


class ScheduledLimit(Scheduled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minimum and maximum number of nodes on a schedule, within those of the cluster."""

    name: Annotated[_Name, about("Name, unique in the list.", "#limits")]
    nodes_count_min: Annotated[Count | None, about("Minimum number of nodes; unset: none.", "#limits")] = None
    nodes_count_max: Annotated[
        Count | None, about("Number of nodes above which none is bought; unset: no limit.", "#limits")
    ] = None
    lead_seconds: Annotated[
        Seconds, about("Nodes of the minimum are bought this long before the schedule starts.", "#forecast-slots")
    ] = 1800.0


class ForecastPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How demand is forecast, and when nodes are bought for it."""

    is_on: Annotated[
        bool,
        about(
            "If true, demand is recorded and forecast, and nodes are bought ahead once forecasts prove accurate.",
            "#forecast-slots",
        ),
    ] = False
    lookback_hours: Annotated[
        Lookback, about("Hours of history that a forecast uses; 336 and more improve it.", "#forecast-slots")
    ] = 168
    confidence_ratio_min: Annotated[
        Ratio, about("Forecasts of lower confidence are shown but buy nothing.", "#forecast-slots")
    ] = 0.7
    score_hours: Annotated[
        Lookback, about("Confidence is the accuracy of the forecasts of this many past hours.", "#forecast-slots")
    ] = 72
    short_rise_quantile_ratio: Annotated[
        Ratio,
        about(
            "Quantile of the demand rises within 5 minutes for which GPUs are kept free; fewer free GPUs "
            "start a purchase.",
            "docs/scores.md",
        ),
    ] = 0.5
    long_rise_quantile_ratio: Annotated[
        Ratio,
        about("Quantile of the demand rises within 30 minutes that a started purchase covers.", "#forecast-slots"),
    ] = 0.7
    prewarm_utilization_ratio_max: Annotated[
        float,
        about(
            "Forecast utilization above which capacity is prepared, until forecast demand uses at most this share of "
            "the GPUs. A higher value prepares less; 1: exactly the forecast.",
            "#prewarm-threshold",
            gt=0,
            le=1,
        ),
    ] = 1.0
    shrinkage_weeks_count: Annotated[
        int,
        about(
            "Weight, in weeks of history, of the hour of day against the hour of week.", "#forecast-slots", ge=0, le=52
        ),
    ] = 1
