"""Hours since 1970, by which the state counts ages and what came how often."""

from datetime import UTC, datetime

_SECONDS_PER_HOUR = 3600


def hour(at: datetime) -> int:
    """Hours since 1970, whole."""
    return int(at.timestamp()) // _SECONDS_PER_HOUR


def hour_end(at: datetime) -> datetime:
    """When the hour that this instant is in is over."""
    return datetime.fromtimestamp((hour(at) + 1) * _SECONDS_PER_HOUR, UTC)
