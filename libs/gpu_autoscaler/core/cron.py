"""Schedules of five fields (minute, hour, day of month, month, day of week) as arithmetic on instants.

What a schedule means in a time zone follows from the machine's time zone rules; UTC, the default, needs none, and is
the same everywhere and always. Source of the grammar: crontab(5), POSIX crontab (read 2026-11-21).
"""

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

import msgspec

_DAY = timedelta(days=1)
# Clocks are put forward and back by at most this (IANA time zone database, in this century).
_SHIFT = timedelta(hours=2)
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
    """The instants at which something begins, in one time zone."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # 0 is Sunday
    is_any_day: bool  # the day of month is not restricted
    is_any_weekday: bool
    zone: tzinfo

    def starts_on(self, day: date) -> bool:
        """True when it begins at some time of this day; two restricted kinds of day hold one for the other."""
        if day.month not in self.months:
            return False
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_day and by_weekday if self.is_any_day or self.is_any_weekday else by_day or by_weekday

    def last_start(self, as_of: datetime, since: datetime) -> datetime | None:
        """Return the last beginning up to `as_of`; None where there was none after `since`."""
        wall = as_of.astimezone(self.zone).replace(tzinfo=None)
        day, first = (wall + _SHIFT).date(), (since.astimezone(self.zone).replace(tzinfo=None) - _SHIFT).date()
        while day >= first:
            if self.starts_on(day):
                for begins in self._beginnings(day, not_after=wall + _SHIFT):
                    # A time that does not exist is moved to after the gap; of two the first one counts.
                    at = begins.replace(tzinfo=self.zone).astimezone(UTC)
                    if at <= as_of:
                        return at if at > since else None
            day -= _DAY
        return None

    def _beginnings(self, day: date, *, not_after: datetime) -> Iterator[datetime]:
        """Wall times of the day, the last first."""
        for hour in sorted(self.hours, reverse=True):
            for minute in sorted(self.minutes, reverse=True):
                at = datetime.combine(day, time(hour, minute))
                if at <= not_after:
                    yield at


@lru_cache(64)
def schedule(text: str, zone: str = "UTC") -> Schedule:
    """Return what the text means. Raises ValueError naming the field, or the zone, that cannot be read."""
    fields = _MACROS.get(text.strip().lower(), text).split()
    if len(fields) != len(_FIELDS):
        raise ValueError(f"{text!r} has {len(fields)} fields; a schedule has five, as in '0 22 * * mon-fri'")
    minutes, hours, days, months, weekdays = (
        _values(field, *described) for field, described in zip(fields, _FIELDS, strict=True)
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
        raise ValueError(f"time zone {name!r} cannot be read: {error}") from None
    except KeyError:
        raise ValueError(f"there is no time zone {name!r}; zones are named as in 'Europe/Berlin'") from None


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
        raise ValueError(f"{name} {field!r}: {text!r} is not {least} to {most}")
    return int(text)
