"""Step `renew`: nodes that are sick, too old, likely to be taken, or not what the policy would buy today make way, and
those that never became what was bought while pods run on them.

Their work moves to nodes that are ready; where there is no room, a replacement is bought and waited for first. Drift
and expiry respect what must not be disturbed, expiry for as long as its overtime; sickness and a boot that failed do
not. With force only at the drain's deadline.
"""

from bisect import bisect_right
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.bins import bin_key
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.freshness import stale_watch
from gpu_autoscaler.core.nodes.booting import boot_timed_out, has_workload_pods
from gpu_autoscaler.core.nodes.life import NodePhase, NodeView
from gpu_autoscaler.core.policies.removal import RemovalCause
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.core.removing.moving import (
    moving_pods,
    place_elsewhere,
    protected_node,
    protected_pod,
    replacement_bought,
    too_soon,
)
from gpu_autoscaler.core.removing.pace import too_many_go
from gpu_autoscaler.core.removing.wear import drifted, expired, expires_at, hinted, is_overdue, sick, suspected
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import DrainNode, Deferred
from gpu_autoscaler.model.hints import RebalanceRecommended
from gpu_autoscaler.model.reasons import (
    BootTimedOut,
    DeferReason,
    NodeDrifted,
    NodeExpired,
    NodeUnhealthy,
    PodsFitNowhere,
    CapacityExpected,
    TooManyUnhealthy,
)

_STEP = "renew"


class _Due(msgspec.Struct, frozen=True):
    """A node that is to go, and whether it goes whatever runs there."""

    view: NodeView
    cause: RemovalCause
    reason: NodeUnhealthy | NodeExpired | NodeDrifted | RebalanceRecommended | BootTimedOut
    is_forced: bool


