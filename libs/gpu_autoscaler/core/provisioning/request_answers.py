"""Answers to ProvisioningRequests: the conditions that their status lacks, by what this plan found for them.

Conditions and their reasons are those of cluster-autoscaler (provisioningrequest/conditions, read 2026-11-27), with two
differences: capacity counts as provisioned once its nodes are ready, not once they are ordered, and a node that ends
while it is booked revokes the capacity.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import NamedTuple

from gpu_autoscaler.core.demand.provisioning_requests import (
    BOOKED_SECONDS,
    VALID_SECONDS,
    booked_since,
    is_check,
    is_expired,
    request_key,
    why_invalid,
)
from gpu_autoscaler.core.draft import Served
from gpu_autoscaler.core.next_change import has_lasted, plain
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodProvisioningObserved
from gpu_autoscaler.model.demands import ProvisioningConditionType
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.reasons.defer_limits import ProvisioningRequestsLimit
from gpu_autoscaler.model.reasons.upkeep import (
    AnswerReason,
    BookedNodeLost,
    BookingEnded,
    CapacityFound,
    CapacityMissing,
    CapacityOrdered,
    RequestAccepted,
    RequestExpired,
    RequestInvalid,
)

NOT_FOUND, ORDERED = "CapacityIsNotFound", "CapacityIsOrdered"


class Answer(NamedTuple):
    """A condition to set."""

    request: PodProvisioningObserved
    condition: ProvisioningConditionType
    is_true: bool
    code: str
    reason: AnswerReason


def answers(state: ClusterState, as_of: datetime, served: Mapping[str, Served]) -> Iterator[Answer]:
    """Yield the conditions that the status of each request lacks, the oldest request first."""
    for request in sorted(state.provisioning.values(), key=lambda known: (known.created_at, known.request_uid)):
        if request.closed_by is not None:
            continue
        if booked_since(request) is not None:
            yield from _end_of_booking(request, state, as_of, served)
        elif (failure := _failure(request, as_of)) is not None:
            yield failure
        elif (found := served.get(request_key(request))) is not None:
            yield from _of_open(request, found)


def _end_of_booking(
    request: PodProvisioningObserved, state: ClusterState, as_of: datetime, served: Mapping[str, Served]
) -> Iterator[Answer]:
    since = booked_since(request)
    if since is None:
        return
    if has_lasted(since, BOOKED_SECONDS, as_of):
        reason = BookingEnded(booked_seconds=BOOKED_SECONDS)
        yield Answer(request, "BookingExpired", True, "CapacityReservationTimeExpired", reason)
        return
    found = served.get(request_key(request))
    if found is not None and found.missing is not None and (lost := _lost_instance(request, since, state)) is not None:
        yield Answer(request, "CapacityRevoked", True, "NodeLost", BookedNodeLost(provider_id=lost))


def _lost_instance(request: PodProvisioningObserved, since: datetime, state: ClusterState) -> ProviderId | None:
    """Return the first instance bought for the request that has ended since then; None: none has."""
    orders = (order for order in state.orders.values() if order.decision is not None)
    gone = (order.terminated for order in orders if order.decision and order.decision.gang == request_key(request))
    lost = sorted((fact.terminated_at, fact.provider_id) for fact in gone if fact is not None)
    return next((provider_id for at, provider_id in lost if at >= since), None)


def _failure(request: PodProvisioningObserved, as_of: datetime) -> Answer | None:
    """Return the failure of a request that can never be served, or was not in time; None: it goes on."""
    if (detail := why_invalid(request, as_of)) is not None:
        return Answer(request, "Failed", True, "FailedToCreatePods", RequestInvalid(detail=detail))
    if is_expired(request, as_of):
        reason = RequestExpired(valid_seconds=request.valid_seconds or VALID_SECONDS)
        return Answer(request, "Failed", True, "Expired", reason)
    return None


def _of_open(request: PodProvisioningObserved, found: Served) -> Iterator[Answer]:
    if isinstance(found.missing, ProvisioningRequestsLimit):
        return
    count = request.members_count
    if not request.is_true("Accepted"):
        yield Answer(request, "Accepted", True, "Accepted", RequestAccepted(members_count=count))
    if found.is_ready:
        code = "CapacityIsFound" if is_check(request) else "CapacityIsProvisioned"
        reason = CapacityFound(members_count=count, booked_seconds=BOOKED_SECONDS)
        yield Answer(request, "Provisioned", True, code, reason)
    elif found.missing is not None:
        yield from _without_capacity(request, found)
    elif found.is_ordered and _last_code(request) != ORDERED:
        ordered = CapacityOrdered(
            members_count=count, expected_at=None if found.expected_at is None else plain(found.expected_at)
        )
        yield Answer(request, "Provisioned", False, ORDERED, ordered)


def _without_capacity(request: PodProvisioningObserved, found: Served) -> Iterator[Answer]:
    if found.missing is None:
        return
    is_final = is_check(request) and request.is_tried_once
    reason = CapacityMissing(
        members_count=request.members_count,
        cause=found.missing.tag(),
        detail=found.missing.sentence(),
        is_final=is_final,
    )
    if is_final:
        yield Answer(request, "Failed", True, NOT_FOUND, reason)
    elif _last_code(request) != NOT_FOUND:
        yield Answer(request, "Provisioned", False, NOT_FOUND, reason)


def _last_code(request: PodProvisioningObserved) -> str:
    known = request.status("Provisioned")
    return "" if known is None else known.reason
