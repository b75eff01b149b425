"""Capacity reservations and capacity blocks, which moto lacks.

Source: EC2 API Reference, "DescribeCapacityReservations", "RunInstances" (read 2026-11-22).
"""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec

from gpu_autoscaler.simcloud.aws.wire import Call, elements

TARGET = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"
_INSTANCE = re.compile(r"(<instanceId>(i-[0-9a-f]+)</instanceId>)")


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation, as created by a test or user."""

    reservation_id: str
    instance_type: str
    zone: str
    count: int
    starts_at: datetime
    ends_at: datetime | None = None
    is_block: bool = False


class Reservations:
    """Reservations of a region and their instances. `is_alive` says whether an instance still occupies its slot."""

    def __init__(self, now: Callable[[], datetime], is_alive: Callable[[str], bool]) -> None:
        self._now = now
        self._is_alive = is_alive
        self._all: dict[str, Reserved] = {}
        self._places: dict[str, str] = {}  # instance: reservation

    def put(self, reserved: Reserved) -> None:
        self._all[reserved.reservation_id] = reserved

    def used_count(self, reservation_id: str) -> int:
        return sum(
            1 for instance_id, of in self._places.items() if of == reservation_id and self._is_alive(instance_id)
        )

    def refused(self, call: Call, zone: str) -> tuple[str, str] | None:
        """Return the error of a launch into a reservation; None if it fits, or targets none."""
        wanted = call.parameters.get(TARGET)
        if wanted is None:
            return None
        reserved = self._all.get(wanted)
        if reserved is None:
            return "InvalidCapacityReservationId.NotFound", f"The capacity reservation '{wanted}' does not exist"
        launched = (call.parameters.get("InstanceType"), zone)
        if launched != (reserved.instance_type, reserved.zone) or self._state(reserved) != "active":
            return "InvalidParameterValue", f"The launch does not match the capacity reservation {wanted}."
        is_as_block = call.parameters.get("InstanceMarketOptions.MarketType") == "capacity-block"
        if is_as_block != reserved.is_block:
            return "InvalidParameterCombination", f"The market type does not fit the capacity reservation {wanted}."
        if self.used_count(wanted) >= reserved.count:
            return "ReservationCapacityExceeded", f"The capacity reservation {wanted} has no room left."
        return None

    def take(self, call: Call, ids: list[str]) -> bool:
        """Assign launched instances to the reservation; return whether it is a block."""
        wanted = call.parameters.get(TARGET)
        if wanted is None:
            return False
        self._places |= dict.fromkeys(ids, wanted)
        return self._all[wanted].is_block

    def described(self) -> str:
        rows: list[dict[str, Any]] = []
        for reserved in self._all.values():
            row: dict[str, Any] = {
                "capacityReservationId": reserved.reservation_id,
                "instanceType": reserved.instance_type,
                "availabilityZone": reserved.zone,
                "totalInstanceCount": reserved.count,
                "availableInstanceCount": reserved.count - self.used_count(reserved.reservation_id),
                "state": self._state(reserved),
                "reservationType": "capacity-block" if reserved.is_block else "default",
                "createDate": reserved.starts_at.isoformat(),
                "startDate": reserved.starts_at.isoformat(),
                "endDateType": "unlimited" if reserved.ends_at is None else "limited",
            }
            rows.append(row if reserved.ends_at is None else row | {"endDate": reserved.ends_at.isoformat()})
        return elements("capacityReservationSet", rows)

    def dressed(self, body: bytes) -> bytes:
        """Return an answer about instances with their reservations, which moto does not report."""
        if not self._places:
            return body
        return _INSTANCE.sub(self._with_place, body.decode()).encode()

    def _with_place(self, match: re.Match[str]) -> str:
        reservation_id = self._places.get(match[2])
        if reservation_id is None:
            return match[1]
        inner = f"<capacityReservationId>{reservation_id}</capacityReservationId>"
        return (
            f"{match[1]}{inner}<capacityReservationSpecification><capacityReservationTarget>{inner}"
            "</capacityReservationTarget></capacityReservationSpecification>"
        )

    def _state(self, reserved: Reserved) -> str:
        if self._now() < reserved.starts_at:
            return "scheduled"
        return "active" if reserved.ends_at is None or self._now() < reserved.ends_at else "expired"
