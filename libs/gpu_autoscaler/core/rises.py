"""How much more is wanted soon: remembered by the hour, foreseen by quantiles, scored by what came.

Demand is a count of GPUs, sampled each minute. What is remembered of a minute is its rise: how far demand went above it
within the next minutes. Rises repeat by the hour of the week where levels drift, so they are what is foreseen. All in
whole numbers: equal samples give equal forecasts on every machine.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from gpu_autoscaler.core.policies.ahead import ForecastPolicy
from gpu_autoscaler.model.forecasts import Score

SHORT_HORIZON_MINUTES = 5  # about what a GPU node takes to come (S167)
LONG_HORIZON_MINUTES = 30  # how far ahead capacity is prepared (S48, S131)
PEAK_MINUTES = 5  # demand that fell back for so long only is still reckoned with
HOURS_COUNT_MAX = 56 * 24  # the longest lookback that a policy may ask for
_LEVELS_MINUTES = 120 + LONG_HORIZON_MINUTES  # samples that are kept one by one
_HOURS_A_DAY, _HOURS_A_WEEK, _MINUTES_AN_HOUR = 24, 168, 60
_PARTS = 1_000_000  # ratios are compared in whole parts
# A share of an hour's samples and of a horizon that must be there; of a watch with holes nothing is learned.
_SAMPLES_RATIO_MIN = 0.5
_SCORED_HOURS_MIN = 24  # a day of scores before any confidence

Counts = tuple[tuple[int, int], ...]  # (rise in GPUs, minutes), ascending


class HourlyRises(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The rises of one hour's minutes."""

    hour: int  # since 1970
    soon: Counts  # within SHORT_HORIZON_MINUTES
    ahead: Counts  # within LONG_HORIZON_MINUTES


