"""Demand history: rises of demand by hour, their forecast by quantiles, and the score of past forecasts.

The rise of a minute is how far demand, in GPUs, climbs above it within a horizon. Levels drift, but rises repeat by
hour of week. All numbers are integers: equal samples give equal forecasts on every machine.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from gpu_autoscaler.core.policy.prewarm_settings import ForecastPolicy
from gpu_autoscaler.model.forecasts import Score

SHORT_HORIZON_MINUTES = 5  # about the boot time of a GPU node (docs/decisions.md#success-numbers)
LONG_HORIZON_MINUTES = 30  # how far ahead nodes are bought (docs/decisions.md#forecast-slots)
PEAK_MINUTES = 5  # demand that fell less long ago still counts
HOURS_COUNT_MAX = 56 * 24  # the longest lookback of a policy
_LEVELS_MINUTES = 120 + LONG_HORIZON_MINUTES  # retention of single samples
_HOURS_A_DAY, _HOURS_A_WEEK, _MINUTES_AN_HOUR = 24, 168, 60
_PARTS = 1_000_000  # ratios are compared as integers
# Minimum share of samples of an hour and of a horizon; incomplete hours are not learned from.
_SAMPLES_RATIO_MIN = 0.5
_SCORED_HOURS_MIN = 24  # a day of scores

Counts = tuple[tuple[int, int], ...]  # (rise in GPUs, minutes), ascending


class HourlyRises(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Rises of the minutes of one hour."""

    hour: int  # since 1970
    short_rises: Counts  # within SHORT_HORIZON_MINUTES
    long_rises: Counts  # within LONG_HORIZON_MINUTES


