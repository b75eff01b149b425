"""Demand history: hourly rises, shrinkage, forecast, confidence."""

import random
from collections.abc import Callable

import pytest

from gpu_autoscaler.core.policy.prewarm_settings import ForecastPolicy
from gpu_autoscaler.core.state.demand_history import (
    EMPTY_HISTORY,
    DemandHistory,
    Forecast,
    add_sample,
    confidence_ratio,
    forecast_rises,
    free_target,
    peak_count,
    score,
)
from gpu_autoscaler.model.forecasts import Score

POLICY = ForecastPolicy(is_on=True, lookback_hours=28 * 24)
MONDAY = 24 * 4  # 1970-01-01 was a Thursday
HOURS_A_WEEK = 168


def history_of(level: Callable[[int], int], *, hours: int, first: int = MONDAY) -> DemandHistory:
    """The history of this many hours with this demand per minute."""
    history = EMPTY_HISTORY
    for minute in range(first * 60, (first + hours) * 60):
        history = add_sample(history, minute, level(minute))
    return history


def rise_at_nine(minute: int) -> int:
    """Forty more GPUs from 09:30 to 17:00, every day."""
    return 50 if 9 * 60 + 30 <= minute % 1440 < 17 * 60 else 10


def test_a_daily_rise_is_forecast_at_its_hour() -> None:
    """A rise at 09:30 is forecast at 09:00 and not at 03:00."""
    history = history_of(rise_at_nine, hours=72)
    nine = forecast_rises(history.hours, MONDAY + 72 + 9, POLICY)
    three = forecast_rises(history.hours, MONDAY + 72 + 3, POLICY)

    assert nine == Forecast(short_rise_count=0, long_rise_count=40, weeks_seen=0)
    assert three == Forecast(short_rise_count=0, long_rise_count=0, weeks_seen=0)


