"""Decisions of a lost stream that may still be in flight. Used once, before the first plan on a new stream.

An open decision restarts under its own idempotency token, and each step first checks whether it was done.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

from msgspec.structs import replace

from gpu_autoscaler.core.limits.limits import LimitUsage, billing_scope_of, subjects
from gpu_autoscaler.core.limits.spend import spend_caps, spend_snapshot_of
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.queries import counts_for_idleness, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, OrderRecord
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain, DrainNode, PastDecision, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId


def open_decisions(
    plans: Sequence[ScalingPlanMade], state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> tuple[PastDecision, ...]:
    """Return the open decisions of these plans, oldest first, by fresh lists in `state`. A purchase is open while its
    node is expected; a removal while its node is cordoned, or its instance not known to be terminated."""
    past = tuple(
        PastDecision(decision=decision, plan_id=fact.plan_id, planned_at=fact.plan.as_of)
        for fact in plans
        for decision in fact.plan.decisions
    )
    open_ = [decision for number, decision in enumerate(past) if _is_open(decision, past[number + 1 :], state, as_of)]
    views = node_views(_with_orders(open_, state), as_of)
    unseen = frozenset(view.order.action_id for view in views if view.order and view.phase is NodePhase.PLANNED)
    if _fit_limits(open_, unseen, state, policy, as_of):
        return tuple(open_)
    return tuple(replace(past, is_only_counted=True) if past.decision.action_id in unseen else past for past in open_)


def _with_orders(decisions: Iterable[PastDecision], state: ClusterState) -> ClusterState:
    orders = dict(state.orders)
    for past in decisions:
        if isinstance(past.decision, BuyNode):
            orders[past.decision.action_id] = OrderRecord(
                action_id=past.decision.action_id,
                plan_id=past.plan_id,
                decision=past.decision,
                planned_at=past.planned_at,
            )
    return replace(state, orders=orders)


def _fit_limits(
    decisions: Sequence[PastDecision],
    unseen: frozenset[ActionId],
    state: ClusterState,
    policy: ScalingPolicy,
    as_of: datetime,
) -> bool:
    """True if all unseen purchases fit the limits beside everything that is seen.

    Some were refused, and their replacements count already; which ones is unknown. Beyond a limit none is launched
    again: existing instances will show, and the others are released when they are late.
    """
    known = _with_orders([past for past in decisions if past.decision.action_id not in unseen], state)
    views = node_views(known, as_of)
    spend = spend_snapshot_of(known, views, pods_by_node(known), policy, as_of) if spend_caps(policy) else None
    usage = LimitUsage(views, policy, spend=spend)
    for past in decisions:
        decision = past.decision
        if isinstance(decision, BuyNode) and decision.action_id in unseen:
            scope = billing_scope_of(decision)
            if usage.excess(decision.pool, decision.offer, scope) is not None:
                return False
            usage.add(decision.pool, decision.offer, scope)
    return True


def _is_open(past: PastDecision, later: Sequence[PastDecision], state: ClusterState, as_of: datetime) -> bool:
    decision = past.decision
    match decision:
        case BuyNode():
            return _is_expected(decision, past, later, state, as_of)
        case DrainNode():
            node = state.nodes.get(decision.node_uid)
            # A node that is not cordoned: not started or canceled. It is decided again if necessary.
            return node is not None and node.is_cordoned and not any(_supersedes(decision, past) for past in later)
        case ReleaseInstance():
            return not _is_ended(decision.order_action_id, state)
        case CancelDrain():
            node = state.nodes.get(decision.node_uid)
            return node is not None and node.is_cordoned and not any(_drains(decision, past) for past in later)


def _is_expected(
    buy: BuyNode, past: PastDecision, later: Sequence[PastDecision], state: ClusterState, as_of: datetime
) -> bool:
    """True while the purchase may become a usable node, or is to be released."""
    decisions = (other.decision for other in later)
    releases = (decision.order_action_id for decision in decisions if isinstance(decision, ReleaseInstance))
    if buy.action_id in releases or _is_ended(buy.action_id, state):
        return False
    node = next((node for node in state.nodes.values() if node.action_id == buy.action_id), None)
    if node is not None:
        # A lost node looks like one that was never usable: a node with work is not released.
        is_empty = not any(counts_for_idleness(pod) for pod in pods_by_node(state).get(node.name, ()))
        is_usable = node.is_ready and node.allocatable.gpu_count >= buy.offer.resources.gpu_count
        return not is_usable and (as_of < buy.deadline_at or is_empty)
    if any(instance.action_id == buy.action_id for instance in state.instances.values()):
        return True
    # Not seen. Open unless something else was bought for the same demand since, which means that the cloud refused it;
    # the same token launches no second instance.
    return as_of < buy.deadline_at and not any(_replaces(buy, past, other) for other in later)


def _is_ended(order_action_id: ActionId, state: ClusterState) -> bool:
    ends = [seen.state == "terminated" for seen in state.instances.values() if seen.action_id == order_action_id]
    return bool(ends) and all(ends)


def _replaces(buy: BuyNode, past: PastDecision, later: PastDecision) -> bool:
    """True for a purchase of a later plan for some of the same demand."""
    if later.plan_id == past.plan_id or not isinstance(later.decision, BuyNode):
        return False
    return not set(subjects(buy)).isdisjoint(subjects(later.decision))


def _supersedes(drain: DrainNode, later: PastDecision) -> bool:
    if isinstance(later.decision, CancelDrain):
        return later.decision.drain_action_id == drain.action_id
    return _drains(drain, later)


def _drains(decision: DrainNode | CancelDrain, later: PastDecision) -> bool:
    return isinstance(later.decision, DrainNode) and later.decision.node_uid == decision.node_uid
