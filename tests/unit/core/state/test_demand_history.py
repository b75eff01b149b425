"""What is foreseen of demand: remembered by the hour, shrunk, scored, and silent when it is wrong."""

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


def watched(level: Callable[[int], int], *, hours: int, first: int = MONDAY) -> DemandHistory:
    """The history of so many hours in which this many GPUs were asked for at each minute."""
    history = EMPTY_HISTORY
    for minute in range(first * 60, (first + hours) * 60):
        history = add_sample(history, minute, level(minute))
    return history


def jumps_at_nine(minute: int) -> int:
    """Forty more from half past nine to five, each day."""
    return 50 if 9 * 60 + 30 <= minute % 1440 < 17 * 60 else 10


def test_a_rise_of_each_day_is_foreseen_at_its_hour() -> None:
    """Forty come at half past nine: reckoned with at nine, and not at three in the night."""
    history = watched(jumps_at_nine, hours=72)
    nine = forecast_rises(history.hours, MONDAY + 72 + 9, POLICY)
    three = forecast_rises(history.hours, MONDAY + 72 + 3, POLICY)

    assert nine == Forecast(short_rise_count=0, long_rise_count=40, weeks_seen=0)
    assert three == Forecast(short_rise_count=0, long_rise_count=0, weeks_seen=0)


def test_weeks_that_were_seen_outweigh_other_days() -> None:
    """Demand rises at nine on Mondays alone: after three weeks Tuesday's nine o'clock is foreseen as quiet."""

    def mondays(minute: int) -> int:
        return jumps_at_nine(minute) if (minute // 1440 - 4) % 7 == 0 else 10

    history = watched(mondays, hours=3 * HOURS_A_WEEK)
    monday = forecast_rises(history.hours, MONDAY + 3 * HOURS_A_WEEK + 9, POLICY)
    tuesday = forecast_rises(history.hours, MONDAY + 3 * HOURS_A_WEEK + 24 + 9, POLICY)

    assert monday is not None
    assert tuesday is not None
    assert (monday.long_rise_count, tuesday.long_rise_count) == (40, 0)
    assert monday.weeks_seen == 3


def test_nothing_is_foreseen_of_an_hour_never_seen() -> None:
    """Unknown is not zero: without this hour of the day in the lookback there is no forecast."""
    history = watched(jumps_at_nine, hours=5)

    assert forecast_rises(history.hours, MONDAY + 24 + 12, POLICY) is None
    assert forecast_rises(history.hours, MONDAY + 24 * 60, POLICY) is None


def test_a_minute_that_is_told_twice_counts_once() -> None:
    """A repeat, and what is older than the newest minute, change nothing."""
    history = watched(jumps_at_nine, hours=4)

    for minute, level in history.levels[-30:]:
        assert add_sample(history, minute, level + 5) is history


def test_an_hour_that_was_hardly_watched_teaches_nothing() -> None:
    """A watch with holes is no quiet hour."""
    history = EMPTY_HISTORY
    for minute in range(MONDAY * 60, (MONDAY + 6) * 60):
        if minute % 60 < 20:
            history = add_sample(history, minute, 10)

    assert history.hours == ()


@pytest.mark.parametrize("seed", range(5))
def test_memory_is_bounded_and_rises_are_rounded_up_by_an_eighth_at_most(seed: int) -> None:
    """However demand moves: some hours of samples, each hour once, and no rise told too low or far too high."""
    random_source = random.Random(seed)  # noqa: S311 - no secret: any numbers do
    levels = [random_source.randrange(500) for _ in range(12 * 60)]
    history = watched(lambda minute: levels[minute - MONDAY * 60], hours=12)

    assert len(history.levels) <= 150
    assert [each.hour for each in history.hours] == list(range(MONDAY, MONDAY + 10))
    for each in history.hours:
        for place in range(60):
            start = (each.hour - MONDAY) * 60 + place
            rise = max(0, max(levels[start + 1 : start + 31]) - levels[start])
            told = min(count for count, _ in each.ahead if count >= rise)
            assert told <= rise + rise // 8 + 1


def test_no_forecast_asks_for_nothing_and_one_asks_in_lots() -> None:
    """Buying begins at the rise of minutes and covers that of the half hour; a dip of a minute is no room."""
    foreseen = Forecast(short_rise_count=2, long_rise_count=9, weeks_seen=1)
    dipped = add_sample(add_sample(EMPTY_HISTORY, 1, 30), 2, 27)

    assert free_target(None, 27, peak_count(dipped)).target_count == 0
    wanted = free_target(foreseen, 27, peak_count(dipped))
    assert (wanted.min_count, wanted.target_count) == (5, 12)


def scores(hours: int, one: Score) -> list[Score]:
    """The same score for so many hours."""
    return [
        Score(**{name: getattr(one, name) for name in one.__struct_fields__} | {"hour": each}) for each in range(hours)
    ]


def test_a_forecast_that_holds_is_trusted_and_one_that_is_passed_is_not() -> None:
    """Confidence is what came of earlier forecasts: rises beyond it for days silence it."""
    history = watched(jumps_at_nine, hours=6 * 24)
    told = [found for each in history.hours if (found := score(history, each.hour, POLICY)) is not None]
    passed = Score(
        hour=0, foreseen_count=2, minutes_count=60, kept_count=20, missed_gpu_minutes=400, unused_gpu_minutes=10,
        rise_gpu_minutes=450,
    )  # fmt: skip

    trusted = confidence_ratio(told, MONDAY + 6 * 24, POLICY)
    assert trusted is not None
    assert trusted >= POLICY.confidence_ratio_min
    doubted = confidence_ratio(scores(30, passed), 30, POLICY) or 0.0
    assert doubted == pytest.approx(20 / 60 / POLICY.long_rise_quantile_ratio)
    assert doubted < POLICY.confidence_ratio_min


def test_a_forecast_of_what_never_comes_is_not_trusted_either() -> None:
    """Never passed, but its room stays empty: worse than no forecast at all."""
    idle = Score(
        hour=0, foreseen_count=40, minutes_count=60, kept_count=60, missed_gpu_minutes=0, unused_gpu_minutes=2400,
        rise_gpu_minutes=60,
    )  # fmt: skip
    confidence = confidence_ratio(scores(30, idle), 30, POLICY)

    assert confidence is not None
    assert confidence < 0.1


def test_confidence_is_unknown_before_a_day_of_scores() -> None:
    """A forecast that was never tried is not trusted, and not called wrong."""
    right = Score(
        hour=0, foreseen_count=0, minutes_count=60, kept_count=60, missed_gpu_minutes=0, unused_gpu_minutes=0,
        rise_gpu_minutes=0,
    )  # fmt: skip

    assert confidence_ratio(scores(23, right), 23, POLICY) is None
    assert confidence_ratio(scores(24, right), 24, POLICY) == 1.0
    assert confidence_ratio(scores(24, right), 24 * 9, POLICY) is None
