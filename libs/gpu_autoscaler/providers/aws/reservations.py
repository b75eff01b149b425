"""Capacity reservations and capacity blocks of the settings: offers that are already paid for.

An order identifies one by type, zone and start, so that a retry is the same request. A block ends for us 30 minutes
early, when AWS starts to terminate its instances; those of an ordinary reservation keep running at the on-demand price.
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
from gpu_autoscaler.model.offers import CapacityType, Offer, UnavailabilityCause
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.aws.translate import InstanceType
from gpu_autoscaler.providers.market import AVAILABLE, Price, Unavailable, offer_of
from gpu_autoscaler.providers.protocol import Order, misconfigured

BLOCK_ENDED_AHEAD = timedelta(minutes=30)
RESERVATIONS_KEPT = timedelta(seconds=60)  # the refresh interval of offers: free counts change with each launch
# States that accept launches, now or from the start (EC2 API Reference, "CapacityReservation", `State`).
_USABLE = frozenset({"active", "scheduled", "payment-pending", "pending"})

log = structlog.get_logger()


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A number of instances of a type in a zone, reserved for a period."""

    reservation_id: str
    instance_type: str
    zone: str
    state: str
    is_block: bool
    total_count: int
    available_count: int
    starts_at: Instant
    ends_at: Instant | None  # None: until it is cancelled

    @property
    def paid_until(self) -> Instant | None:
        """When its last instance is terminated; None: instances may stay."""
        return self.ends_at - BLOCK_ENDED_AHEAD if self.is_block and self.ends_at is not None else None

    @property
    def is_usable(self) -> bool:
        """Return whether launches into it are possible, now or later."""
        return self.state in _USABLE


def reservation_of(data: Mapping[str, Any]) -> Reservation:
    """Return the reservation that EC2 describes."""
    ends_at = data.get("EndDate")
    return Reservation(
        reservation_id=data["CapacityReservationId"],
        instance_type=data["InstanceType"],
        zone=data["AvailabilityZone"],
        state=data["State"],
        is_block=data.get("ReservationType") == "capacity-block",
        total_count=data["TotalInstanceCount"],
        available_count=data["AvailableInstanceCount"],
        starts_at=(data.get("StartDate") or data["CreateDate"]).astimezone(UTC),
        ends_at=None if ends_at is None else ends_at.astimezone(UTC),
    )


class AwsReservations:
    """The reservations of the settings, as last read."""

    def __init__(self, client: AwsClient, configured_ids: Sequence[str]) -> None:
        self._client = client
        self._configured_ids = frozenset(configured_ids)
        self._known: tuple[Reservation, ...] = ()
        self._read_at: datetime | None = None

    async def read(self, now: datetime) -> Sequence[Reservation]:
        """Return the existing ones, by id. Raises TransientError."""
        if self._configured_ids and (self._read_at is None or now - self._read_at >= RESERVATIONS_KEPT):
            # Lists all rather than by id: one unknown id would fail the whole call.
            existing = map(
                reservation_of, await self._client.items("DescribeCapacityReservations", "CapacityReservations")
            )
            ours = (reservation for reservation in existing if reservation.reservation_id in self._configured_ids)
            self._known = tuple(sorted(ours, key=lambda reservation: reservation.reservation_id))
            self._read_at = now
        return self._known

    async def usable(self, now: datetime) -> Sequence[Reservation]:
        """Return one usable reservation per type and zone: those with free capacity first, then those that end last.
        Never raises: a failure is logged, and known reservations stay."""
        try:
            await self.read(now)
        except AutoscalerError as exc:
            log.warning("capacity reservation lookup failed", error=str(exc), effect="known reservations stay")
        chosen: dict[tuple[str, str], Reservation] = {}
        for reservation in sorted(self._known, key=lambda reservation: _rank(reservation, now), reverse=True):
            if reservation.is_usable and (reservation.paid_until is None or now < reservation.paid_until):
                chosen.setdefault((reservation.instance_type, reservation.zone), reservation)
        return list(chosen.values())

    async def target(self, order: Order, now: datetime) -> Reservation:
        """Return the order's reservation. Raises LaunchRefused, TransientError."""
        offer = order.offer
        for reservation in await self.read(now):
            if (reservation.instance_type, reservation.zone, reservation.starts_at) == (
                offer.instance_type,
                offer.zone,
                offer.paid_from,
            ):
                return reservation
        raise misconfigured(
            f"RunInstances: no capacity reservation for {offer.key} starting {offer.paid_from} is in"
            " aws.capacity_reservations; see `gpu-autoscaler doctor`",
            "NoReservation",
        )


def reserved_offer(reservation: Reservation, kind: InstanceType, on_demand_micro_usd: int | None) -> Offer:
    """Return the reservation as an offer. Instances in a reservation are billed as on-demand; those in a block are
    prepaid (EC2 User Guide, "Capacity Reservation pricing and billing")."""
    is_used_up = reservation.state == "active" and reservation.available_count == 0
    message = f"{reservation.reservation_id} is exhausted: 0 of {reservation.total_count} are free"
    return offer_of(
        kind,
        reservation.zone,
        CapacityType.RESERVED,
        Price(0 if reservation.is_block else on_demand_micro_usd, None),
        Unavailable(UnavailabilityCause.RESERVATION, message) if is_used_up else AVAILABLE,
        paid_from=reservation.starts_at,
        paid_until=reservation.paid_until,
    )


def target_request(reservation: Reservation) -> dict[str, object]:
    """Return what a launch into the reservation adds to the request."""
    target = {"CapacityReservationTarget": {"CapacityReservationId": reservation.reservation_id}}
    request: dict[str, object] = {"CapacityReservationSpecification": target}
    return request | ({"InstanceMarketOptions": {"MarketType": "capacity-block"}} if reservation.is_block else {})


def _rank(reservation: Reservation, now: datetime) -> tuple[bool, bool, float, str]:
    end = float("inf") if reservation.paid_until is None else reservation.paid_until.timestamp()
    return reservation.starts_at <= now, reservation.available_count > 0, end, reservation.reservation_id
