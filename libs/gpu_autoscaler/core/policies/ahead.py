"""What the policy says about capacity ahead of demand. Part of `core/policy.py`."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.cron import schedule
from gpu_autoscaler.core.policies.ranges import Count, Ratio, Seconds

Lookback = Annotated[int, Meta(ge=24, le=56 * 24)]
# The longest time that a schedule may hold from one beginning.
DURATION_SECONDS_MAX = 31 * 86_400.0


class Scheduled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds always, or from each beginning of a schedule for a while."""

    name: Annotated[str, Meta(min_length=1, max_length=63, description="Name, as reasons tell it. Source: our own.")]
    schedule: Annotated[
        str | None, Meta(description="When it begins to hold, as cron has it; none: always. Source: our own.")
    ] = None
    duration_seconds: Annotated[
        Seconds | None, Meta(description="How long it holds from then on, 31 days at most. Source: our own.")
    ] = None
    time_zone: Annotated[str, Meta(description="Time zone of the schedule, as in Europe/Berlin. Source: our own.")] = (
        "UTC"
    )

    def holds(self, as_of: datetime, ahead: timedelta = timedelta()) -> bool:
        """True when it holds at this instant, or will have begun after `ahead`. Only of one without mistakes."""
        if self.schedule is None or self.duration_seconds is None:
            return True
        long = timedelta(seconds=self.duration_seconds)
        return schedule(self.schedule, self.time_zone).last_start(as_of + ahead, as_of - long) is not None

    def mistakes(self) -> Iterator[str]:
        """Yield what cannot be meant, one sentence each."""
        if (self.schedule is None) != (self.duration_seconds is None):
            yield "schedule and duration_seconds are set together or not at all"
        if self.duration_seconds is not None and not 0 < self.duration_seconds <= DURATION_SECONDS_MAX:
            yield f"duration_seconds: {self.duration_seconds:g} is not above 0 and up to {DURATION_SECONDS_MAX:g}"
        if self.schedule is not None:
            try:
                schedule(self.schedule, self.time_zone)
            except ValueError as error:
                yield f"schedule: {error}"


class Headroom(Scheduled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GPUs of a kind that are kept free, so that work that comes starts at once."""

    free_gpu_count: Annotated[Count, Meta(description="GPUs that are free, or on their way. Source: S71.")]
    gpu_model: Annotated[str | None, Meta(description="Their model; none: any. Source: S135.")] = None
    lead_seconds: Annotated[
        Seconds, Meta(description="A schedule's GPUs are ordered so long before it begins. Source: S131.")
    ] = 1800.0


class ScheduledLimit(Scheduled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the number of nodes at some times, inside the policy's own."""

    nodes_count_min: Annotated[Count | None, Meta(description="Nodes at least. Source: S71.")] = None
    nodes_count_max: Annotated[Count | None, Meta(description="Nodes bought at most. Source: S71.")] = None
    lead_seconds: Annotated[
        Seconds, Meta(description="The least is ordered so long before it begins. Source: S131.")
    ] = 1800.0


class ForecastPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How demand is foreseen, and when that is acted on."""

    is_on: Annotated[
        bool, Meta(description="Remember demand, forecast_rises it, and buy ahead once that proves right. Source: S173.")
    ] = False
    lookback_hours: Annotated[
        Lookback, Meta(description="Hours that a forecast is made of; 14 days and more sharpen it. Source: S131, S132.")
    ] = 168
    confidence_ratio_min: Annotated[
        Ratio, Meta(description="A forecast below this confidence is told and not acted on. Source: S131, S167.")
    ] = 0.7
    score_hours: Annotated[
        Lookback, Meta(description="Confidence is how right the forecasts of these hours were. Source: our own, V7.")
    ] = 72
    short_rise_quantile_ratio: Annotated[
        Ratio,
        Meta(description="Share of the rises within 5 min that free GPUs are kept for. Source: bench V7, tuned days."),
    ] = 0.5
    long_rise_quantile_ratio: Annotated[
        Ratio,
        Meta(description="Share of the rises within 30 min that are bought for, once buying. Source: S131, bench V7."),
    ] = 0.7
    shrinkage_weeks_count: Annotated[
        int,
        Meta(ge=0, le=52, description="Weeks of its own that outweigh the hour of day. Source: Decisions, slots."),
    ] = 1