class DemandHistory(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What is remembered of the demand for one kind of GPU."""

    levels: tuple[tuple[int, int], ...] = ()  # (minute since 1970, GPUs asked for), oldest first
    hours: tuple[HourlyRises, ...] = ()  # oldest first, each once


class Forecast(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How much more is to be reckoned with, in GPUs above the demand of now."""

    short_rise_count: int
    long_rise_count: int
    weeks_seen: int  # of this hour of the week


class FreeTarget(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How many GPUs are to be free, or on their way: below `min_count` some are bought, up to `target_count`."""

    min_count: int
    target_count: int


EMPTY_HISTORY = DemandHistory()


def sampled(history: DemandHistory, minute: int, level_count: int) -> DemandHistory:
    """Return the history with one more minute. A minute that is not newer than the last one changes nothing."""
    levels = history.levels
    if levels and minute <= levels[-1][0]:
        return history
    hours = history.hours
    if levels and minute // _MINUTES_AN_HOUR > levels[-1][0] // _MINUTES_AN_HOUR:
        after = hours[-1].hour if hours else -1
        ended = (_hour_of_demand(number, levels) for number in _ended_hours(levels, minute) if number > after)
        hours = (*hours, *(each for each in ended if each is not None))[-HOURS_COUNT_MAX:]
    first = next((place for place, (at, _) in enumerate(levels) if at > minute - _LEVELS_MINUTES), len(levels))
    return DemandHistory(levels=(*levels[first:], (minute, level_count)), hours=hours)


def peak_count(history: DemandHistory) -> int:
    """The most GPUs asked for in the last PEAK_MINUTES that were sampled; none without a sample."""
    newest = history.levels[-1][0] if history.levels else 0
    return max((level for at, level in history.levels[-PEAK_MINUTES - 1 :] if at >= newest - PEAK_MINUTES), default=0)


def forecast_rises(hours: Iterable[HourlyRises], hour: int, policy: ForecastPolicy) -> Forecast | None:
    """Return the forecast for an hour; None where this hour of the day was never seen within the lookback."""
    first = hour - policy.lookback_hours
    of_day = [each for each in hours if first <= each.hour < hour and (hour - each.hour) % _HOURS_A_DAY == 0]
    if not of_day:
        return None
    of_week = [each for each in of_day if (hour - each.hour) % _HOURS_A_WEEK == 0]
    weight = policy.shrinkage_weeks_count if of_week else 1
    soon = _mixed([each.soon for each in of_week], [each.soon for each in of_day], weight)
    ahead = _mixed([each.ahead for each in of_week], [each.ahead for each in of_day], weight)
    return Forecast(
        short_rise_count=_quantile(soon, policy.short_rise_quantile_ratio),
        long_rise_count=_quantile(ahead, policy.long_rise_quantile_ratio),
        weeks_seen=len(of_week),
    )


def free_target(forecast: Forecast | None, level_count: int, peak: int) -> FreeTarget:
    """Return how many free GPUs the forecast asks for above the demand of now; none where there is no forecast.

    Buying begins when a rise within minutes would find too few, and then covers the rises of the half hour: fewer and
    larger purchases than one for each minute's forecast.
    """
    if forecast is None:
        return FreeTarget(min_count=0, target_count=0)
    dip = max(0, peak - level_count)
    least = dip + forecast.short_rise_count
    return FreeTarget(min_count=least, target_count=max(least, dip + forecast.long_rise_count))


def score(history: DemandHistory, hour: int, policy: ForecastPolicy) -> Score | None:
    """Return how right the forecast for this hour was, made of the hours before it; None where there was none."""
    came = next((each for each in reversed(history.hours) if each.hour == hour), None)
    # An hour is remembered only when its rises are over, so those just before it were not known yet.
    made = forecast_rises((each for each in history.hours if each.hour < hour - 1), hour, policy)
    if came is None or made is None:
        return None
    foreseen = made.long_rise_count
    return Score(
        hour=hour,
        foreseen_count=foreseen,
        minutes_count=sum(minutes for _, minutes in came.ahead),
        kept_count=sum(minutes for rise, minutes in came.ahead if rise <= foreseen),
        missed_gpu_minutes=sum(minutes * (rise - foreseen) for rise, minutes in came.ahead if rise > foreseen),
        unused_gpu_minutes=sum(minutes * (foreseen - rise) for rise, minutes in came.ahead if rise < foreseen),
        rise_gpu_minutes=sum(minutes * rise for rise, minutes in came.ahead),
    )


def confidence_ratio(scores: Iterable[Score], hour: int, policy: ForecastPolicy) -> float | None:
    """Return how far forecasts are to be trusted, 0 to 1; None: too few were scored.

    It falls when rises pass the forecast more often than its quantile allows, and when it loses more (missed and
    unused, weighed as its quantile weighs them) than foreseeing nothing would have.
    """
    recent = [each for each in scores if hour - policy.score_hours <= each.hour <= hour]
    if len(recent) < _SCORED_HOURS_MIN:
        return None
    minutes = sum(each.minutes_count for each in recent)
    kept = sum(each.kept_count for each in recent)
    ratio = policy.long_rise_quantile_ratio
    is_kept = 1.0 if kept >= ratio * minutes else kept / (ratio * minutes)
    missed = sum(each.missed_gpu_minutes for each in recent)
    unused = sum(each.unused_gpu_minutes for each in recent)
    lost = ratio * missed + (1 - ratio) * unused
    lost_without = ratio * sum(each.rise_gpu_minutes for each in recent)
    is_worth = 1.0 if lost <= lost_without else lost_without / lost
    return min(is_kept, is_worth)


# ---- one hour


def _ended_hours(levels: tuple[tuple[int, int], ...], minute: int) -> range:
    """Hours among the levels whose rises are over by this minute."""
    first = levels[0][0] // _MINUTES_AN_HOUR
    return range(first, (minute - LONG_HORIZON_MINUTES) // _MINUTES_AN_HOUR)


def _hour_of_demand(number: int, levels: tuple[tuple[int, int], ...]) -> HourlyRises | None:
    """The hour's rises; None where too little of it was sampled."""
    known = dict(levels)
    minutes = [at for at, _ in levels if at // _MINUTES_AN_HOUR == number]
    if len(minutes) < _MINUTES_AN_HOUR * _SAMPLES_RATIO_MIN:
        return None
    soon, ahead = _rises(minutes, known, SHORT_HORIZON_MINUTES), _rises(minutes, known, LONG_HORIZON_MINUTES)
    return HourlyRises(hour=number, soon=soon, ahead=ahead) if soon and ahead else None


def _rises(minutes: Iterable[int], known: Mapping[int, int], horizon: int) -> Counts:
    counts: Counter[int] = Counter()
    for minute in minutes:
        later = [known[at] for at in range(minute + 1, minute + horizon + 1) if at in known]
        if len(later) >= horizon * _SAMPLES_RATIO_MIN:
            counts[_rounded_up(max(0, max(later) - known[minute]))] += 1
    return tuple(sorted(counts.items()))


def _rounded_up(rise: int) -> int:
    """Four binary digits of it, rounded up: exact to 16, and an eighth too high at most beyond."""
    step = 1 << max(0, rise.bit_length() - 4)
    return -(-rise // step) * step


# ---- quantiles


def _mixed(of_week: Iterable[Counts], of_day: Iterable[Counts], weight: int) -> Counter[int]:
    """Minutes of the hour of week, with `weight` weeks' worth of the hour of day added; in parts of equal size."""
    week, day = _added(of_week), _added(of_day)
    size = day.total()
    mixed: Counter[int] = Counter({rise: minutes * size for rise, minutes in week.items()})
    for rise, minutes in day.items():
        mixed[rise] += weight * _MINUTES_AN_HOUR * minutes
    return mixed


def _added(many: Iterable[Counts]) -> Counter[int]:
    total: Counter[int] = Counter()
    for counts in many:
        for rise, minutes in counts:
            total[rise] += minutes
    return total


def _quantile(counts: Counter[int], ratio: float) -> int:
    """The least rise that this share of the minutes does not pass."""
    wanted = round(ratio * _PARTS) * counts.total()
    below = 0
    for rise in sorted(counts):
        below += counts[rise] * _PARTS
        if below >= wanted:
            return rise
    return 0
