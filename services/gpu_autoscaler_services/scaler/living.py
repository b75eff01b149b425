"""What the scaler publishes again before its stream discards it: everything open in the state but pods and jobs.

The scaler does it also for facts of others (notices, directives, policy documents): they come from many short-lived
publishers, and of the scaler one process is active.
"""

from collections.abc import Iterator
from datetime import datetime

from gpu_autoscaler.core.state.forced_removals import is_recent
from gpu_autoscaler.core.state.queries import listed_instances
from gpu_autoscaler.core.state.retention import drain_ended_at, is_past_retention, order_ended_at
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, OrderRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted, PolicyDocumentsAccepted
from gpu_autoscaler.events.scaling import ScalingDrainResynced, ScalingNodeTerminated, ScalingOrderResynced

RESYNCED: tuple[type[Fact], ...] = (
    ScalingOrderResynced,
    ScalingDrainResynced,
    PolicyDirectiveGiven,
    PolicyDirectiveLifted,
    PolicyDocumentsAccepted,
)


def living(state: ClusterState) -> Iterator[Fact]:
    """Yield the facts of living instances, active notices, open decisions, valid directives and policy documents.

    An instance that has ended, and its order, until the ledger has charged it: the cost tracker may have been away.
    Of the brake: removals by force for an hour, also ended ones, and by whom its last trip was ended.
    """
    if state.instances_listed_at is not None:
        listed = listed_instances(state.instances_seen_at, state.instances_listed_at)
        yield from (fact for key, fact in state.instances.items() if key in listed or _is_uncharged(fact, state))
    yield from (record.notice for record in state.notices.values() if record.is_active)
    for order in state.orders.values():
        if order_ended_at(order) is None or _is_uncharged(order.terminated, state):
            yield _order(order)
    planned = state.newest.get("scaling")
    for drain in state.drains.values():
        if drain_ended_at(drain) is None or (planned is not None and is_recent(drain, planned)):
            yield _drain(drain)
    newest = state.newest.get("policy")
    for record in state.directives.values():
        if record.lifted is None and newest is not None and record.given.until > newest:
            yield record.given
    if state.brake_releases:
        trip = "" if state.brake is None else state.brake.tripped_at.isoformat()
        yield state.brake_releases.get(trip) or state.brake_releases[max(state.brake_releases)]
    if state.policy_documents is not None:
        yield state.policy_documents


def uncharged_ends(lost: ClusterState, state: ClusterState, now: datetime) -> Iterator[Fact]:
    """Yield the ends that lost streams had, the ledger may lack and the state does not know: the
    cloud does not list an instance any more an hour after its end.
    """
    for key, instance in lost.instances.items():
        if key not in state.instances and _is_due(instance, lost, state, now):
            yield instance
    for order in lost.orders.values():
        if order.action_id not in state.orders and _is_due(order.terminated, lost, state, now):
            yield _order(order)


def _is_due(
    ended: NodeInstanceObserved | ScalingNodeTerminated | None, lost: ClusterState, state: ClusterState, now: datetime
) -> bool:
    """True for an uncharged end that the state keeps when it is published."""
    if ended is None or ended.terminated_at is None or is_past_retention(ended.terminated_at, now):
        return False
    return _is_uncharged(ended, lost) and _is_uncharged(ended, state)


def _is_uncharged(ended: NodeInstanceObserved | ScalingNodeTerminated | None, state: ClusterState) -> bool:
    """True if the instance is known to have ended, and the ledger has not charged it to its end."""
    if ended is None or ended.provider_id is None or ended.terminated_at is None:
        return False
    charge = state.charges.get(ended.provider_id)
    return charge is None or not (charge.is_final or charge.until_at >= ended.terminated_at)


def _order(order: OrderRecord) -> ScalingOrderResynced:
    return ScalingOrderResynced(
        action_id=order.action_id,
        plan_id=order.plan_id,
        decision=order.decision,
        planned_at=order.planned_at,
        ordered=order.ordered,
        launched=order.launched,
        terminated=order.terminated,
    )


def _drain(drain: DrainRecord) -> ScalingDrainResynced:
    return ScalingDrainResynced(
        action_id=drain.action_id,
        plan_id=drain.plan_id,
        decision=drain.decision,
        planned_at=drain.planned_at,
        started=drain.started,
        drained=drain.drained,
        cancel=drain.cancel,
        cancelled=drain.cancelled,
        terminated=drain.terminated,
    )
