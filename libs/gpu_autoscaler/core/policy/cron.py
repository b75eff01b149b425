"""Cron schedules of five fields: minute, hour, day of month, month, day of week (POSIX crontab, read 2026-11-21).

Time zones other than UTC, the default, use the time zone database of the machine.
"""

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Annotated
from zoneinfo import ZoneInfo

import msgspec

from gpu_autoscaler.core.next_change import note
from gpu_autoscaler.core.policy.ranges import Seconds, about

DURATION_SECONDS_MAX = 31 * 86_400.0

_DAY = timedelta(days=1)
# Maximum clock change of a time zone in this century (IANA time zone database).
_CLOCK_CHANGE_MAX = timedelta(hours=2)
_FIELDS = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of month", 1, 31, ()),
    ("month", 1, 12, ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")),
    ("day of week", 0, 7, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")),
)
_MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Start times in one time zone."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # 0 is Sunday
    is_any_day: bool  # the day of month is not restricted
    is_any_weekday: bool
    zone: tzinfo

    def starts_on(self, day: date) -> bool:
        """True if the schedule starts on this day. If both day fields are restricted, either is enough."""
        if day.month not in self.months:
            return False
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_day and by_weekday if self.is_any_day or self.is_any_weekday else by_day or by_weekday

    def last_start(self, as_of: datetime, since: datetime) -> datetime | None:
        """Return the last start up to `as_of`; None if there was none after `since`."""
        wall = as_of.astimezone(self.zone).replace(tzinfo=None)
        day, first = (
            (wall + _CLOCK_CHANGE_MAX).date(),
            (since.astimezone(self.zone).replace(tzinfo=None) - _CLOCK_CHANGE_MAX).date(),
        )
        while day >= first:
            if self.starts_on(day):
                for start in self.starts_of(day):
                    if start.replace(tzinfo=None) > wall + _CLOCK_CHANGE_MAX:
                        continue
                    at = start.astimezone(UTC)
                    if at <= as_of:
                        return at if at > since else None
            day -= _DAY
        return None

    def next_start(self, after: datetime) -> datetime:
        """Return the first start after this instant; without one within 31 days, the end of these."""
        return _next_start(self, after.replace(second=0, microsecond=0))

    def starts_of(self, day: date) -> Iterator[datetime]:
        """Times of the day in the schedule's zone, latest first.

        A nonexistent time moves to after the gap; of an ambiguous time the first one counts.
        """
        for hour in sorted(self.hours, reverse=True):
            for minute in sorted(self.minutes, reverse=True):
                yield datetime.combine(day, time(hour, minute), self.zone)


@lru_cache(64)
def _next_start(schedule: Schedule, minute: datetime) -> datetime:
    """Return the next start, the same for all instants of a minute: starts are at whole minutes."""
    last = minute + timedelta(seconds=DURATION_SECONDS_MAX)
    day = (minute.astimezone(schedule.zone).replace(tzinfo=None) - _CLOCK_CHANGE_MAX).date()
    while day <= (last + _DAY).date():
        if schedule.starts_on(day):
            # The clock may change within the day, so that starts are not in order.
            starts = (start.astimezone(UTC) for start in schedule.starts_of(day))
            if later := [start for start in starts if start > minute]:
                return min(*later, last)
        day += _DAY
    return last


@lru_cache(64)
def parse_schedule(text: str, zone: str = "UTC") -> Schedule:
    """Parse a schedule. Raises ValueError naming the invalid field or time zone."""
    fields = _MACROS.get(text.strip().lower(), text).split()
    if len(fields) != len(_FIELDS):
        raise ValueError(f"{text!r} has {len(fields)} fields; a schedule needs five, for example '0 22 * * mon-fri'")
    minutes, hours, days, months, weekdays = (
        _values(field, *spec) for field, spec in zip(fields, _FIELDS, strict=True)
    )
    return Schedule(
        minutes=minutes,
        hours=hours,
        days=days,
        months=months,
        weekdays=frozenset(day % 7 for day in weekdays),
        is_any_day=fields[2].startswith("*"),
        is_any_weekday=fields[4].startswith("*"),
        zone=_zone(zone),
    )


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError) as error:  # ZoneInfoNotFoundError is a KeyError, which is neither
        raise ValueError(f"invalid time zone {name!r}: {error}") from None
    except KeyError:
        raise ValueError(f"unknown time zone {name!r}; use a name such as 'Europe/Berlin'") from None


def _values(field: str, name: str, least: int, most: int, words: tuple[str, ...]) -> frozenset[int]:
    values: set[int] = set()
    for part in field.lower().split(","):
        span, slash, step_text = part.partition("/")
        first_text, dash, last_text = span.partition("-")
        step = _number(step_text, field, name, 1, most, ()) if slash else 1
        if span == "*":
            first, last = least, most
        else:
            first = _number(first_text, field, name, least, most, words)
            last = _number(last_text, field, name, least, most, words) if dash else most if slash else first
        if last < first:
            raise ValueError(f"{name} {field!r}: {first_text} is after {last_text}")
        values.update(range(first, last + 1, step))
    return frozenset(values)


def _number(text: str, field: str, name: str, least: int, most: int, words: tuple[str, ...]) -> int:
    if text in words:
        return words.index(text) + (1 if name == "month" else 0)
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise ValueError(f"{name} {field!r}: {text!r} is not within {least} to {most}")
    return int(text)


class Scheduled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the policy that is active always, or for a while after each start of its schedule."""

    schedule: Annotated[
        str | None,
        about("Cron schedule at which it becomes active; unset: always active.", "Karpenter, Disruption, Budgets"),
    ] = None
    duration_seconds: Annotated[
        Seconds | None,
        about("Active time after each start of the schedule, at most 31 days.", "Karpenter, Disruption, Budgets"),
    ] = None
    time_zone: Annotated[
        str, about("Time zone of the schedule, for example Europe/Berlin.", "IANA time zone database")
    ] = "UTC"

    def is_active(self, as_of: datetime, lead: timedelta = timedelta()) -> bool:
        """True if active at this instant or starting within `lead`. Only for an entry without violations."""
        if self.schedule is None or self.duration_seconds is None:
            return True
        duration = timedelta(seconds=self.duration_seconds)
        schedule = parse_schedule(self.schedule, self.time_zone)
        start = schedule.last_start(as_of + lead, as_of - duration)
        if start is None:
            note(as_of, schedule.next_start(as_of + lead) - lead)
        else:
            note(as_of, start + duration)
        return start is not None

    def violations(self) -> Iterator[str]:
        if (self.schedule is None) != (self.duration_seconds is None):
            yield "schedule and duration_seconds must be set together"
        if self.duration_seconds is not None and not 0 < self.duration_seconds <= DURATION_SECONDS_MAX:
            yield (
                f"duration_seconds: {self.duration_seconds:g} is out of range; use more than 0 and at most"
                f" {DURATION_SECONDS_MAX:g}"
            )
        if self.schedule is not None:
            try:
                parse_schedule(self.schedule, self.time_zone)
            except ValueError as error:
                yield f"schedule: {error}"