class DemandHistory(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Demand history of one kind of GPU."""

    levels: tuple[tuple[int, int], ...] = ()  # (minute since 1970, requested GPUs), oldest first
    hours: tuple[HourlyRises, ...] = ()  # oldest first, each once


class Forecast(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Forecast rises, in GPUs above the current demand."""

    short_rise_count: int
    long_rise_count: int
    weeks_seen: int  # of this hour of the week


class FreeTarget(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Target of free or booting GPUs: below `min_count` nodes are bought, up to `target_count`."""

    min_count: int
    target_count: int


EMPTY_HISTORY = DemandHistory()


def add_sample(history: DemandHistory, minute: int, level_count: int) -> DemandHistory:
    """Return the history with one more sample. A minute that is not newer than the last one changes nothing."""
    levels = history.levels
    if levels and minute <= levels[-1][0]:
        return history
    hours = history.hours
    if levels and minute // _MINUTES_AN_HOUR > levels[-1][0] // _MINUTES_AN_HOUR:
        last_hour = hours[-1].hour if hours else -1
        ended = (_hourly_rises(number, levels) for number in _ended_hours(levels, minute) if number > last_hour)
        hours = (*hours, *(rises for rises in ended if rises is not None))[-HOURS_COUNT_MAX:]
    first = next((index for index, (at, _) in enumerate(levels) if at > minute - _LEVELS_MINUTES), len(levels))
    return DemandHistory(levels=(*levels[first:], (minute, level_count)), hours=hours)


def peak_count(history: DemandHistory) -> int:
    """Return the peak demand of the last PEAK_MINUTES sampled; 0 without a sample."""
    newest = history.levels[-1][0] if history.levels else 0
    return max((level for at, level in history.levels[-PEAK_MINUTES - 1 :] if at >= newest - PEAK_MINUTES), default=0)


def forecast_rises(hours: Iterable[HourlyRises], hour: int, policy: ForecastPolicy) -> Forecast | None:
    """Return the forecast of an hour; None if the lookback has no such hour of day."""
    first = hour - policy.lookback_hours
    of_day = [past for past in hours if first <= past.hour < hour and (hour - past.hour) % _HOURS_A_DAY == 0]
    if not of_day:
        return None
    of_week = [past for past in of_day if (hour - past.hour) % _HOURS_A_WEEK == 0]
    weight = policy.shrinkage_weeks_count if of_week else 1
    short = _shrunk([past.short_rises for past in of_week], [past.short_rises for past in of_day], weight)
    long = _shrunk([past.long_rises for past in of_week], [past.long_rises for past in of_day], weight)
    return Forecast(
        short_rise_count=_quantile(short, policy.short_rise_quantile_ratio),
        long_rise_count=_quantile(long, policy.long_rise_quantile_ratio),
        weeks_seen=len(of_week),
    )


def free_target(
    forecast: Forecast | None, level_count: int, peak: int, utilization_ratio_max: float = 1.0
) -> FreeTarget:
    """Return the target of free GPUs above the current demand; zero without a forecast. A purchase starts when a short
    rise would find too few, and then covers long rises: fewer, larger purchases. With them, forecast demand uses at
    most `utilization_ratio_max` of the GPUs."""
    if forecast is None:
        return FreeTarget(min_count=0, target_count=0)
    top = max(peak, level_count)
    rises = (forecast.short_rise_count, max(forecast.short_rise_count, forecast.long_rise_count))
    least, most = (_scaled_up(top + rise, utilization_ratio_max) - level_count for rise in rises)
    return FreeTarget(min_count=least, target_count=most)


def _scaled_up(count: int, ratio: float) -> int:
    """Return of how many this count is the share, rounded up."""
    return -(-count * _PARTS // round(ratio * _PARTS))


def score(history: DemandHistory, hour: int, policy: ForecastPolicy) -> Score | None:
    """Return the score of the forecast of this hour, made from the hours before it; None if there was none."""
    actual = next((past for past in reversed(history.hours) if past.hour == hour), None)
    # An hour is recorded once its rises are over, so the hour just before was not known yet.
    forecast = forecast_rises((past for past in history.hours if past.hour < hour - 1), hour, policy)
    if actual is None or forecast is None:
        return None
    foreseen = forecast.long_rise_count
    return Score(
        hour=hour,
        foreseen_count=foreseen,
        minutes_count=sum(minutes for _, minutes in actual.long_rises),
        kept_count=sum(minutes for rise, minutes in actual.long_rises if rise <= foreseen),
        missed_gpu_minutes=sum(minutes * (rise - foreseen) for rise, minutes in actual.long_rises if rise > foreseen),
        unused_gpu_minutes=sum(minutes * (foreseen - rise) for rise, minutes in actual.long_rises if rise < foreseen),
        rise_gpu_minutes=sum(minutes * rise for rise, minutes in actual.long_rises),
    )


def confidence_ratio(scores: Iterable[Score], hour: int, policy: ForecastPolicy) -> float | None:
    """Return the confidence of forecasts, 0 to 1; None: too few were scored. It falls when rises exceed the forecast
    more often than its quantile allows, and when the pinball loss exceeds that of a forecast of zero."""
    recent = [score for score in scores if hour - policy.score_hours <= score.hour <= hour]
    if len(recent) < _SCORED_HOURS_MIN:
        return None
    minutes = sum(score.minutes_count for score in recent)
    kept = sum(score.kept_count for score in recent)
    ratio = policy.long_rise_quantile_ratio
    coverage = 1.0 if kept >= ratio * minutes else kept / (ratio * minutes)
    missed = sum(score.missed_gpu_minutes for score in recent)
    loss = ratio * missed + (1 - ratio) * sum(score.unused_gpu_minutes for score in recent)
    loss_without = ratio * sum(score.rise_gpu_minutes for score in recent)
    benefit = 1.0 if loss <= loss_without else loss_without / loss
    return min(coverage, benefit)


# ---- one hour


def _ended_hours(levels: tuple[tuple[int, int], ...], minute: int) -> range:
    """Hours of the levels whose rises are complete at this minute."""
    return range(levels[0][0] // _MINUTES_AN_HOUR, (minute - LONG_HORIZON_MINUTES) // _MINUTES_AN_HOUR)


def _hourly_rises(number: int, levels: tuple[tuple[int, int], ...]) -> HourlyRises | None:
    known = dict(levels)
    minutes = [at for at, _ in levels if at // _MINUTES_AN_HOUR == number]
    if len(minutes) < _MINUTES_AN_HOUR * _SAMPLES_RATIO_MIN:
        return None
    short, long = _rises(minutes, known, SHORT_HORIZON_MINUTES), _rises(minutes, known, LONG_HORIZON_MINUTES)
    return HourlyRises(hour=number, short_rises=short, long_rises=long) if short and long else None


def _rises(minutes: Iterable[int], known: Mapping[int, int], horizon: int) -> Counts:
    counts: Counter[int] = Counter()
    for minute in minutes:
        later = [known[at] for at in range(minute + 1, minute + horizon + 1) if at in known]
        if len(later) >= horizon * _SAMPLES_RATIO_MIN:
            counts[_rounded_up(max(0, max(later) - known[minute]))] += 1
    return tuple(sorted(counts.items()))


def _rounded_up(rise: int) -> int:
    """Round up to four binary digits: exact up to 16, at most an eighth too high beyond."""
    step = 1 << max(0, rise.bit_length() - 4)
    return -(-rise // step) * step


# ---- quantiles


def _shrunk(of_week: Iterable[Counts], of_day: Iterable[Counts], weight: int) -> Counter[int]:
    """Minutes of the hour of week plus `weight` weeks of the hour of day, in equal parts."""
    week, day = _total(of_week), _total(of_day)
    size = day.total()
    counts: Counter[int] = Counter({rise: minutes * size for rise, minutes in week.items()})
    for rise, minutes in day.items():
        counts[rise] += weight * _MINUTES_AN_HOUR * minutes
    return counts


def _total(hours: Iterable[Counts]) -> Counter[int]:
    total: Counter[int] = Counter()
    for counts in hours:
        for rise, minutes in counts:
            total[rise] += minutes
    return total


def _quantile(counts: Counter[int], ratio: float) -> int:
    """Smallest rise that this share of the minutes does not exceed."""
    wanted = round(ratio * _PARTS) * counts.total()
    below = 0
    for rise in sorted(counts):
        below += counts[rise] * _PARTS
        if below >= wanted:
            return rise
    return 0
