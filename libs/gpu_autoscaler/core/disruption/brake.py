"""The brake: no more nodes are removed by force within an hour than the policy allows; then a person has to resume.

By force: work ends that did not agree, or that cannot be asked because its node is unknown, and neither a notice of the
cloud nor the deletion of the node by a user is the cause. A node without work is never held.
"""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from gpu_autoscaler.core.disruption.disruption_budgets import share
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.limits.override_bounds import frozen_by
from gpu_autoscaler.core.next_change import plain
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.forced_removals import PastRemoval, removed_by_force
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import DrainNode, ForcedRemoval, ReleaseInstance
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped

Removal = TypeVar("Removal", DrainNode, ReleaseInstance)


def has_work(view: NodeView, draft: Draft) -> bool:
    """True if the removal of the node ends work, or may: what runs on an instance without a node is unknown."""
    return view.node is None or any(map(counts_for_idleness, draft.pods.get(view.name, ())))


def held_by(view: NodeView, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> BrakeTripped | None:
    """Return the trip of the brake that holds the removal of this node by force; None: it may be removed.

    A removal that would exceed a limit trips the brake: pass the result on to `held`. Nothing trips under a freeze,
    which defers the removal itself.
    """
    rules = policy.removal.brake
    if not rules.is_on or not has_work(view, draft) or frozen_by(draft.directives, policy) is not None:
        return None
    if draft.brake is not None:
        return draft.brake
    earlier = removed_by_force(state, draft.as_of)
    marks = [removal.forced for removal in draft.removals if removal.forced is not None]
    nodes_count_max = max(rules.nodes_ok_count, share(rules.nodes_ratio_max, _nodes_count(draft, earlier)))
    price = _sum([past.forced for past in earlier] + marks + [_mark(view, draft)])
    price_max = rules.price_micro_usd_per_hour_max
    nodes_count = len(earlier) + len(marks)
    is_within_nodes = nodes_count < nodes_count_max or rules.nodes_ratio_max >= 1
    if is_within_nodes and price is not None and price <= price_max:
        return None
    return BrakeTripped(
        tripped_at=plain(draft.as_of),
        node=view.name,
        nodes_count=nodes_count,
        nodes_count_max=nodes_count_max,
        price_micro_usd_per_hour=price,
        price_micro_usd_per_hour_max=price_max,
        is_of_price=is_within_nodes,
    )


def held(draft: Draft, step: str, subject: str, brake: BrakeTripped) -> Draft:
    """Defer the removal; everything that is forced later in the plan is held as well."""
    return msgspec.structs.replace(draft, brake=brake).deferring(step, subject, brake)


def marked(removal: Removal, view: NodeView, draft: Draft) -> Removal:
    """Return the removal as one that counts for the brake, if it ends work."""
    return msgspec.structs.replace(removal, forced=_mark(view, draft)) if has_work(view, draft) else removal


def _mark(view: NodeView, draft: Draft) -> ForcedRemoval:
    price = view.price_micro_usd_per_hour
    if price is None:
        known = [view.price_micro_usd_per_hour for view in draft.views if view.price_micro_usd_per_hour is not None]
        price = max(known, default=None)
    return ForcedRemoval(price_micro_usd_per_hour=price)


def _sum(marks: Iterable[ForcedRemoval]) -> int | None:
    """Return the price of all; None if one is unknown."""
    total = 0
    for mark in marks:
        if mark.price_micro_usd_per_hour is None:
            return None
        total += mark.price_micro_usd_per_hour
    return total


def _nodes_count(draft: Draft, earlier: Iterable[PastRemoval]) -> int:
    """Return how many nodes there were before the removals: usable ones, and those that are gone since."""
    usable = {view.node_uid or view.action_id for view in draft.views if view.is_ours and view.usable_since is not None}
    return len(usable | {past.node for past in earlier})
