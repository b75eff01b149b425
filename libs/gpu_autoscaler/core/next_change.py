"""When a plan could change although no fact arrives: noted by the instant of the plan where it is compared.

The caller plans with a `TrackedInstant` and reads `next_change_at` afterwards; with a plain datetime nothing is noted.
An instant is noted by a comparison; a duration by `has_lasted` and `has_lasted_longer`; a calendar unit by `note`.
What moves on with every instant (the seconds in a reason, the cost of lost work) is noted only where it decides.
"""

from datetime import UTC, datetime, timedelta, tzinfo
from functools import cached_property

_LAST = datetime.max.replace(tzinfo=UTC) - timedelta(days=2)  # nothing changes after it
_NEXT = timedelta(microseconds=1)
_SECONDS_MAX = 100.0 * 365 * 86_400  # a longer duration never passes


class TrackedInstant(datetime):
    """An instant that notes the next one at which a comparison with it changes.

    Arithmetic returns plain datetimes: no decision and no fact holds a tracked instant.
    """

    next_change_at: datetime | None = None  # None: time alone changes nothing

    @classmethod
    def of(cls, at: datetime) -> "TrackedInstant":
        """Return the instant; nothing is noted yet."""
        return cls.combine(at.date(), at.timetz())

    @cached_property
    def plain(self) -> datetime:
        """The same instant, which notes nothing."""
        return datetime.combine(self.date(), self.timetz())

    def note(self, at: datetime) -> None:
        """Note that something changes at this instant; right after this one if it is equal; nothing if it is past."""
        known = self.next_change_at
        if (known is not None and datetime.__ge__(at, known)) or datetime.__gt__(self, at) or at > _LAST:
            return
        ahead = max(at, self.plain + _NEXT)
        if known is None or ahead < known:
            self.next_change_at = ahead

    # Compared with instants only, and sums are plain: narrower than what `datetime` declares.

    def __lt__(self, other: datetime) -> bool:  # type: ignore[override]
        is_before = datetime.__lt__(self, other)
        if is_before:
            self.note(other)
        return is_before

    def __le__(self, other: datetime) -> bool:  # type: ignore[override]
        self.note(other)
        return datetime.__le__(self, other)

    def __gt__(self, other: datetime) -> bool:  # type: ignore[override]
        return not self <= other

    def __ge__(self, other: datetime) -> bool:  # type: ignore[override]
        return not self < other

    def __add__(self, other: timedelta) -> datetime:  # type: ignore[override]
        return self.plain + other

    def __sub__(self, other: datetime | timedelta) -> datetime | timedelta:  # type: ignore[override]
        return self.plain - other

    def __rsub__(self, other: datetime) -> timedelta:
        return other - self.plain

    def astimezone(self, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        """Return a plain datetime in the time zone."""
        return self.plain.astimezone(tz)


def plain(as_of: datetime) -> datetime:
    """Return the instant for a decision or a fact, which notes nothing."""
    return as_of.plain if isinstance(as_of, TrackedInstant) else as_of


def note(as_of: datetime, at: datetime) -> None:
    """Note that something derived from `as_of` changes at this instant."""
    if isinstance(as_of, TrackedInstant):
        as_of.note(at)


def note_always(as_of: datetime) -> None:
    """Note that something that decides moves on with every instant."""
    note(as_of, as_of)


def note_whole(as_of: datetime, seconds: int) -> None:
    """Note the end of the present span of this many seconds since 1970 (minute, hour)."""
    if isinstance(as_of, TrackedInstant):
        number = int(as_of.timestamp()) // seconds
        as_of.note(datetime.fromtimestamp((number + 1) * seconds, UTC))


def start_of_span(as_of: datetime, seconds: int) -> datetime:
    """Return the start of the present span of this many seconds since 1970, and note its end."""
    note_whole(as_of, seconds)
    return datetime.fromtimestamp(int(as_of.timestamp()) // seconds * seconds, UTC)


def has_lasted(since: datetime, seconds: float, as_of: datetime) -> bool:
    """True from this many seconds after `since` on."""
    elapsed = (as_of - since).total_seconds()
    if elapsed >= seconds:
        return True
    _note_after(since, seconds, as_of)
    return False


def has_lasted_longer(since: datetime, seconds: float, as_of: datetime) -> bool:
    """True after this many seconds after `since`, not yet at their end."""
    elapsed = (as_of - since).total_seconds()
    if elapsed > seconds:
        return True
    _note_after(since, seconds, as_of)
    return False


def _note_after(since: datetime, seconds: float, as_of: datetime) -> None:
    if isinstance(as_of, TrackedInstant) and seconds < _SECONDS_MAX:
        # Rounded to the microsecond, it may already have come: then the next instant decides.
        as_of.note(max(since + timedelta(seconds=seconds), as_of.plain))
