"""Disruption budgets: how many nodes may be removed at a time. The smallest active one that names the cause applies.

A share is rounded up; lost nodes count. An invalid budget allows nothing (Karpenter, "Disruption", read 2026-11-21).
"""

from collections.abc import Iterator
from datetime import datetime
from math import ceil

from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.limits.override_bounds import protecting_directive
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import Counted, NodeView, Selected
from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.defer_limits import (
    DisruptionBudgetReached,
    KeptByOverride,
    MinimumReached,
    PoolPaused,
)

# Our counted nodes, by whether they have been usable.
_OURS = Counted(lambda view: view.usable_since is not None if view.is_ours and view.is_counted else None)
_LOST = Selected(lambda view: view.is_ours and view.is_counted and view.phase is NodePhase.LOST)
_BOOTING = Selected(lambda view: view.is_booting and view.order is not None)


def removal_limit(
    view: NodeView, cause: RemovalCause, draft: Draft, policy: ScalingPolicy
) -> MinimumReached | DisruptionBudgetReached | PoolPaused | KeptByOverride | None:
    """Return which limit one more removal for this cause would exceed; None: it is allowed."""
    counts = draft.views.table(_OURS)
    staying_count = sum(counts.values()) - len(draft.leaving_nodes())
    if staying_count <= policy.nodes_count_min:
        return MinimumReached(nodes_count=staying_count, nodes_count_min=policy.nodes_count_min)
    if (kept := protecting_directive(view, draft)) is not None:
        return kept
    disrupting = draft.disrupted_nodes() | _awaiting_replacement(draft)
    if cause is not RemovalCause.UNHEALTHY:
        disrupting |= {lost.node_uid for lost in draft.views.table(_LOST) if lost.node_uid is not None}
    disrupting -= {view.node_uid}
    disrupting_count_max = removals_count_max(cause, counts.get(True, 0), policy, draft.as_of)
    if len(disrupting) >= disrupting_count_max:
        return DisruptionBudgetReached(disrupting_count=len(disrupting), disrupting_count_max=disrupting_count_max)
    return None


def removals_left(cause: RemovalCause, draft: Draft, policy: ScalingPolicy) -> int:
    """Return how many more nodes may be removed for this cause now, by budgets and minimum."""
    counts = draft.views.table(_OURS)
    disrupting = draft.disrupted_nodes() | _awaiting_replacement(draft)
    over_minimum = sum(counts.values()) - len(draft.leaving_nodes()) - policy.nodes_count_min
    return min(removals_count_max(cause, counts.get(True, 0), policy, draft.as_of) - len(disrupting), over_minimum)


def _awaiting_replacement(draft: Draft) -> set[NodeUid]:
    """Return the nodes whose replacement is on its way, or bought by this draft: they drain as soon as it is ready."""
    ordered = (view.order.decision for view in draft.views.table(_BOOTING) if view.order is not None)
    bought = (purchase.decision for purchase in draft.purchases)
    return {
        node_uid
        for decision in (*ordered, *bought)
        if decision is not None and isinstance(decision.reason, ReplacesNodes)
        for node_uid in decision.reason.node_uids
    }


def removals_count_max(cause: RemovalCause, nodes_count: int, policy: ScalingPolicy, as_of: datetime) -> int:
    """Return how many of this many nodes may be removed at this instant for this cause."""
    return min(_limits(cause, nodes_count, policy, as_of))


def _limits(cause: RemovalCause, nodes_count: int, policy: ScalingPolicy, as_of: datetime) -> Iterator[int]:
    yield share(policy.disruption_ratio_max, nodes_count)
    for budget in policy.removal.disruption_budgets:
        if budget.causes and cause not in budget.causes:
            continue
        if any(budget.violations()):
            yield 0
        elif budget.is_active(as_of):
            if budget.nodes_count_max is not None:
                yield budget.nodes_count_max
            if budget.nodes_ratio_max is not None:
                yield share(budget.nodes_ratio_max, nodes_count)


def share(ratio: float, nodes_count: int) -> int:
    """Return the share of the nodes, rounded up."""
    # 0.07 * 100 is a little more than 7 in floating point, and would be rounded up to 8.
    return ceil(round(ratio * nodes_count, 6))
