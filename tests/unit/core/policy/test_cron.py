"""Cron schedules of five fields, in UTC and across clock changes."""

from datetime import UTC, datetime, timedelta

import pytest

from gpu_autoscaler.core.policy.cron import parse_schedule

DAY = timedelta(days=1)


def at(text: str) -> datetime:
    """An instant in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "as_of", "begun"),
    [
        ("0 22 * * mon-fri", "2026-11-20 23:10", "2026-11-20 22:00"),  # a Friday
        ("0 22 * * mon-fri", "2026-11-22 23:10", "2026-11-20 22:00"),  # on Sunday it is Friday's
        ("*/20 8-9 * * *", "2026-11-20 09:39:59", "2026-11-20 09:20"),
        ("30 6 1 * mon", "2026-11-16 07:00", "2026-11-16 06:30"),  # two kinds of day: one is enough
        ("30 6 1 * mon", "2026-11-05 07:00", "2026-11-02 06:30"),
        ("@weekly", "2026-11-20 07:00", "2026-11-15 00:00"),
        ("0 0 * * 7", "2026-11-20 07:00", "2026-11-15 00:00"),
        ("5/25 * * * *", "2026-11-20 07:29", "2026-11-20 07:05"),
        ("0 12 29 feb *", "2028-03-01 00:00", "2028-02-29 12:00"),
    ],
)
def test_the_last_start_is_returned(text: str, as_of: str, begun: str) -> None:
    """The last matching minute up to the instant."""
    assert parse_schedule(text).last_start(at(as_of), at(as_of) - 31 * DAY) == at(begun)


def test_a_start_before_the_window_is_not_returned() -> None:
    """No start within the window."""
    assert parse_schedule("0 22 * * fri").last_start(at("2026-11-21 06:00"), at("2026-11-20 22:00")) is None
    assert parse_schedule("0 22 * * fri").last_start(at("2026-11-21 05:59"), at("2026-11-20 21:59")) is not None


@pytest.mark.parametrize(
    ("text", "after", "next_at"),
    [
        ("0 22 * * mon-fri", "2026-11-20 23:10", "2026-11-23 22:00"),  # on Friday night it is Monday's
        ("0 22 * * mon-fri", "2026-11-20 22:00", "2026-11-23 22:00"),  # not the one that is now
        ("0 22 * * mon-fri", "2026-11-20 21:59:59.9", "2026-11-20 22:00"),
        ("* * * * *", "2026-11-20 23:59:30", "2026-11-21 00:00"),
        ("0 12 29 feb *", "2026-11-20 07:10:30", "2026-12-21 07:10"),  # none within 31 days
    ],
)
def test_the_next_start_is_returned(text: str, after: str, next_at: str) -> None:
    """The first matching minute after the instant."""
    assert parse_schedule(text).next_start(at(after)) == at(next_at)


def test_no_start_lies_between_an_instant_and_the_next_start() -> None:
    """Throughout a year with clock changes: the last start up to the next one is that one."""
    for zone in ("Europe/Berlin", "Australia/Lord_Howe"):
        schedule = parse_schedule("30 2,3 * * sun", zone)
        after = at("2026-01-01 00:10")
        while after < at("2027-01-01 00:00"):
            ahead = schedule.next_start(after)
            assert ahead > after
            assert schedule.last_start(ahead, after) == ahead
            assert schedule.last_start(ahead - timedelta(microseconds=1), after) is None
            after += timedelta(hours=2)


def test_a_time_zone_is_applied() -> None:
    """22:00 in Berlin is 20:00 UTC in summer and 21:00 in winter."""
    night = parse_schedule("0 22 * * *", "Europe/Berlin")

    assert night.last_start(at("2026-07-01 21:59"), at("2026-06-30 21:59")) == at("2026-07-01 20:00")
    assert night.last_start(at("2026-12-01 21:59"), at("2026-11-30 21:59")) == at("2026-12-01 21:00")


def test_a_skipped_or_repeated_time_starts_once() -> None:
    """02:30 is skipped in March and repeated in October (Berlin, 2026)."""
    early = parse_schedule("30 2 * * *", "Europe/Berlin")

    assert early.last_start(at("2026-03-29 05:00"), at("2026-03-28 05:00")) == at("2026-03-29 01:30")
    assert early.last_start(at("2026-10-25 05:00"), at("2026-10-24 05:00")) == at("2026-10-25 00:30")
    assert early.last_start(at("2026-10-25 01:30"), at("2026-10-25 00:30")) is None
    assert early.next_start(at("2026-03-28 12:00")) == at("2026-03-29 01:30")
    assert early.next_start(at("2026-10-24 12:00")) == at("2026-10-25 00:30")
    assert early.next_start(at("2026-10-25 00:30:10")) == at("2026-10-26 01:30")


@pytest.mark.parametrize(
    ("text", "zone", "says"),
    [
        ("0 22 * *", "UTC", "has 4 fields"),
        ("60 * * * *", "UTC", "'60' is not within 0 to 59"),
        ("* * * * fri-mon", "UTC", "fri is after mon"),
        ("0 -1 * * *", "UTC", "hour"),
        ("*/0 * * * *", "UTC", "'0' is not within 1 to 59"),
        ("0 22 * * *", "Europe/Nowhere", "unknown time zone"),
        ("0 22 * * *", "../../etc/passwd", "time zone"),
    ],
)
def test_an_invalid_schedule_is_rejected(text: str, zone: str, says: str) -> None:
    """The error names the field and its range."""
    with pytest.raises(ValueError, match=says):
        parse_schedule(text, zone)
