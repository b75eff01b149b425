"""Hours since 1970, by which the state counts ages and events."""

from datetime import UTC, datetime

from gpu_autoscaler.core.next_change import note_whole

_SECONDS_PER_HOUR = 3600


def hour(at: datetime) -> int:
    """Return whole hours since 1970."""
    note_whole(at, _SECONDS_PER_HOUR)
    return int(at.timestamp()) // _SECONDS_PER_HOUR


def hour_end(at: datetime) -> datetime:
    """Return the end of the hour of this instant."""
    return datetime.fromtimestamp((hour(at) + 1) * _SECONDS_PER_HOUR, UTC)