def test_hour_of_week_outweighs_hour_of_day() -> None:
    """Demand rises on Mondays only: after three weeks Tuesday is forecast as quiet."""

    def mondays(minute: int) -> int:
        return rise_at_nine(minute) if (minute // 1440 - 4) % 7 == 0 else 10

    history = history_of(mondays, hours=3 * HOURS_A_WEEK)
    monday = forecast_rises(history.hours, MONDAY + 3 * HOURS_A_WEEK + 9, POLICY)
    tuesday = forecast_rises(history.hours, MONDAY + 3 * HOURS_A_WEEK + 24 + 9, POLICY)

    assert monday is not None
    assert tuesday is not None
    assert (monday.long_rise_count, tuesday.long_rise_count) == (40, 0)
    assert monday.weeks_seen == 3


def test_an_hour_without_history_has_no_forecast() -> None:
    """Unknown is not zero."""
    history = history_of(rise_at_nine, hours=5)

    assert forecast_rises(history.hours, MONDAY + 24 + 12, POLICY) is None
    assert forecast_rises(history.hours, MONDAY + 24 * 60, POLICY) is None


def test_a_repeated_sample_counts_once() -> None:
    """Repeated and older samples change nothing."""
    history = history_of(rise_at_nine, hours=4)

    for minute, level in history.levels[-30:]:
        assert add_sample(history, minute, level + 5) is history


def test_an_incomplete_hour_is_not_recorded() -> None:
    """Missing samples are not low demand."""
    history = EMPTY_HISTORY
    for minute in range(MONDAY * 60, (MONDAY + 6) * 60):
        if minute % 60 < 20:
            history = add_sample(history, minute, 10)

    assert history.hours == ()


@pytest.mark.parametrize("seed", range(5))
def test_history_is_bounded_and_rises_are_rounded_up(seed: int) -> None:
    """Each hour once, and rises rounded up by at most an eighth."""
    random_source = random.Random(seed)  # noqa: S311 - no secret: any numbers do
    levels = [random_source.randrange(500) for _ in range(12 * 60)]
    history = history_of(lambda minute: levels[minute - MONDAY * 60], hours=12)

    assert len(history.levels) <= 150
    assert [each.hour for each in history.hours] == list(range(MONDAY, MONDAY + 10))
    for each in history.hours:
        for place in range(60):
            start = (each.hour - MONDAY) * 60 + place
            rise = max(0, max(levels[start + 1 : start + 31]) - levels[start])
            event = min(count for count, _ in each.long_rises if count >= rise)
            assert event <= rise + rise // 8 + 1


def test_the_target_of_free_gpus() -> None:
    """A purchase starts at the short rise and covers the long one; a short dip is not free capacity."""
    foreseen = Forecast(short_rise_count=2, long_rise_count=9, weeks_seen=1)
    dipped = add_sample(add_sample(EMPTY_HISTORY, 1, 30), 2, 27)

    assert free_target(None, 27, peak_count(dipped)).target_count == 0
    wanted = free_target(foreseen, 27, peak_count(dipped))
    assert (wanted.min_count, wanted.target_count) == (5, 12)


def test_a_higher_threshold_of_utilization_prepares_less() -> None:
    """39 GPUs of forecast demand are half of 78, 48 more than there are. At 1 exactly the forecast is prepared."""
    foreseen = Forecast(short_rise_count=2, long_rise_count=9, weeks_seen=1)
    targets = [free_target(foreseen, 30, 30, threshold) for threshold in (0.5, 0.7, 0.9, 1.0)]

    assert [(target.min_count, target.target_count) for target in targets] == [(34, 48), (16, 26), (6, 14), (2, 9)]
    assert free_target(None, 30, 30, 0.5).target_count == 0


def scores(hours: int, one: Score) -> list[Score]:
    """The same score for this many hours."""
    return [
        Score(**{name: getattr(one, name) for name in one.__struct_fields__} | {"hour": each}) for each in range(hours)
    ]


def test_confidence_falls_with_exceeded_forecasts() -> None:
    """Rises above the forecast for days."""
    history = history_of(rise_at_nine, hours=6 * 24)
    event = [result for each in history.hours if (result := score(history, each.hour, POLICY)) is not None]
    passed = Score(
        hour=0, foreseen_count=2, minutes_count=60, kept_count=20, missed_gpu_minutes=400, unused_gpu_minutes=10,
        rise_gpu_minutes=450,
    )  # fmt: skip

    trusted = confidence_ratio(event, MONDAY + 6 * 24, POLICY)
    assert trusted is not None
    assert trusted >= POLICY.confidence_ratio_min
    doubted = confidence_ratio(scores(30, passed), 30, POLICY) or 0.0
    assert doubted == pytest.approx(20 / 60 / POLICY.long_rise_quantile_ratio)
    assert doubted < POLICY.confidence_ratio_min


def test_confidence_falls_with_unused_forecasts() -> None:
    """A forecast that is never exceeded but never used is worse than none."""
    idle = Score(
        hour=0, foreseen_count=40, minutes_count=60, kept_count=60, missed_gpu_minutes=0, unused_gpu_minutes=2400,
        rise_gpu_minutes=60,
    )  # fmt: skip
    confidence = confidence_ratio(scores(30, idle), 30, POLICY)

    assert confidence is not None
    assert confidence < 0.1


def test_confidence_is_unknown_before_a_day_of_scores() -> None:
    """An unscored forecast is neither trusted nor wrong."""
    right = Score(
        hour=0, foreseen_count=0, minutes_count=60, kept_count=60, missed_gpu_minutes=0, unused_gpu_minutes=0,
        rise_gpu_minutes=0,
    )  # fmt: skip

    assert confidence_ratio(scores(23, right), 23, POLICY) is None
    assert confidence_ratio(scores(24, right), 24, POLICY) == 1.0
    assert confidence_ratio(scores(24, right), 24 * 9, POLICY) is None
