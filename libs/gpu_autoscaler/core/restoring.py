"""Which decisions of a lost stream may still be under way. Pure; asked once, before the first plan on a new stream.

The store of record says what was decided, Kubernetes and the cloud say what is there. Everything in between (ordered,
refused, cordoned, evicted) was in the stream: a decision that is open is begun again under its own token, and each of
its steps looks first whether it was taken.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.views import counts_for_idleness, pods_by_node
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, PastDecision, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons import BelowMinimum


def open_decisions(plans: Sequence[ScalingPlanMade], state: ClusterState, as_of: datetime) -> tuple[PastDecision, ...]:
    """Return the decisions of these plans that are to be carried on, in the order in which they were made.

    `plans` come oldest first; `state` has a fresh list of nodes, pods and instances. A purchase is open while its node
    is still expected; a removal while the node is cordoned for it, or its instance is not known to be gone.
    """
    past = tuple(_of(plans))
    return tuple(each for number, each in enumerate(past) if _is_open(each, past[number + 1 :], state, as_of))


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
        # A node that was usable and fell silent looks the same: where there is work, nothing is given back.
        is_empty = not any(counts_for_idleness(pod) for pod in pods_by_node(state).get(node.name, ()))
        return not node.is_ready and (as_of < buy.deadline_at or is_empty)
    if any(instance.action_id == buy.action_id for instance in state.instances.values()):
        return True
    # Not there, or not shown yet. Asked for again where nothing else was bought for the same demand since, which says
    # that the cloud refused; the same token makes no second instance.
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
    return frozenset(("cluster",) if isinstance(buy.reason, BelowMinimum) else buy.reason.demand)


def _settles(drain: DrainNode, later: PastDecision) -> bool:
    """True for the word that takes the drain back, or another drain of the same node."""
    decision: AnyDecision = later.decision
    if isinstance(decision, CancelDrain):
        return decision.drain_action_id == drain.action_id
    return _drains(drain, later)


def _drains(decision: DrainNode | CancelDrain, later: PastDecision) -> bool:
    return isinstance(later.decision, DrainNode) and later.decision.node_uid == decision.node_uid
