"""Which decisions of a lost stream may still be under way. Pure; asked once, before the first plan on a new stream.

The store of record says what was decided, Kubernetes and the cloud say what is there. Everything in between (ordered,
refused, cordoned, evicted) was in the stream: a decision that is open is begun again under its own token, and each of
its steps looks first whether it was taken.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from msgspec.structs import replace

from gpu_autoscaler.core.limits.limits import LimitUsage, billing_scope_of
from gpu_autoscaler.core.limits.spend import spend_caps, spend_snapshot_of
from gpu_autoscaler.core.nodes.views import NodePhase, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.queries import counts_for_idleness, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, OrderRecord
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, PastDecision, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons.buy import BelowMinimum, UtilizationHigh


def open_decisions(
    plans: Sequence[ScalingPlanMade], state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> tuple[PastDecision, ...]:
    """Return the decisions of these plans that are to be carried on, in the order in which they were made.

    `plans` come oldest first; `state` has a fresh list of nodes, pods and instances. A purchase is open while its node
    is still expected; a removal while the node is cordoned for it, or its instance is not known to be gone.
    """
    past = tuple(_of(plans))
    found = [each for number, each in enumerate(past) if _is_open(each, past[number + 1 :], state, as_of)]
    unseen = _unseen(found, state, as_of)
    if _have_room(found, unseen, state, policy, as_of):
        return tuple(found)
    return tuple(replace(each, is_only_counted=True) if each.decision.action_id in unseen else each for each in found)


def _with_orders(found: Iterable[PastDecision], state: ClusterState) -> ClusterState:
    """What is known with the purchases that go on."""
    orders = dict(state.orders)
    for past in found:
        if isinstance(past.decision, BuyNode):
            orders[past.decision.action_id] = OrderRecord(
                action_id=past.decision.action_id,
                plan_id=past.plan_id,
                decision=past.decision,
                planned_at=past.planned_at,
            )
    return replace(state, orders=orders)


def _unseen(found: Sequence[PastDecision], state: ClusterState, as_of: datetime) -> frozenset[ActionId]:
    """Purchases of which neither Kubernetes nor the cloud shows anything."""
    views = node_views(_with_orders(found, state), as_of)
    return frozenset(view.order.action_id for view in views if view.order and view.phase is NodePhase.PLANNED)


def _have_room(
    found: Sequence[PastDecision],
    unseen: frozenset[ActionId],
    state: ClusterState,
    policy: ScalingPolicy,
    as_of: datetime,
) -> bool:
    """True where all that is not seen may exist beside all that is, within every limit.

    Some of it was refused, and what was bought in its place counts already; which of it is not known. So beyond a limit
    none is asked for again: those that do exist show, and the others are given back when they are late.
    """
    seen = [each for each in found if each.decision.action_id not in unseen]
    known = _with_orders(seen, state)
    views = node_views(known, as_of)
    books = spend_snapshot_of(known, views, pods_by_node(known), policy, as_of) if spend_caps(policy) else None
    account = LimitUsage(views, policy, books=books)
    for past in found:
        decision = past.decision
        if isinstance(decision, BuyNode) and decision.action_id in unseen:
            customer = billing_scope_of(decision)
            if account.excess(decision.pool, decision.offer, customer) is not None:
                return False
            account.add(decision.pool, decision.offer, customer)
    return True


def _of(plans: Iterable[ScalingPlanMade]) -> Iterator[PastDecision]:
    for fact in plans:
        for decision in fact.plan.decisions:
            yield PastDecision(decision=decision, plan_id=fact.plan_id, planned_at=fact.plan.as_of)


def _is_open(past: PastDecision, later: Sequence[PastDecision], state: ClusterState, as_of: datetime) -> bool:
    decision = past.decision
    match decision:
        case BuyNode():
            return _is_expected(decision, past, later, state, as_of)
        case DrainNode():
            node = state.nodes.get(decision.node_uid)
            # One that is not cordoned was not begun, or is given up: it is decided anew, on what is seen now.
            return node is not None and node.is_cordoned and not any(_settles(decision, each) for each in later)
        case ReleaseInstance():
            return not _is_ended(decision.order_action_id, state)
        case CancelDrain():
            node = state.nodes.get(decision.node_uid)
            return node is not None and node.is_cordoned and not any(_drains(decision, each) for each in later)


def _is_expected(
    buy: BuyNode, past: PastDecision, later: Sequence[PastDecision], state: ClusterState, as_of: datetime
) -> bool:
    """True while the purchase may still become a node that is usable, or has become something to be given back."""
    if any(_releases(buy, each) for each in later) or _is_ended(buy.action_id, state):
        return False
    node = next((node for node in state.nodes.values() if node.action_id == buy.action_id), None)
    if node is not None:
        # A node that was usable and fell silent, or lost its GPUs, looks like one that never was: where there is work,
        # nothing is given back.
        is_empty = not any(counts_for_idleness(pod) for pod in pods_by_node(state).get(node.name, ()))
        is_usable = node.is_ready and node.allocatable.gpu_count >= buy.offer.resources.gpu_count
        return not is_usable and (as_of < buy.deadline_at or is_empty)
    if any(instance.action_id == buy.action_id for instance in state.instances.values()):
        return True
    # Not there, or not shown yet. Open where nothing else was bought for the same demand since, which says that the
    # cloud refused; the same token makes no second instance.
    return as_of < buy.deadline_at and not any(_replaces(buy, past, each) for each in later)


def _is_ended(order_action_id: ActionId, state: ClusterState) -> bool:
    ends = [one.state == "terminated" for one in state.instances.values() if one.action_id == order_action_id]
    return bool(ends) and all(ends)


def _releases(buy: BuyNode, later: PastDecision) -> bool:
    decision = later.decision
    return isinstance(decision, ReleaseInstance) and decision.order_action_id == buy.action_id


def _replaces(buy: BuyNode, past: PastDecision, later: PastDecision) -> bool:
    """True for a purchase of a later plan that serves some of the same demand."""
    if later.plan_id == past.plan_id or not isinstance(later.decision, BuyNode):
        return False
    return bool(_demand(buy) & _demand(later.decision))


def _demand(buy: BuyNode) -> frozenset[str]:
    return frozenset(("cluster",) if isinstance(buy.reason, BelowMinimum | UtilizationHigh) else buy.reason.demand)


def _settles(drain: DrainNode, later: PastDecision) -> bool:
    """True for the word that takes the drain back, or another drain of the same node."""
    decision: AnyDecision = later.decision
    if isinstance(decision, CancelDrain):
        return decision.drain_action_id == drain.action_id
    return _drains(drain, later)


def _drains(decision: DrainNode | CancelDrain, later: PastDecision) -> bool:
    return isinstance(later.decision, DrainNode) and later.decision.node_uid == decision.node_uid
