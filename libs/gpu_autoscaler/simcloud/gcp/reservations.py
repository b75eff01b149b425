"""Reservations of the project: so many machines of a type in a zone, kept for whoever names them."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from gpu_autoscaler.simcloud.gcp.machines import BASE, Machine, stamp


class Reservation(msgspec.Struct, kw_only=True):
    """One reservation that is used by name alone."""

    name: str
    zone: str
    machine_type: str
    count: int
    created_at: datetime

    def used_count(self, machines: Iterable[Machine]) -> int:
        """Return how many of it run."""
        return sum(1 for machine in machines if (machine.zone, machine.reservation) == (self.zone, self.name))

    def told(self, machines: Iterable[Machine]) -> dict[str, Any]:
        """The reservation as the API shows it."""
        return {
            "name": self.name,
            "zone": f"{BASE}/zones/{self.zone}",
            "status": "READY",
            "creationTimestamp": stamp(self.created_at),
            "specificReservationRequired": True,
            "specificReservation": {
                "count": str(self.count),
                "inUseCount": str(self.used_count(machines)),
                "instanceProperties": {"machineType": self.machine_type},
            },
        }
