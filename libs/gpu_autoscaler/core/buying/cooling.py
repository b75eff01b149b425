"""The scale-up cooldown: after a purchase for waiting work the next one waits, unless it is urgent. Off by default.

Urgent is work of high priority, work that loses its node to the cloud, and the rest of a gang that has nodes on order.
"""

from collections.abc import Mapping
from datetime import datetime

from gpu_autoscaler.core.demand_items import DemandItem, DemandSource
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.core.state import OrderRecord
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.reasons import Cooldown, UnmetDemand


def cooling(
    item: DemandItem, orders: Mapping[ActionId, OrderRecord], policy: ScalingPolicy, as_of: datetime
) -> Cooldown | None:
    """Return how long nothing is bought for the item because something was bought lately; None: it may be."""
    seconds = policy.limits.scale_up_cooldown_seconds
    if not seconds or item.priority >= PRIORITY_NAMES["high"] or item.source is DemandSource.AT_RISK_POD:
        return None
    last_at, gangs = _bought(orders)
    if last_at is None or (item.gang is not None and item.gang in gangs):
        return None
    remaining_seconds = seconds - (as_of - last_at).total_seconds()
    return Cooldown(remaining_seconds=remaining_seconds) if remaining_seconds > 0 else None


@remembered(4)
def _bought(orders: Mapping[ActionId, OrderRecord]) -> tuple[datetime | None, frozenset[str]]:
    """When something was bought last for waiting work, and the gangs that nodes were bought for."""
    bought = [
        (order.planned_at, order.decision)
        for order in orders.values()
        if order.decision is not None
        and order.planned_at is not None
        and isinstance(order.decision.reason, UnmetDemand)
    ]
    gangs = frozenset(decision.gang for _, decision in bought if decision.gang is not None)
    return max((at for at, _ in bought), default=None), gangs
