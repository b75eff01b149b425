"""Policy of capacity ahead of demand: headroom, scheduled limits, forecast."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policy.cron import Scheduled
from gpu_autoscaler.core.policy.ranges import Count, Ratio, Seconds

Lookback = Annotated[int, Meta(ge=24, le=56 * 24)]
_Name = Annotated[str, Meta(min_length=1, max_length=63)]


class Headroom(Scheduled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Free GPUs, so that new work starts without waiting for a boot."""

    name: Annotated[_Name, Meta(description="Name, as shown in reasons. Source: docs/decisions.md#limits.")]
    free_gpu_count: Annotated[
        Count, Meta(description="Number of GPUs that are free or booting. Source: docs/decisions.md#limits.")
    ]
    gpu_model: Annotated[
        str | None, Meta(description="Model of the GPUs; unset: any. Source: docs/decisions.md#limits.")
    ] = None
    lead_seconds: Annotated[
        Seconds,
        Meta(
            description="Nodes are bought this long before the schedule starts."
            " Source: docs/decisions.md#forecast-slots."
        ),
    ] = 1800.0


class ScheduledLimit(Scheduled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minimum and maximum number of nodes on a schedule, within those of the cluster."""

    name: Annotated[_Name, Meta(description="Name, unique in the list. Source: docs/decisions.md#limits.")]
    nodes_count_min: Annotated[
        Count | None, Meta(description="Minimum number of nodes; unset: none. Source: docs/decisions.md#limits.")
    ] = None
    nodes_count_max: Annotated[
        Count | None,
        Meta(
            description="Number of nodes above which none is bought; unset: no limit. Source: docs/decisions.md#limits."
        ),
    ] = None
    lead_seconds: Annotated[
        Seconds,
        Meta(
            description="Nodes of the minimum are bought this long before the schedule starts."
            " Source: docs/decisions.md#forecast-slots."
        ),
    ] = 1800.0


class ForecastPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How demand is forecast, and when nodes are bought for it."""

    is_on: Annotated[
        bool,
        Meta(
            description="If true, demand is recorded and forecast, and nodes are bought ahead once forecasts prove"
            " accurate. Source: docs/decisions.md#forecast-slots."
        ),
    ] = False
    lookback_hours: Annotated[
        Lookback,
        Meta(
            description="Hours of history that a forecast uses; 336 and more improve it."
            " Source: docs/decisions.md#forecast-slots."
        ),
    ] = 168
    confidence_ratio_min: Annotated[
        Ratio,
        Meta(
            description="Forecasts of lower confidence are shown but buy nothing."
            " Source: docs/decisions.md#forecast-slots."
        ),
    ] = 0.7
    score_hours: Annotated[
        Lookback,
        Meta(
            description="Confidence is the accuracy of the forecasts of this many past hours."
            " Source: docs/decisions.md#forecast-slots."
        ),
    ] = 72
    short_rise_quantile_ratio: Annotated[
        Ratio,
        Meta(
            description="Quantile of the demand rises within 5 minutes for which GPUs are kept free; fewer free GPUs"
            " start a purchase. Source: docs/scores.md."
        ),
    ] = 0.5
    long_rise_quantile_ratio: Annotated[
        Ratio,
        Meta(
            description="Quantile of the demand rises within 30 minutes that a started purchase covers."
            " Source: docs/decisions.md#forecast-slots."
        ),
    ] = 0.7
    shrinkage_weeks_count: Annotated[
        int,
        Meta(
            ge=0,
            le=52,
            description="Weight, in weeks of history, of the hour of day against the hour of week."
            " Source: docs/decisions.md#forecast-slots.",
        ),
    ] = 1
