"""What the cloud would not sell lately, and until when it is not asked again. Read by the market and by `offers`.

A refusal reaches one offer, its zone, or its region's quota of that family and capacity type. It stands as long as the
cloud said, and twice as long each time the next try is refused as well, up to half an hour; one that is sold begins
anew. A quota is full for everybody until something of ours that counts against it has ended.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.state.state import ClusterState, OrderRecord
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.events.scaling import ScalingLaunchRefused
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Bar, CapacityType, Offer

# Longer would miss capacity that comes back; shorter asks a cloud that has none all day (our own choice).
_WAIT_MAX = timedelta(minutes=30)
# The wait has doubled to its limit long before.
_DOUBLINGS_COUNT_MAX = 8

# Quotas are read again so often (CHECKLIST, Decisions); what is not sampled any more stays as it was.
_BAR_RECHECKED, _BAR_RECHECKED_SOON = timedelta(minutes=10), timedelta(minutes=1)

Scope = tuple[str, str]  # offer, zone or region; and its name


class Unavailability(msgspec.Struct, frozen=True, kw_only=True):
    """What is not asked for again before an instant."""

    scope: str  # offer, zone, region
    name: str
    until: Instant
    refused_at: Instant  # the last time
    tries_count: int  # refused in a row
    code: str  # the cloud's own word
    message: str


def active_unavailability(state: ClusterState, as_of: datetime) -> Mapping[Scope, Unavailability]:
    """Return the refusals that stand at this instant, by what they reach."""
    found = {
        scope: refusal
        for scope, refusal in unavailable_scopes(state.orders, state.instances).items()
        if as_of < refusal.until
    }
    return found | _barred_offers(state.offers, as_of)


def _barred_offers(told: SpotOffersSampled | None, as_of: datetime) -> dict[Scope, Unavailability]:
    """What the cloud would refuse, by quota or reservation: as long as the last sample says so."""
    if told is None:
        return {}
    until = max(told.sampled_at + _BAR_RECHECKED, as_of + _BAR_RECHECKED_SOON)
    return {
        ("offer", offer.key): Unavailability(
            scope="offer",
            name=offer.key,
            until=until,
            refused_at=told.sampled_at,
            tries_count=1,
            code=offer.barred_by or Bar.QUOTA,
            message=offer.barred_because,
        )
        for offer in told.offers
        if offer.barred_because is not None
    }


def scopes_of(offer: Offer) -> tuple[Scope, ...]:
    """The scopes whose refusals reach this offer."""
    return (("offer", offer.key), ("zone", offer.zone), ("region", quota_scope(offer)))


def quota_scope(offer: Offer) -> str:
    """Region, family and capacity type of an offer: quotas count these for themselves."""
    return _quota(offer.instance_type, offer.zone, offer.capacity_type)


def _quota(instance_type: str, zone: str, capacity_type: CapacityType) -> str:
    """Zones are named after their region plus one character, with or without a dash: `eu-west-1a`, `europe-west1-b`,
    `westeurope-1` (documentation of AWS, Google Cloud and Azure on regions and zones, read 2026-11-21); a family is the
    first part of a type's name (`p4d.24xlarge`, `a2-highgpu-1g`), or all of it (`Standard_NC24ads_A100_v4`)."""
    family = instance_type.split(".", 1)[0].split("-", 1)[0]
    return f"{zone[:-1].removesuffix('-')}/{family}/{capacity_type}"


@cached_by_identity(4)
def unavailable_scopes(
    orders: Mapping[ActionId, OrderRecord], instances: Mapping[ProviderId, NodeInstanceObserved]
) -> Mapping[Scope, Unavailability]:
    """Return the last refusal of each scope, also one that is over; none for a quota that has room again."""
    said: dict[Scope, dict[datetime, ScalingLaunchRefused]] = {}  # by when it was planned: one try each
    sold_at: dict[str, datetime] = {}
    for order in orders.values():
        if order.refused is not None:
            names = dict(scopes_of(order.refused.offer))
            scope = (order.refused.scope, names[order.refused.scope])
            tries, at = said.setdefault(scope, {}), order.planned_at or order.refused.refused_at
            if at not in tries or tries[at].retry_at < order.refused.retry_at:
                tries[at] = order.refused
        elif order.launched is not None and order.decision is not None:
            key, at = order.decision.offer.key, order.planned_at or order.launched.launched_at
            sold_at[key] = max(at, sold_at.get(key, at))
    found = {scope: _unavailability(scope, tries, sold_at, _freed(scope, instances)) for scope, tries in said.items()}
    return {scope: refusal for scope, refusal in found.items() if refusal is not None}


def _unavailability(
    scope: Scope,
    tries: Mapping[datetime, ScalingLaunchRefused],
    sold_at: Mapping[str, datetime],
    freed_at: datetime | None,
) -> Unavailability | None:
    last_at = max(tries)
    last = tries[last_at]
    since = sold_at.get(last.offer.key) if scope[0] == "offer" else None
    # What was sold by the very plan that was refused the rest was the last that the cloud had.
    count = sum(1 for at in tries if since is None or at >= since)
    if count == 0 or (freed_at is not None and freed_at > last.refused_at):
        return None
    wait = last.retry_at - last.refused_at
    if scope[0] != "region" and wait < _WAIT_MAX:
        wait = min(wait * 2 ** min(count - 1, _DOUBLINGS_COUNT_MAX), _WAIT_MAX)
    return Unavailability(
        scope=scope[0],
        name=scope[1],
        until=last.refused_at + wait,
        refused_at=last.refused_at,
        tries_count=count,
        code=last.code,
        message=last.message,
    )


def _freed(scope: Scope, instances: Mapping[ProviderId, NodeInstanceObserved]) -> datetime | None:
    """When something ended last that had counted against the quota; None for other scopes, or where nothing has."""
    if scope[0] != "region":
        return None
    ends = (
        one.terminated_at
        for one in instances.values()
        if one.terminated_at is not None and _quota(one.instance_type, one.zone, one.capacity_type) == scope[1]
    )
    return max(ends, default=None)
