"""Offers that the cloud refused recently, and until when they are not requested again.

A refusal concerns one offer, its zone, or its region's quota. The wait doubles with each further refusal, up to five
minutes, and is reset by a launch. A quota is exhausted until a managed instance that counts against it has ended.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.state.state import ClusterState, OrderRecord
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.events.scaling import ScalingLaunchRefused
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer, UnavailabilityCause

# Longer misses capacity that comes back: shortages of recorded spot fleets often pass within a step of five minutes
# (docs/scores.md). Shorter keeps requesting exhausted capacity; Karpenter waits three minutes each time.
_WAIT_MAX = timedelta(minutes=5)
# The wait has reached its limit long before.
_DOUBLINGS_COUNT_MAX = 8

# Interval at which quotas are read again (docs/decisions.md#quotas), and the least remaining time.
_BAR_VALID, _BAR_VALID_MIN = timedelta(minutes=10), timedelta(minutes=1)

Scope = tuple[str, str]  # offer, zone or region; and its name


class Unavailability(msgspec.Struct, frozen=True, kw_only=True):
    """Offers that are not requested before an instant."""

    scope: str  # offer, zone, region
    name: str
    until: Instant
    refused_at: Instant  # the latest refusal
    tries_count: int  # refused in a row
    code: str  # the cloud's error code
    message: str


def active_unavailability(state: ClusterState, as_of: datetime) -> Mapping[Scope, Unavailability]:
    """Return what is unavailable at this instant, by scope."""
    unavailable = {
        scope: refusal
        for scope, refusal in unavailable_scopes(state.orders, state.instances).items()
        if as_of < refusal.until
    }
    return unavailable | _barred_offers(state.offers, as_of)


def _barred_offers(sampled: SpotOffersSampled | None, as_of: datetime) -> dict[Scope, Unavailability]:
    """Return the offers that the cloud would refuse by quota or reservation, as of the last sample."""
    if sampled is None:
        return {}
    until = max(sampled.sampled_at + _BAR_VALID, as_of + _BAR_VALID_MIN)
    return {
        ("offer", offer.key): Unavailability(
            scope="offer",
            name=offer.key,
            until=until,
            refused_at=sampled.sampled_at,
            tries_count=1,
            code=offer.unavailable_by or UnavailabilityCause.QUOTA,
            message=offer.unavailable_because,
        )
        for offer in sampled.offers
        if offer.unavailable_because is not None
    }


def scopes_of(offer: Offer) -> tuple[Scope, ...]:
    """Return the scopes whose refusals concern this offer."""
    return (("offer", offer.key), ("zone", offer.zone), ("region", quota_scope(offer)))


def quota_scope(offer: Offer) -> str:
    """Return region, family and capacity type of an offer: each combination has its own quota."""
    return _quota(offer.instance_type, offer.zone, offer.capacity_type)


def _quota(instance_type: str, zone: str, capacity_type: CapacityType) -> str:
    """Return the name of a quota.

    Zones are named after their region plus one character, with or without a dash: `eu-west-1a`, `europe-west1-b`,
    `westeurope-1` (documentation of AWS, Google Cloud and Azure on regions and zones, read 2026-11-21). The family is
    the first part of a type's name (`p4d.24xlarge`, `a2-highgpu-1g`), or all of it (`Standard_NC24ads_A100_v4`).
    """
    family = instance_type.split(".", 1)[0].split("-", 1)[0]
    return f"{zone[:-1].removesuffix('-')}/{family}/{capacity_type}"


@cached_by_identity(4)
def unavailable_scopes(
    orders: Mapping[ActionId, OrderRecord], instances: Mapping[ProviderId, NodeInstanceObserved]
) -> Mapping[Scope, Unavailability]:
    """Return the last refusal of each scope, including expired ones; none for a quota with capacity again."""
    refused: dict[Scope, list[tuple[datetime, ScalingLaunchRefused]]] = {}  # with the planning time
    sold_at: dict[str, datetime] = {}
    for order in orders.values():
        if order.refused is not None:
            names = dict(scopes_of(order.refused.offer))
            scope = (order.refused.scope, names[order.refused.scope])
            refused.setdefault(scope, []).append((order.planned_at or order.refused.refused_at, order.refused))
        elif order.launched is not None and order.decision is not None:
            key, at = order.decision.offer.key, order.planned_at or order.launched.launched_at
            sold_at[key] = max(at, sold_at.get(key, at))
    unavailable = {
        scope: _unavailability(scope, refusals, sold_at, _freed(scope, instances))
        for scope, refusals in refused.items()
    }
    return {scope: refusal for scope, refusal in unavailable.items() if refusal is not None}


def _unavailability(
    scope: Scope,
    refusals: Sequence[tuple[datetime, ScalingLaunchRefused]],
    sold_at: Mapping[str, datetime],
    freed_at: datetime | None,
) -> Unavailability | None:
    since = sold_at.get(refusals[0][1].offer.key) if scope[0] == "offer" else None
    tries: dict[datetime, ScalingLaunchRefused] = {}  # refusals of one plan are one try, which ends with the last
    for at, refusal in refusals:
        # A launch by the same plan does not reset the count: it took the last capacity.
        counts = (since is None or at >= since) and (freed_at is None or freed_at <= refusal.refused_at)
        if counts and (at not in tries or tries[at].retry_at < refusal.retry_at):
            tries[at] = refusal
    counted = tries.values()
    if not counted:
        return None
    # Not that of the last plan: the cloud may answer an earlier one later.
    last = max(counted, key=lambda refused: refused.refused_at)
    wait = last.retry_at - last.refused_at
    if scope[0] != "region" and wait < _WAIT_MAX:
        wait = min(wait * 2 ** min(len(counted) - 1, _DOUBLINGS_COUNT_MAX), _WAIT_MAX)
    return Unavailability(
        scope=scope[0],
        name=scope[1],
        until=max(last.refused_at + wait, *(refused.retry_at for refused in counted)),
        refused_at=last.refused_at,
        tries_count=len(counted),
        code=last.code,
        message=last.message,
    )


def _freed(scope: Scope, instances: Mapping[ProviderId, NodeInstanceObserved]) -> datetime | None:
    """Return when an instance that counts against the quota last ended; None: never, or the scope is no quota."""
    if scope[0] != "region":
        return None
    ends = (
        instance.terminated_at
        for instance in instances.values()
        if instance.terminated_at is not None
        and _quota(instance.instance_type, instance.zone, instance.capacity_type) == scope[1]
    )
    return max(ends, default=None)