def renew(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Each node that is due drains, waits for its replacement, or is held back with what keeps it."""
    leaving = draft.leaving()
    due = [each for each in _due(draft, state, policy) if each.view.name not in leaving]
    if not due:
        return draft
    stale = stale_watch(state, policy, draft.as_of) or _too_many_sick(due, draft, policy)
    if isinstance(stale, TooManyUnhealthy):
        draft = draft.adding(deferred=[Deferred(step=_STEP, subject="cluster", reason=stale)])
        due = [each for each in due if not isinstance(each.reason, NodeUnhealthy)]
    elif stale is not None:
        return draft.adding(deferred=[Deferred(step=_STEP, subject="cluster", reason=stale)])
    for each in due:  # what has to go itself is no place for others
        if bin_key(each.view) in draft.room:
            draft.room.remove(bin_key(each.view))
    for each in sorted(due, key=lambda each: (each.cause is not RemovalCause.UNHEALTHY, not each.is_forced, each.view.name)):
        draft = _make_way(each, draft, state, policy)
    return draft


def _due(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Iterator[_Due]:
    reason: NodeUnhealthy | NodeExpired | None
    ages = _ages(draft.views, policy)
    is_sick: set[str] = set()
    suspects = suspected(state, policy)
    if suspects:
        for view in filter(_may_go, draft.views):
            if view.node_uid in suspects and (reason := sick(view, state, policy, draft.as_of)) is not None:
                is_sick.add(view.name)
                yield _Due(view, RemovalCause.UNHEALTHY, reason, is_forced=reason.is_fatal)
    yield from _late(draft, policy)
    if state.rebalance_recommended_at:
        for view in filter(_may_go, draft.views):
            hint = hinted(view, state, policy, draft.as_of) if view.phase is NodePhase.READY else None
            if hint is not None and view.name not in is_sick and bin_key(view) not in draft.claimed:
                is_sick.add(view.name)
                yield _Due(view, RemovalCause.REBALANCE_RECOMMENDED, hint, is_forced=False)
    for view in (*ages.drifted, *(ages.by_age[: bisect_right(ages.expires_at, draft.as_of)])):
        if view.phase is not NodePhase.READY or bin_key(view) in draft.claimed or view.name in is_sick:
            continue
        if (reason := expired(view, policy, draft.as_of)) is not None:
            yield _Due(view, RemovalCause.EXPIRED, reason, is_forced=is_overdue(reason, policy))
        elif (drift := drifted(view, policy)) is not None:
            yield _Due(view, RemovalCause.DRIFTED, drift, is_forced=False)


def _late(draft: Draft, policy: ScalingPolicy) -> Iterator[_Due]:
    for view in draft.views:
        if view.phase is NodePhase.FAILED and _may_go(view) and has_workload_pods(view, draft.pods):
            yield _Due(view, RemovalCause.UNHEALTHY, boot_timed_out(view, policy, draft.as_of), is_forced=True)


class _Ages(NamedTuple):
    """What age and drift say of nodes, which changes with them and the policy alone."""

    expires_at: list[datetime]  # ascending, of the nodes in `by_age`
    by_age: list[NodeView]
    drifted: list[NodeView]  # those that are not in `by_age`


@remembered(4)
def _ages(views: tuple[NodeView, ...], policy: ScalingPolicy) -> _Ages:
    by_age: list[tuple[datetime, str, NodeView]] = []
    others: list[NodeView] = []
    for view in views:
        at, is_drifted = _age(view, policy)
        if is_drifted:
            others.append(view)
        elif at is not None:
            by_age.append((at, view.name, view))
    by_age.sort(key=lambda each: each[:2])
    return _Ages([at for at, _, _ in by_age], [view for _, _, view in by_age], others)


@remembered(8192)
def _age(view: NodeView, policy: ScalingPolicy) -> tuple[datetime | None, bool]:
    """When the node is old enough to go, and whether it has drifted; nothing of one that may not go by choice."""
    if not _may_go(view):
        return None, False
    at = None if view.node is None else expires_at(view.name, view.node.created_at, policy)
    return at, drifted(view, policy) is not None


def _may_go(view: NodeView) -> bool:
    return view.is_ours and view.drain is None and view.notice is None and view.node_uid is not None


def _too_many_sick(due: list[_Due], draft: Draft, policy: ScalingPolicy) -> TooManyUnhealthy | None:
    unhealthy_count = sum(1 for each in due if isinstance(each.reason, NodeUnhealthy))
    nodes_count = sum(1 for view in draft.views if view.is_ours and view.usable_since is not None)
    rules = policy.removal
    if unhealthy_count <= max(rules.unhealthy_nodes_ok_count, rules.unhealthy_ratio_max * nodes_count):
        return None
    return TooManyUnhealthy(unhealthy_count=unhealthy_count, nodes_count=nodes_count, unhealthy_ratio_max=rules.unhealthy_ratio_max)


def _make_way(due: _Due, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    view, pods = due.view, moving_pods(due.view, draft)
    reason: DeferReason | None = None
    if not due.is_forced:
        reason = protected_node(view, draft) or protected_pod(pods, state, policy, draft.as_of, beside=_moved(draft))
    reason = reason or too_soon(view, state, policy, draft.as_of)
    if not isinstance(due.reason, BootTimedOut):  # such a node was never one of those that the limits keep
        reason = reason or too_many_go(view, due.cause, draft, policy)
    if reason is not None:
        return _held(draft, view, reason)
    mark = draft.room.mark()
    places = place_elsewhere((view,), pods, draft, state)
    if not places.homeless and not places.coming:
        draft = draft.adding(removals=[_drain(due, draft, policy)])
        return msgspec.structs.replace(draft, claimed=draft.claimed | places.hosts)
    draft.room.rollback(mark)
    if due.cause is RemovalCause.REBALANCE_RECOMMENDED and places.homeless:  # a hint is not worth another node
        return _held(draft, view, PodsFitNowhere(pods=tuple(pod.pod_uid for pod in places.homeless)))
    if not places.homeless:
        last = max(places.coming, key=lambda each: (each.expected_at is None, each.expected_at, each.key))
        return _held(draft, view, CapacityExpected(node=last.name, expected_at=last.expected_at))
    purchases, reason = replacement_bought(view, due.cause, places, draft, state, policy)
    return draft.adding(purchases=purchases) if reason is None else _held(draft, view, reason)


def _moved(draft: Draft) -> Iterator[PodObserved]:
    """Work on the nodes that this plan drains so far."""
    going = {each.node_uid for each in draft.removals if isinstance(each, DrainNode)}
    for view in draft.views:
        if view.node_uid in going:
            yield from moving_pods(view, draft)


def _held(draft: Draft, view: NodeView, reason: DeferReason) -> Draft:
    return draft.adding(deferred=[Deferred(step=_STEP, subject=f"node/{view.node_uid}", reason=reason)])


def _drain(due: _Due, draft: Draft, policy: ScalingPolicy) -> DrainNode:
    seconds = policy.removal.forced_drain_seconds if due.is_forced else policy.drain_seconds_max
    deadline_at = draft.as_of + timedelta(seconds=seconds)
    return draft.drain(due.view, due.reason, deadline_at=deadline_at, is_voluntary=not due.is_forced)
