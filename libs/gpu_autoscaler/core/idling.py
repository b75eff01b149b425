"""How long an empty node is kept: as long as it costs less than its boot would, if it were let go and needed again.

Nobody knows when work comes. Who keeps a node until it has cost what another one would, and then lets it go, never pays
more than twice what one pays who knew (Karlin, Manasse, Rudolph, Sleator, "Competitive Snoopy Caching", 1988: to rent
or to buy). What another one costs is the time in which it boots, at its price, and that somebody waits for it.

Where several places are free for the same work, one arrival fills one. After t seconds without any, work comes about
once in t at most, so a node that is used by the j-th arrival alone is used in j times t: it goes j times sooner.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from gpu_autoscaler.core.bins import bin_key, current_bins, free_room
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.life import NodeView
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.shapes import Standing
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources

PLACES_COUNT_MAX = 8  # more are not counted: the last ones go after an eighth of the time already

_Kind = tuple[str | None, str | None]


def idle_seconds_allowed(view: NodeView, policy: ScalingPolicy, place: int = 1) -> float:
    """Return after how long without pods the node goes, where it is the so-many-th place that is free, counted from 1.

    The policy's most where nobody knows what it was sold as.
    """
    decision = None if view.order is None else view.order.decision
    return policy.idle_seconds_max if decision is None else idle_seconds_worth(decision.offer, policy, place)


def idle_seconds_worth(offer: Offer, policy: ScalingPolicy, place: int = 1) -> float:
    """Return how long a node of the offer is worth its keep, at most `idle_seconds_max`; what is reserved is paid."""
    price = 0 if offer.capacity_type is CapacityType.RESERVED else offer.price_micro_usd_per_hour
    hourly = None if price is None else price + policy.node_overhead_micro_usd_per_hour
    if not hourly:
        return policy.idle_seconds_max
    again = offer.boot_seconds * (1.0 + policy.removal.waiting_micro_usd_per_hour / hourly)
    return min(policy.idle_seconds_max, again / place)


def dearest_first(views: Iterable[NodeView]) -> list[NodeView]:
    """Return the empty ones in the order in which they are let go, so that a small budget saves most."""
    empty = (view for view in views if view.empty_since is not None)
    return sorted(empty, key=lambda view: (-(view.price_micro_usd_per_hour or 0), view.name))


def places_counts(draft: Draft) -> Mapping[NodeUid, int]:
    """Return for each empty node which place it is for the next work, counted from 1: those that outlast it come first.

    What would take its work: usable nodes of its pool and GPU model with as many GPUs, as much CPU and memory free as
    the whole node has, and of the same capacity type, or on-demand. A node on which work is counted, is none.
    """
    going = draft.disturbing()
    free: dict[_Kind, list[tuple[NodeView, Resources]]] = defaultdict(list)
    counts: dict[NodeUid, int] = {}
    empty = dearest_first(draft.views)
    if not empty:
        return counts
    # As the room was made of: nothing is added up anew, whatever the cluster's size.
    rooms = {each.name: each.free for each in current_bins(draft.views, draft.pods) if each.standing is Standing.READY}
    for view in draft.views:
        room = rooms.get(view.name) if view.empty_since is None else None
        if room is None or not (room.has_gpus or not view.allocatable.has_gpus):
            continue
        if view.node_uid not in going and bin_key(view) not in draft.claimed:
            free[_kind(view)].append((view, room))
    for view in reversed(empty):  # the last to go is the first place
        if view.node_uid is None or not view.is_usable or view.node_uid in going:
            continue
        whole = free_room(view, draft.pods)
        counts[view.node_uid] = 1 + _places_count(view, whole, free[_kind(view)])
        if bin_key(view) not in draft.claimed and view.drain is None and view.notice is None:
            free[_kind(view)].append((view, whole))
    return counts


def _places_count(view: NodeView, whole: Resources, free: Iterable[tuple[NodeView, Resources]]) -> int:
    count = 0
    for other, room in free:
        is_alike = other.capacity_type in (view.capacity_type, CapacityType.ON_DEMAND)
        if is_alike and whole.gpu_count <= room.gpu_count:  # most that is free is too little, and seen at once
            count += _times(whole, room)
        if count >= PLACES_COUNT_MAX - 1:
            return PLACES_COUNT_MAX - 1
    return count


def _times(whole: Resources, room: Resources) -> int:
    """How often the room has what the node has whole. Pods and disk are not asked for: work rarely runs out of them."""
    asked = (
        (whole.cpu_milli, room.cpu_milli),
        (whole.memory_bytes, room.memory_bytes),
        (whole.gpu_count, room.gpu_count),
        *((count, dict(room.slices).get(kind, 0)) for kind, count in whole.slices),
    )
    return max(0, min((there // wanted for wanted, there in asked if wanted > 0), default=0))


def _kind(view: NodeView) -> _Kind:
    return view.pool, view.gpu_model
