"""Reservations that groups name in their template: offers that are already paid for.

A group whose template targets a reservation is offered from that reservation only. Reserved capacity is billed as
on-demand, used or not, so it is used first. Sources: Compute Engine API v1, `Reservation`; Compute Engine, "Consume
reserved instances" and "Reservations pricing" (read 2026-11-22).
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import UnavailabilityCause
from gpu_autoscaler.providers.gcp.client import GcpClient
from gpu_autoscaler.providers.gcp.translate import denied_kind, instant, last_of
from gpu_autoscaler.providers.market import AVAILABLE, Unavailable

RESERVATIONS_KEPT = timedelta(seconds=60)  # the refresh interval of offers: free counts change with each launch

log = structlog.get_logger()


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Reserved machines of a type in a zone."""

    name: str
    total_count: int
    free_count: int
    since: Instant
    state: str

    @property
    def availability(self) -> Unavailable:
        """Return why nothing can be launched from it now, if so."""
        if self.state != "READY":
            return Unavailable(
                UnavailabilityCause.NO_RESERVATION, f"reservation {self.name} has status {self.state}, not READY"
            )
        if self.free_count <= 0:
            message = f"reservation {self.name} is exhausted: 0 of {self.total_count} are free"
            return Unavailable(UnavailabilityCause.RESERVATION, message)
        return AVAILABLE


class GcpReservations:
    """The reservations that groups name, each as last read."""

    def __init__(self, client: GcpClient) -> None:
        self._client = client
        self._known: dict[tuple[str, str], tuple[datetime, Reservation | None]] = {}

    async def read(self, zone: str, name: str, now: datetime) -> Reservation | None:
        """Return the reservation, None if it does not exist here. Raises TransientError."""
        known = self._known.get((zone, name))
        if known is None or now - known[0] >= RESERVATIONS_KEPT:
            data = await self._client.find("reservations.get", zone=zone, reservation=last_of(name))
            known = self._known[zone, name] = (now, None if data is None else reservation_in(data))
        return known[1]

    async def availability(self, zone: str, name: str, now: datetime) -> tuple[Instant | None, Unavailable]:
        """Return since when it is paid for, and why it is unavailable; neither if reading it is not allowed."""
        if "/" in name and self._client.project not in name.split("/"):
            return None, AVAILABLE  # of another project: only its owner may read it
        try:
            reservation = await self.read(zone, name, now)
        except AutoscalerError as exc:
            if denied_kind(exc) != "permission":
                raise
            log.warning(
                "reservation lookup denied", name=name, error=str(exc), effect="exhaustion surfaces as launch refusals"
            )
            return None, AVAILABLE
        if reservation is None:
            message = f"reservation {name} not found in {zone} of project {self._client.project}"
            return None, Unavailable(UnavailabilityCause.NO_RESERVATION, message)
        return reservation.since, reservation.availability


def reservation_in(data: Mapping[str, Any]) -> Reservation:
    """Return the reservation that Compute Engine describes."""
    specific = data.get("specificReservation", {})
    total_count = int(specific.get("count", 0))
    return Reservation(
        name=data["name"],
        total_count=total_count,
        free_count=total_count - int(specific.get("inUseCount", 0)),
        since=instant(data["creationTimestamp"]),
        state=data.get("status", "READY"),
    )
