"""A value with the time of its observation. Unknown and stale are distinct from zero."""

from datetime import datetime
from typing import Annotated, Generic, TypeVar

import msgspec

# Instants are timezone-aware; msgspec refuses naive ones and adds `date-time` to the schema.
Instant = Annotated[datetime, msgspec.Meta(tz=True)]

T = TypeVar("T")


def aware_instant(text: str) -> datetime | None:
    """Return an instant in ISO 8601; None for any other text, or without a time zone."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at.tzinfo is not None else None


class Observed(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """An observed value and its time. `None` in place of an Observed: never observed."""

    value: T
    seen_at: Instant

    def age_seconds(self, as_of: datetime) -> float:
        """Seconds between the observation and `as_of`; never below zero (clocks differ by seconds)."""
        return max(0.0, (as_of - self.seen_at).total_seconds())

    def is_fresh(self, as_of: datetime, age_seconds_max: float) -> bool:
        """True when the value may still be used at `as_of`."""
        return self.age_seconds(as_of) <= age_seconds_max
