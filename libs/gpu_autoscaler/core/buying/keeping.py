"""Whether a node that is on its way out is kept for work that came, or a new one bought. Used by `core/scale_up.py`."""

import numpy as np

from gpu_autoscaler.core.buying.market import Market
from gpu_autoscaler.core.nodes.life import NodePhase, NodeView
from gpu_autoscaler.core.placing.shapes import Shape
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.model.decisions import DrainNode

_HOUR_SECONDS = 3600.0


def is_cheaper_kept(view: NodeView, shape: Shape, count: int, market: Market, policy: ScalingPolicy) -> bool:
    """True unless so many members of the shape would be had for less on new nodes of one kind.

    A new node is paid for while it boots and nobody can use it yet; over the horizon for which it would stand, that
    makes it dearer. What has no price is no bargain: the node that is there stays.
    """
    members = market.members(shape)
    sold = np.flatnonzero(members)
    horizon_seconds = policy.removal.replacement_payback_hours * _HOUR_SECONDS
    if view.price_micro_usd_per_hour is None or not sold.size or not horizon_seconds:
        return True
    overhead = policy.node_overhead_micro_usd_per_hour
    nodes = -(-count // members[sold])
    hourly = (market.prices_micro_usd_per_hour[sold] + overhead) * nodes
    anew = hourly * (1.0 + market.boot_seconds[sold] / horizon_seconds)
    return bool(view.price_micro_usd_per_hour + overhead <= anew.min())


def callable_drain(view: NodeView) -> DrainNode | None:
    """Return the drain that can still be cancelled: of a node that leaves by our choice alone and is not empty yet."""
    record, node = view.drain, view.node
    if record is None or record.drained is not None or record.cancel is not None or view.notice is not None:
        return None
    if node is None or not node.is_ready or view.phase not in (NodePhase.CORDONED, NodePhase.DRAINING):
        return None
    return record.decision if isinstance(record.decision, DrainNode) and record.decision.is_voluntary else None
