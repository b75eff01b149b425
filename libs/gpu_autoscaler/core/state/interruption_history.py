"""How often the cloud takes spot machines of a type in a zone: what is remembered of those that ended, with decay.

Each instance that ends is counted once, in the hour in which it ended; a count halves every HALF_LIFE_HOURS, so a storm
of yesterday weighs little today. Everything is added up in whole numbers: any order of the facts gives the same ratio.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.state import ClusterState, NoticeRecord, SpotTerminations
from gpu_autoscaler.events.node import InstanceState, NodeInstanceObserved
from gpu_autoscaler.model.decisions import DrainNode, ReleaseInstance
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType, Offer

# Fleets of the recorded spot traces that shrank were as large again within three to nine hours. Source: our own.
HALF_LIFE_HOURS = 6
_WHOLE = 1 << 16  # weight of an end in this hour

# What is taken for granted of a type and zone before anything is known there: one of twenty taken, which is the lowest
# of the bands that AWS publishes ("Spot Instance advisor", read 2026-11-21).
ASSUMED_TAKEN_COUNT, ASSUMED_COUNT = 1, 20


def interruption_rate(state: ClusterState, offer: Offer, as_of: datetime) -> float:
    """Return the share, 0 to 1, of nodes of this offer that the cloud takes before we let them go; 0 unless spot."""
    return rate_of(offer, ends_by_place(state, as_of))


def ends_by_place(state: ClusterState, as_of: datetime) -> Mapping[str, tuple[int, int]]:
    """Return by place, of those of which something is known, the weights of machines that were taken, and of all.

    Counted are those that ended lately, by their age, and those that live: a live one under notice counts as taken.
    """
    living = _living(state.instances, state.notices)
    hour_now = hour(as_of)
    found: dict[str, tuple[int, int]] = {}
    for place in living.keys() | state.spot_terminations.keys():
        here = living.get(place, _NONE)
        taken, ended = _WHOLE * here.noticed_count, _WHOLE * here.count
        for ended_in, ends in state.spot_terminations.get(place, {}).items():
            weight = _weight(hour_now - ended_in)
            taken += weight * ends.taken_count
            ended += weight * ends.count
        found[place] = (taken, ended)
    return found


def rate_of(offer: Offer, ends: Mapping[str, tuple[int, int]]) -> float:
    """Return the share of nodes of this offer that the cloud takes: what is known, on top of what is said of it."""
    if offer.capacity_type is not CapacityType.SPOT:
        return 0.0
    taken, ended = ends.get(place_of(offer.instance_type, offer.zone), (0, 0))
    said = offer.interruption_ratio
    assumed = ASSUMED_TAKEN_COUNT if said is None else said * ASSUMED_COUNT
    return (taken + _WHOLE * assumed) / (ended + _WHOLE * ASSUMED_COUNT)


def place_of(instance_type: str, zone: str) -> str:
    """Return what is remembered as one: a type in a zone."""
    return f"{instance_type}/{zone}"


def with_end(
    known: Mapping[int, SpotTerminations] | None, ended_at: datetime, *, is_taken: bool
) -> Mapping[int, SpotTerminations]:
    """Return the ends of one place, by hour, with one more."""
    before = (known or {}).get(hour(ended_at), SpotTerminations())
    after = replace(before, count=before.count + 1, taken_count=before.taken_count + is_taken)
    return {**(known or {}), hour(ended_at): after}


def is_taken(state: ClusterState, provider_id: ProviderId, now_is: InstanceState) -> bool:
    """True for an instance that ends under a standing notice, or though no decision of ours ends it.

    What was said of it when it began to end stays: giving back what the cloud took makes it no choice of ours.
    """
    if now_is not in ("terminating", "terminated"):
        return False
    known = state.instances.get(provider_id)
    if known is not None and known.is_taken:
        return True
    notices = (record for record in state.notices.values() if record.notice.provider_id == provider_id)
    return any(record.is_active for record in notices) or not _is_ended_by_us(state, provider_id)


def _is_ended_by_us(state: ClusterState, provider_id: ProviderId) -> bool:
    known = state.instances.get(provider_id)
    action_id = None if known is None else known.action_id
    for drain in state.drains.values():
        decision = drain.decision
        if isinstance(decision, DrainNode) and decision.provider_id == provider_id:
            return True
        if isinstance(decision, ReleaseInstance) and (
            decision.provider_id == provider_id or decision.order_action_id == action_id
        ):
            return True
    return False


def _weight(age_hours: int) -> int:
    """Half for each half-life, and on a straight line in between."""
    halvings, rest = divmod(max(0, age_hours), HALF_LIFE_HOURS)
    whole = _WHOLE >> halvings
    return whole - whole * rest // (2 * HALF_LIFE_HOURS)


class _Living(msgspec.Struct, frozen=True):
    """Spot machines of one place that are there."""

    count: int = 0
    noticed_count: int = 0


_NONE = _Living()


@cached_by_identity(2)
def _living(
    instances: Mapping[ProviderId, NodeInstanceObserved], notices: Mapping[str, NoticeRecord]
) -> Mapping[str, _Living]:
    noticed = {record.notice.provider_id for record in notices.values() if record.is_active}
    counts: Counter[str] = Counter()
    noticed_counts: Counter[str] = Counter()
    for one in instances.values():
        if one.capacity_type is CapacityType.SPOT and one.state != "terminated":
            place = place_of(one.instance_type, one.zone)
            counts[place] += 1
            noticed_counts[place] += one.provider_id in noticed
    return {place: _Living(count, noticed_counts[place]) for place, count in counts.items()}
