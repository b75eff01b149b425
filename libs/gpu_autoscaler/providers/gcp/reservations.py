"""Reservations that groups take their machines from by name: offered as capacity that is paid.

A group whose template asks for one reservation is sold out of that and nowhere else. What is reserved is billed as on
demand, used or not, so it is used first. Sources: Compute Engine API v1, `Reservation`; Compute Engine, "Consume
reserved instances" and "Reservations pricing" (read 2026-11-22).
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Bar
from gpu_autoscaler.providers.bars import OPEN, Barred
from gpu_autoscaler.providers.gcp.calls import GcpClient
from gpu_autoscaler.providers.gcp.translate import denied_kind, instant, last_of

RESERVATIONS_KEPT = timedelta(seconds=60)  # as often as offers are asked for: what is free changes with each launch

log = structlog.get_logger()


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """So many machines of a type in a zone."""

    name: str
    total_count: int
    free_count: int
    since: Instant
    state: str

    @property
    def barred(self) -> Barred:
        """Why nothing can be made from it now, if so."""
        if self.state != "READY":
            return Barred(Bar.NO_RESERVATION, f"reservation {self.name} is {self.state}, and not READY")
        if self.free_count <= 0:
            said = f"reservation {self.name} is used up: 0 of {self.total_count} are free"
            return Barred(Bar.RESERVATION, said)
        return OPEN


class GcpReservations:
    """The reservations that the groups name, each as it was read last."""

    def __init__(self, calls: GcpClient) -> None:
        self._calls = calls
        self._known: dict[tuple[str, str], tuple[datetime, Reservation | None]] = {}

    async def read(self, zone: str, name: str, now: datetime) -> Reservation | None:
        """Return the reservation, None where there is none of that name here. Raises TransientError."""
        known = self._known.get((zone, name))
        if known is None or now - known[0] >= RESERVATIONS_KEPT:
            told = await self._calls.find("reservations.get", zone=zone, reservation=last_of(name))
            known = self._known[zone, name] = (now, None if told is None else reservation_in(told))
        return known[1]

    async def bar(self, zone: str, name: str, now: datetime) -> tuple[Instant | None, Barred]:
        """Return since when it is paid for, and why nothing can be made from it; neither where we may not look."""
        if "/" in name and self._calls.project not in name.split("/"):
            return None, OPEN  # another project's, which only its owner may read
        try:
            found = await self.read(zone, name, now)
        except AutoscalerError as exc:
            if denied_kind(exc) != "permission":
                raise
            log.warning("reservation not told, one that is used up shows as a refusal", name=name, error=str(exc))
            return None, OPEN
        if found is None:
            said = f"reservation {name} is not in {zone} of project {self._calls.project}"
            return None, Barred(Bar.NO_RESERVATION, said)
        return found.since, found.barred


def reservation_in(told: Mapping[str, Any]) -> Reservation:
    """Return what Compute Engine tells of a reservation."""
    specific = told.get("specificReservation", {})
    total_count = int(specific.get("count", 0))
    return Reservation(
        name=told["name"],
        total_count=total_count,
        free_count=total_count - int(specific.get("inUseCount", 0)),
        since=instant(told["creationTimestamp"]),
        state=told.get("status", "READY"),
    )
