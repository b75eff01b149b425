"""Interruption rates of spot capacity pools (instance type and zone), with decay.

Every terminated instance counts once, in the hour of its end. Sums are integers: the rate does not depend on order.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.next_change import plain
from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.state import ClusterState, NoticeRecord, SpotTerminations
from gpu_autoscaler.events.node import InstanceState, NodeInstanceObserved
from gpu_autoscaler.model.decisions import DrainNode, ReleaseInstance
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType, Offer

# In recorded spot traces, interrupted fleets regained their size within three to nine hours.
HALF_LIFE_HOURS = 6
# Ended instances are known for six whole hours (`core/state/retention.py`), so that running times can be added up.
MEASURED_HOURS = 6
_WHOLE = 1 << 16  # weight of a termination in this hour

# Prior of a capacity pool without history: one interruption of twenty, the lowest band of AWS ("Spot Instance advisor",
# read 2026-11-21).
ASSUMED_INTERRUPTED_COUNT, ASSUMED_COUNT = 1, 20


def terminations_by_pool(state: ClusterState, as_of: datetime) -> Mapping[str, tuple[int, int]]:
    """Return the weights of interrupted and of all instances of each capacity pool: ended ones by age, running ones in
    full; one under notice counts as interrupted."""
    running = _running(state.instances, state.notices)
    hour_now = hour(as_of)
    weights: dict[str, tuple[int, int]] = {}
    for pool in running.keys() | state.spot_terminations.keys():
        present = running.get(pool, _NONE)
        interrupted, total = _WHOLE * present.noticed_count, _WHOLE * present.count
        for ended_in, terminations in state.spot_terminations.get(pool, {}).items():
            weight = _weight(hour_now - ended_in)
            interrupted += weight * terminations.interrupted_count
            total += weight * terminations.count
        weights[pool] = (interrupted, total)
    return weights


def rate_of(offer: Offer, weights: Mapping[str, tuple[int, int]]) -> float:
    """Return the share of nodes of this offer, 0 to 1, that the cloud interrupts; 0 unless spot.

    The history counts on top of the published or assumed rate.
    """
    if offer.capacity_type is not CapacityType.SPOT:
        return 0.0
    interrupted, total = weights.get(capacity_pool_of(offer.instance_type, offer.zone), (0, 0))
    published = offer.interruption_ratio
    assumed = ASSUMED_INTERRUPTED_COUNT if published is None else published * ASSUMED_COUNT
    return (interrupted + _WHOLE * assumed) / (total + _WHOLE * ASSUMED_COUNT)


def interruption_seconds(state: ClusterState, capacity_pools: Iterable[str], as_of: datetime) -> float | None:
    """Return the mean time until the cloud interrupts one of several spot nodes, given by the capacity pool of each:
    running time over interruptions in the last MEASURED_HOURS; None: no interruption was measured."""
    first_hour = hour(as_of) - MEASURED_HOURS + 1
    start = datetime.fromtimestamp(first_hour * 3600, UTC)
    ran_seconds: Counter[str] = Counter()
    for instance in state.instances.values():
        if instance.capacity_type is CapacityType.SPOT:
            end = instance.terminated_at or plain(as_of)
            seconds = (end - max(instance.launched_at, start)).total_seconds()
            ran_seconds[capacity_pool_of(instance.instance_type, instance.zone)] += max(0, round(seconds))
    per_second = 0.0
    for pool, nodes_count in Counter(capacity_pools).items():
        ends = state.spot_terminations.get(pool, {})
        interrupted = sum(counts.interrupted_count for ended_in, counts in ends.items() if ended_in >= first_hour)
        if ran_seconds[pool]:
            per_second += nodes_count * interrupted / ran_seconds[pool]
    return None if per_second == 0.0 else 1.0 / per_second


def capacity_pool_of(instance_type: str, zone: str) -> str:
    """Return the capacity pool: an instance type in a zone."""
    return f"{instance_type}/{zone}"


def add_termination(
    known: Mapping[int, SpotTerminations] | None, ended_at: datetime, *, is_reclaimed: bool
) -> Mapping[int, SpotTerminations]:
    """Return the terminations of a capacity pool by hour, with one more."""
    before = (known or {}).get(hour(ended_at), SpotTerminations())
    after = replace(before, count=before.count + 1, interrupted_count=before.interrupted_count + is_reclaimed)
    return {**(known or {}), hour(ended_at): after}


def is_reclaimed(state: ClusterState, provider_id: ProviderId, now_is: InstanceState) -> bool:
    """True for an instance that ends under an active notice, or without a decision of ours. The first answer is kept: a
    later release does not make an interruption voluntary."""
    if now_is not in ("terminating", "terminated"):
        return False
    known = state.instances.get(provider_id)
    if known is not None and known.is_reclaimed:
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
    """Halve per half-life, linear in between."""
    halvings, rest = divmod(max(0, age_hours), HALF_LIFE_HOURS)
    whole = _WHOLE >> halvings
    return whole - whole * rest // (2 * HALF_LIFE_HOURS)


class _Running(msgspec.Struct, frozen=True):
    """Running spot instances of one capacity pool."""

    count: int = 0
    noticed_count: int = 0


_NONE = _Running()


@cached_by_identity(2)
def _running(
    instances: Mapping[ProviderId, NodeInstanceObserved], notices: Mapping[str, NoticeRecord]
) -> Mapping[str, _Running]:
    noticed = {record.notice.provider_id for record in notices.values() if record.is_active}
    counts: Counter[str] = Counter()
    noticed_counts: Counter[str] = Counter()
    for instance in instances.values():
        if instance.capacity_type is CapacityType.SPOT and instance.state != "terminated":
            pool = capacity_pool_of(instance.instance_type, instance.zone)
            counts[pool] += 1
            noticed_counts[pool] += instance.provider_id in noticed
    return {pool: _Running(count, noticed_counts[pool]) for pool, count in counts.items()}
