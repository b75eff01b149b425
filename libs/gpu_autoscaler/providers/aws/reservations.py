"""Capacity reservations and capacity blocks of the settings: offered as capacity that is paid, and launched into.

A reservation is one offer of its type and zone: an order names it by when it began, so that a second try is the same
request. A block ends; its instances are ended by AWS from half an hour before, so that is when it is over for us. When
a reservation ends its instances run on, at the on-demand price that they had: that end is nobody's notice.
Sources: EC2 API Reference, "CapacityReservation"; EC2 User Guide, "Capacity Blocks for ML" and "Launch instances into
an existing Capacity Reservation" (read 2026-11-22).
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Bar, CapacityType, Offer
from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.aws.translate import Kind
from gpu_autoscaler.providers.protocol import LaunchRefused, Order

BLOCK_ENDED_AHEAD = timedelta(minutes=30)
RESERVATIONS_KEPT = timedelta(seconds=60)  # as often as offers are asked for: what is free changes with each launch
# Those that can be launched into, now or at their beginning (EC2 API Reference, "CapacityReservation", `State`).
_STANDING = frozenset({"active", "scheduled", "payment-pending", "pending"})

log = structlog.get_logger()


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What is reserved: so many instances of a type in a zone, for a time."""

    reservation_id: str
    instance_type: str
    zone: str
    state: str
    is_block: bool
    total_count: int
    available_count: int
    starts_at: Instant
    ends_at: Instant | None  # None: until somebody cancels it

    @property
    def paid_until(self) -> Instant | None:
        """When every instance of it has to be gone; None: they may stay."""
        return self.ends_at - BLOCK_ENDED_AHEAD if self.is_block and self.ends_at is not None else None

    @property
    def is_standing(self) -> bool:
        """True for one that can be launched into, now or later."""
        return self.state in _STANDING


def reservation_of(told: Mapping[str, Any]) -> Reservation:
    """Return what EC2 tells of a reservation."""
    ends_at = told.get("EndDate")
    return Reservation(
        reservation_id=told["CapacityReservationId"],
        instance_type=told["InstanceType"],
        zone=told["AvailabilityZone"],
        state=told["State"],
        is_block=told.get("ReservationType") == "capacity-block",
        total_count=told["TotalInstanceCount"],
        available_count=told["AvailableInstanceCount"],
        starts_at=(told.get("StartDate") or told["CreateDate"]).astimezone(UTC),
        ends_at=None if ends_at is None else ends_at.astimezone(UTC),
    )


class AwsReservations:
    """The reservations of the settings, as they were read last."""

    def __init__(self, calls: AwsClient, wanted: Sequence[str]) -> None:
        self._calls = calls
        self._wanted = frozenset(wanted)
        self._known: tuple[Reservation, ...] = ()
        self._read_at: datetime | None = None

    async def read(self, now: datetime) -> Sequence[Reservation]:
        """Return those that there are, by id. Raises TransientError."""
        if self._wanted and (self._read_at is None or now - self._read_at >= RESERVATIONS_KEPT):
            # All of them, and not by id: one that is gone would make an error of the others.
            told = [
                reservation
                async for page in self._calls.pages("DescribeCapacityReservations")
                for reservation in page["CapacityReservations"]
                if reservation["CapacityReservationId"] in self._wanted
            ]
            self._known = tuple(sorted(map(reservation_of, told), key=lambda one: one.reservation_id))
            self._read_at = now
        return self._known

    async def standing(self, now: datetime) -> Sequence[Reservation]:
        """Return one of each type and zone that can be launched into: what has room goes first, then what ends last.

        Never raises: a failure is told, and what is known stays.
        """
        try:
            await self.read(now)
        except AutoscalerError as exc:
            log.warning("capacity reservations not told, what is known of them stays", error=str(exc))
        chosen: dict[tuple[str, str], Reservation] = {}
        for one in sorted(self._known, key=lambda one: _rank(one, now), reverse=True):
            if one.is_standing and (one.paid_until is None or now < one.paid_until):
                chosen.setdefault((one.instance_type, one.zone), one)
        return list(chosen.values())

    async def target(self, order: Order, now: datetime) -> Reservation:
        """Return what the order is for. Raises LaunchRefused, TransientError."""
        offer = order.offer
        for one in await self.read(now):
            if (one.instance_type, one.zone, one.starts_at) == (offer.instance_type, offer.zone, offer.paid_from):
                return one
        raise LaunchRefused(
            f"RunInstances: no capacity reservation of {offer.key} that began at {offer.paid_from} is in"
            " aws.capacity_reservations any more; see `gpu-autoscaler doctor`",
            code="NoReservation",
            kind="configuration",
            scope="offer",
        )


def reserved_offer(reservation: Reservation, kind: Kind, on_demand_micro_usd: int | None) -> Offer:
    """Return the reservation as an offer.

    An instance in a reservation is billed as on demand; one in a block is paid in advance (EC2 User Guide, "Capacity
    Reservation pricing and billing").
    """
    is_used_up = reservation.state == "active" and reservation.available_count == 0
    said = f"{reservation.reservation_id} is used up: 0 of {reservation.total_count} are free"
    return Offer(
        instance_type=kind.name,
        zone=reservation.zone,
        capacity_type=CapacityType.RESERVED,
        resources=kind.resources,
        gpu_model=kind.gpu_model,
        gpu_memory_bytes=kind.gpu_memory_bytes,
        price_micro_usd_per_hour=0 if reservation.is_block else on_demand_micro_usd,
        paid_from=reservation.starts_at,
        paid_until=reservation.paid_until,
        barred_because=said if is_used_up else None,
        barred_by=Bar.RESERVATION if is_used_up else None,
    )


def target_request(reservation: Reservation) -> dict[str, object]:
    """Return what a launch into it adds to the request."""
    target = {"CapacityReservationTarget": {"CapacityReservationId": reservation.reservation_id}}
    request: dict[str, object] = {"CapacityReservationSpecification": target}
    return request | ({"InstanceMarketOptions": {"MarketType": "capacity-block"}} if reservation.is_block else {})


def _rank(one: Reservation, now: datetime) -> tuple[bool, bool, float, str]:
    ends = float("inf") if one.paid_until is None else one.paid_until.timestamp()
    return one.starts_at <= now, one.available_count > 0, ends, one.reservation_id
