"""What it costs that no capacity pool has more than its share of spot, so that one shortage does not interrupt all.

Counted as decided: the price of each present node less that of the cheaper offer that the share excluded.
"""

from collections.abc import Sequence

from gpu_autoscaler.core.nodes.views import Counted, NodeView, table_of


def _spread_cost(view: NodeView) -> int | None:
    decision = None if view.order is None else view.order.decision
    if decision is None or not view.is_ours or not view.is_counted:
        return None
    return decision.spread_micro_usd_per_hour or None


_SPREAD_COSTS = Counted(_spread_cost)


def spread_micro_usd_per_hour(views: Sequence[NodeView]) -> int:
    """Return what these nodes cost an hour for the share of capacity pools."""
    return sum(cost * count for cost, count in table_of(views, _SPREAD_COSTS).items())
