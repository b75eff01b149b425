"""Reservations of the project, used by name."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from gpu_autoscaler.simcloud.gcp.machines import BASE, Machine, stamp


class Reservation(msgspec.Struct, kw_only=True):
    """One reservation that must be targeted by name."""

    name: str
    zone: str
    machine_type: str
    count: int
    created_at: datetime

    def used_count(self, machines: Iterable[Machine]) -> int:
        """Return how many of its machines run."""
        return sum(1 for machine in machines if (machine.zone, machine.reservation) == (self.zone, self.name))

    def described(self, machines: Iterable[Machine]) -> dict[str, Any]:
        """Return the reservation in the API's format."""
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
