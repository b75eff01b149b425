"""Cluster time and wall time. The only module that reads a clock.

With a factor above 1 cluster time passes faster: boots, idle times and prices follow it. Leases, ack waits, time-outs
and the reaction to an interruption notice stay in wall time: `wall_now` and `asyncio.sleep`.
"""

import asyncio
import os
import time
from datetime import UTC, datetime, timedelta

from gpu_autoscaler.model.errors import ConfigError

CLOCK_FACTOR_MAX = 20.0  # docs/decisions.md#clock-factor
CLOCK_ENVIRONMENT = "GPU_AUTOSCALER_CLOCK"  # "<factor>@<origin as RFC 3339>", equal in all processes of one cluster


class Clock:
    """Cluster time: `origin + (wall time since origin) x factor`."""

    def __init__(self, factor: float = 1.0, origin: datetime | None = None) -> None:
        if not 1.0 <= factor <= CLOCK_FACTOR_MAX:
            raise ConfigError("clock", [f"factor: {factor} is out of range; set 1 to {CLOCK_FACTOR_MAX:g}"])
        self.factor = factor
        self.origin = origin or self.wall_now()

    @classmethod
    def from_environment(cls) -> "Clock":
        """Return the clock that the launcher set for this process; real time without one. Raises ConfigError."""
        text = os.environ.get(CLOCK_ENVIRONMENT, "")
        return cls.from_text(text, CLOCK_ENVIRONMENT) if text else cls()

    @classmethod
    def from_text(cls, text: str, source: str) -> "Clock":
        """Return the clock that `to_text` wrote; `source` names its origin in errors. Raises ConfigError."""
        factor, _, origin = text.partition("@")
        try:
            return cls(float(factor), datetime.fromisoformat(origin))
        except ValueError as exc:
            raise ConfigError(
                "clock", [f"{source}: {text!r} is not <factor>@<RFC 3339>; unset it for real time"]
            ) from exc

    def to_text(self) -> str:
        """Return this clock as the value of GPU_AUTOSCALER_CLOCK, for other processes."""
        return f"{self.factor}@{self.origin.isoformat()}"

    @staticmethod
    def wall_now() -> datetime:
        """Wall time, UTC."""
        return datetime.now(UTC)

    def now(self) -> datetime:
        """Cluster time, UTC."""
        return self.at(self.wall_now())

    def at(self, wall: datetime) -> datetime:
        """Convert an instant of wall time, such as a broker's or a database's time stamp, to cluster time."""
        return wall if self.factor == 1.0 else self.origin + (wall - self.origin) * self.factor

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of cluster time."""
        await asyncio.sleep(seconds / self.factor)

    def wall_seconds(self, seconds: float) -> float:
        """Convert `seconds` of cluster time to wall time."""
        return seconds / self.factor

    @staticmethod
    def monotonic_seconds() -> float:
        """Monotonic time, for durations and time-outs."""
        return time.monotonic()

    def add(self, seconds: float) -> datetime:
        """Return the cluster time `seconds` from now."""
        return self.now() + timedelta(seconds=seconds)
