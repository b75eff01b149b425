"""Instants, which are timezone-aware, and durations, as texts."""

import re
from datetime import datetime, timedelta
from typing import Annotated

import msgspec

# Instants are timezone-aware; msgspec refuses naive ones and adds `date-time` to the schema.
Instant = Annotated[datetime, msgspec.Meta(tz=True)]

# A duration as Go writes it, of the units that make sense for pods: 90s, 30m, 1h30m
# (Karpenter documentation, "Disruption", pod-level controls; Go documentation, time.ParseDuration; read 2026-11-21).
_DURATION = re.compile(
    r"(?:(?P<hours>\d+(?:\.\d+)?)h)?(?:(?P<minutes>\d+(?:\.\d+)?)m)?(?:(?P<seconds>\d+(?:\.\d+)?)s)?"
)


def aware_instant(text: str) -> datetime | None:
    """Return an instant in ISO 8601; None for any other text, or without a time zone."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at.tzinfo is not None else None


def go_duration(text: str) -> timedelta | None:
    """Return a duration as Go writes it; None for other text."""
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        return None
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    try:
        return timedelta(hours=hours, minutes=minutes, seconds=seconds)
    except OverflowError:
        return None
