"""Cooldowns of purchases, and of removals by choice.

Scale-up (off by default): after a purchase for waiting work the next one waits, unless it is urgent: work of high
priority, work that loses its node to the cloud, and the rest of a gang that has nodes on order.
Scale-down: after a plan that removes nodes of a pool by choice, the pool keeps its nodes for a while. Unhealthy nodes
and nodes that the cloud may interrupt never wait.
Re-buy: an instance type that was removed by choice recently is not bought again just to save money.
"""

from collections.abc import Mapping
from datetime import datetime

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.pools import removal_cooldown_seconds
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, OrderRecord
from gpu_autoscaler.model.decisions import BuyNode, DrainNode
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_limits import Cooldown
from gpu_autoscaler.model.reasons.drain import NodeUnhealthy

_URGENT = (RemovalCause.UNHEALTHY, RemovalCause.REBALANCE_RECOMMENDED)


def scale_up_cooldown(
    item: DemandItem, orders: Mapping[ActionId, OrderRecord], policy: ScalingPolicy, as_of: datetime
) -> Cooldown | None:
    """Return how long nothing is bought for the item because of a recent purchase; None: it may be bought for."""
    seconds = policy.limits.scale_up_cooldown_seconds
    if not seconds or item.priority >= PRIORITY_NAMES["high"] or item.source is DemandSource.AT_RISK_POD:
        return None
    last_at, gangs = _bought(orders)
    if last_at is None or (item.gang is not None and item.gang in gangs) or has_lasted(last_at, seconds, as_of):
        return None
    return Cooldown(remaining_seconds=seconds - (as_of - last_at).total_seconds())


@cached_by_identity(4)
def _bought(orders: Mapping[ActionId, OrderRecord]) -> tuple[datetime | None, frozenset[str]]:
    """Return when something was last bought for waiting work, and the gangs that nodes were bought for."""
    bought = [
        (order.planned_at, order.decision)
        for order in orders.values()
        if order.decision is not None
        and order.planned_at is not None
        and isinstance(order.decision.reason, UnmetDemand)
    ]
    gangs = frozenset(decision.gang for _, decision in bought if decision.gang is not None)
    return max((at for at, _ in bought), default=None), gangs


def recently_removed_types(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Mapping[str, float]:
    """Return the instance types of nodes drained by choice within the cooldown, with the seconds that remain."""
    remaining: dict[str, float] = {}
    for record in state.drains.values():
        drain = record.decision
        if not isinstance(drain, DrainNode) or not drain.is_voluntary or record.planned_at is None:
            continue
        if record.cancelled is not None or drain.provider_id is None:
            continue
        if has_lasted(record.planned_at, policy.scale_down_cooldown_seconds, as_of):
            continue
        seconds = policy.scale_down_cooldown_seconds - (as_of - record.planned_at).total_seconds()
        instance = state.instances.get(drain.provider_id)
        node = state.nodes.get(drain.node_uid)
        instance_type = instance.instance_type if instance is not None else None if node is None else node.instance_type
        if instance_type is not None:
            remaining[instance_type] = max(seconds, remaining.get(instance_type, 0.0))
    return remaining


def rebuy_cooldown(decisions: tuple[BuyNode, ...], removed: Mapping[str, float]) -> Cooldown | None:
    """Return how long one of these instance types is not bought again; None: none of them was removed recently."""
    seconds = max((removed.get(decision.offer.instance_type, 0.0) for decision in decisions), default=0.0)
    return Cooldown(remaining_seconds=seconds) if seconds > 0 else None


def removal_cooldown(
    pool: str | None, cause: RemovalCause, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> Cooldown | None:
    """Return how long no node of the pool is removed for this cause; None: one may be."""
    seconds = removal_cooldown_seconds(policy, pool)
    if not seconds or cause in _URGENT:
        return None
    last_at = _last_removals(state.drains, state.orders).get(pool)
    if last_at is None or has_lasted(last_at, seconds, as_of):
        return None
    return Cooldown(remaining_seconds=seconds - (as_of - last_at).total_seconds())


@cached_by_identity(4)
def _last_removals(
    drains: Mapping[ActionId, DrainRecord], orders: Mapping[ActionId, OrderRecord]
) -> Mapping[str | None, datetime]:
    """Return when nodes of each pool were last removed by choice. A canceled drain removed none."""
    pools = {
        order.launched.provider_id: order.decision.pool
        for order in orders.values()
        if order.launched is not None and order.decision is not None
    }
    last: dict[str | None, datetime] = {}
    for record in drains.values():
        drain = record.decision
        if not isinstance(drain, DrainNode) or not drain.is_voluntary or isinstance(drain.reason, NodeUnhealthy):
            continue
        if record.planned_at is None or record.cancelled is not None or drain.provider_id not in pools:
            continue
        pool = pools[drain.provider_id]
        last[pool] = max(record.planned_at, last.get(pool, record.planned_at))
    return last
