"""Which kinds of node went by our choice a moment ago: none of those is bought again just to save money.

What was idle when it went may be wanted as the cheaper place of other work soon after. Work that waits does not ask.
"""

from collections.abc import Mapping
from datetime import datetime

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, DrainNode
from gpu_autoscaler.model.reasons import Cooldown


def gone_lately(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Mapping[str, float]:
    """Return the instance types of which a node was told to go within the cooldown, with the seconds that remain."""
    remaining: dict[str, float] = {}
    for record in state.drains.values():
        drain = record.decision
        if not isinstance(drain, DrainNode) or not drain.is_voluntary or record.planned_at is None:
            continue
        seconds = policy.scale_down_cooldown_seconds - (as_of - record.planned_at).total_seconds()
        if seconds <= 0 or record.cancelled is not None or drain.provider_id is None:
            continue
        instance = state.instances.get(drain.provider_id)
        node = state.nodes.get(drain.node_uid)
        kind = instance.instance_type if instance is not None else None if node is None else node.instance_type
        if kind is not None:
            remaining[kind] = max(seconds, remaining.get(kind, 0.0))
    return remaining


def too_soon_to_buy(decisions: tuple[BuyNode, ...], gone: Mapping[str, float]) -> Cooldown | None:
    """Return how long one of these kinds is not bought again; None: none of them went lately."""
    seconds = max((gone.get(each.offer.instance_type, 0.0) for each in decisions), default=0.0)
    return Cooldown(remaining_seconds=seconds) if seconds > 0 else None
