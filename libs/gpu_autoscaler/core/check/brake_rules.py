"""Rules of the plan check on the brake: counted again from the recorded removals, without code of the planner."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import AnyDecision, DrainNode, ForcedRemoval, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.drain import NodeDeleted, NodeLost, NodeOrphaned, SpotReclaim

_HOUR = timedelta(hours=1)


def brake_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield removals by force that are not counted, beyond the limits of an hour, or made while the brake holds."""
    rules = policy.removal.brake
    if not rules.is_on:
        return
    forced = [decision for decision in plan.decisions if _ends_work(decision, state)]
    for decision in forced:
        if getattr(decision, "forced", None) is None:
            yield Violation(f"{decision.action_id} ends work by force, and the brake does not count it", decision)
    if not forced:
        return
    trip = state.brake
    if trip is not None and trip.tripped_at.isoformat() not in state.brake_releases:
        yield Violation(
            f"{len(forced)} nodes are removed by force, though the brake has held since {trip.tripped_at}", *forced
        )
    earlier = list(_earlier(state, plan.as_of))
    ours = sum(1 for node in state.nodes.values() if node.action_id is not None)
    count, share_max = len(earlier) + len(forced), rules.nodes_ratio_max * (ours + len(earlier) + len(forced)) + 1
    if rules.nodes_ratio_max < 1 and count > max(rules.nodes_ok_count, share_max):
        yield Violation(f"{count} of {ours} nodes would be removed by force within an hour", *forced)
    marks = [*earlier, *(mark for decision in forced if (mark := getattr(decision, "forced", None)) is not None)]
    price = sum(mark.price_micro_usd_per_hour or 0 for mark in marks)
    if price > rules.price_micro_usd_per_hour_max:
        yield Violation(
            f"nodes of {price} micro-dollars an hour would be removed by force within an hour, the limit is "
            f"{rules.price_micro_usd_per_hour_max}",
            *forced,
        )


def _ends_work(decision: AnyDecision, state: ClusterState) -> bool:
    match decision:
        case DrainNode(is_voluntary=False, reason=reason):
            return not isinstance(reason, SpotReclaim | NodeDeleted) and _has_pods(decision.node_uid, state)
        case ReleaseInstance(reason=NodeLost() | NodeOrphaned()):
            return all(node.action_id != decision.order_action_id for node in state.nodes.values())
        case _:
            return False


def _has_pods(node_uid: NodeUid, state: ClusterState) -> bool:
    node = state.nodes.get(node_uid)
    return node is not None and any(
        pod.node_name == node.name
        and pod.phase not in ("succeeded", "failed")
        and pod.owner_kind not in ("DaemonSet", "Node")
        for pod in state.pods.values()
    )


def _earlier(state: ClusterState, as_of: datetime) -> Iterator[ForcedRemoval]:
    """Yield the marks of the removals of the last hour, after the last trip that was ended."""
    since = as_of - _HOUR
    ended = [entry.tripped_at for entry in state.brake_releases.values() if entry.tripped_at is not None]
    for at in ended:
        since = max(since, at) if at <= as_of else since
    for record in state.drains.values():
        mark = None if record.decision is None else record.decision.forced
        if mark is not None and record.planned_at is not None and record.planned_at > since:
            yield mark
