"""Step `enforce_spend_budgets`: removes nodes, cheapest to lose first, before a hard spend budget is exceeded.

Work keeps the spend reserved for it in the order of the cost of its loss, as far as the budget reaches. The other nodes
run on the rest while each can still be drained in time. Protected work is never removed; an excess is reported.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

from gpu_autoscaler.core.demand.sources import job_spec, pod_priority
from gpu_autoscaler.core.disruption import brake
from gpu_autoscaler.core.disruption.protection import checkpointed_at, node_protection, pod_mark
from gpu_autoscaler.core.disruption.repack import moving_pods
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.limits.spend import (
    ENDING_SECONDS,
    SpendCap,
    SpendSnapshot,
    UnbilledTime,
    spend_caps,
    spend_snapshot_of,
)
from gpu_autoscaler.core.next_change import TrackedInstant, note, note_always
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView, bin_key
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import Deferred, ReleaseInstance
from gpu_autoscaler.model.reasons.defer_limits import SpendEnforcementBlocked
from gpu_autoscaler.model.reasons.drain import SpendExhausted

_STEP = "enforce_spend_budgets"
# From one plan to the next, with a margin: nothing can be decided in between.
_REACTION_SECONDS = 60.0
_SECONDS_PER_HOUR = 3600
_OVER = (NodePhase.DRAINED, NodePhase.TERMINATING, NodePhase.FAILED)


class _NodeAtRisk(NamedTuple):
    """A running node, and the cost of losing it."""

    view: NodeView
    unbilled: UnbilledTime
    protection: str | None  # it is not removed, whatever it costs
    worth: tuple[int, int, int, str]  # priority, lost work, negated price, name: the smallest is removed first
    lost_seconds: float  # work that would be repeated; it grows unless it is zero
    leaving_seconds: float  # from the decision to the end of its bill

    @property
    def lost(self) -> tuple[float, float]:
        """Micro-dollars of lost work that each second adds, and those so far."""
        per_second = (self.unbilled.price_micro_usd_per_hour or 0) / _SECONDS_PER_HOUR
        return (per_second if self.lost_seconds else 0.0), per_second * self.lost_seconds

    def micro_usd(self, seconds: float) -> int:
        """Return its cost in this time, rounded up."""
        return round((self.unbilled.price_micro_usd_per_hour or 0) * seconds / _SECONDS_PER_HOUR) + 1

    @property
    def drain_micro_usd(self) -> int:
        """What it still costs if it is removed now."""
        return self.micro_usd(self.leaving_seconds)


def enforce_spend_budgets(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Remove in time the nodes that a hard spend budget cannot pay for; report protected ones."""
    hard = [cap for cap in spend_caps(policy) if cap.is_hard]
    if not hard:
        return draft
    snapshot = spend_snapshot_of(state, draft.views, draft.pods, policy, draft.as_of)
    for cap in hard:
        draft = _within(cap, snapshot, draft, state, policy)
    return draft


def _within(cap: SpendCap, snapshot: SpendSnapshot, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    left = cap.micro_usd_max - snapshot.spent[cap]
    claims = {unbilled.name: unbilled for unbilled in snapshot.unbilled(cap)}
    leaving = draft.leaving_nodes()
    nodes: list[_NodeAtRisk] = []
    for view in draft.views:
        unbilled = claims.get(view.name)
        if unbilled is None:
            continue
        if view.name in leaving or view.phase in _OVER or view.notice is not None:
            left -= snapshot.reserved_for(unbilled, cap)
        else:
            nodes.append(_node_at_risk(view, unbilled, draft, state, policy))
    nodes.sort(key=lambda node_at_risk: (node_at_risk.protection is not None, node_at_risk.worth))
    left, running = _reserve(nodes, left, snapshot, cap)
    if running:
        _note_order(nodes, draft.as_of)
    due = _due(running, left)
    if not due:
        return draft
    unknown = snapshot.unknown_reason(cap) or stale_watch(state, policy, draft.as_of)
    if unknown is not None:  # an error here would end work that the budget can pay for
        return draft.adding(deferred=[Deferred(step=_STEP, subject="cluster", reason=unknown)])
    for node_at_risk in due:
        draft = _remove(node_at_risk, cap, snapshot, left, draft, state, policy)
    return draft


def _note_order(nodes: Sequence[_NodeAtRisk], as_of: datetime) -> None:
    """Note when the order of these sorted nodes may change: the work that each would lose grows with its price.

    What is lost is rounded: the order of two nodes may change as soon as they differ by one micro-dollar.
    """
    if not isinstance(as_of, TrackedInstant):
        return
    for earlier, later in pairwise(nodes):
        if (earlier.protection is None, earlier.worth[0]) != (later.protection is None, later.worth[0]):
            continue
        (rate, lost), (later_rate, later_lost) = earlier.lost, later.lost
        if (rate, lost) == (later_rate, later_lost):
            continue
        if later_lost - lost <= 1.0:
            note_always(as_of)
        elif rate > later_rate:
            note(as_of, as_of + timedelta(seconds=(later_lost - lost - 1.0) / (rate - later_rate)))


def _reserve(
    nodes: Sequence[_NodeAtRisk], left: int, snapshot: SpendSnapshot, cap: SpendCap
) -> tuple[int, list[_NodeAtRisk]]:
    """Reserve spend for the nodes that are most expensive to lose; return what is left, and the other nodes. The other
    nodes are in order of removal, cheapest to lose first."""
    running = list(nodes)
    for node_at_risk in reversed(nodes):
        reserved = snapshot.reserved_for(node_at_risk.unbilled, cap)
        if reserved > left:
            break  # no node that is cheaper to lose is kept before this one
        left -= reserved
        running.remove(node_at_risk)
    return left, running


def _due(running: Sequence[_NodeAtRisk], left: int) -> list[_NodeAtRisk]:
    """Return the nodes to remove now, so that the ones after them can still be removed later."""
    due: list[_NodeAtRisk] = []
    own = sum(node_at_risk.drain_micro_usd for node_at_risk in running)
    reaction = sum(node_at_risk.micro_usd(_REACTION_SECONDS) for node_at_risk in running)
    for node_at_risk in running:
        later = own - node_at_risk.drain_micro_usd
        if left >= own + later + reaction:
            break
        due.append(node_at_risk)
        left -= node_at_risk.drain_micro_usd
        own, reaction = later, reaction - node_at_risk.micro_usd(_REACTION_SECONDS)
    return due


def _remove(
    node_at_risk: _NodeAtRisk,
    cap: SpendCap,
    snapshot: SpendSnapshot,
    left: int,
    draft: Draft,
    state: ClusterState,
    policy: ScalingPolicy,
) -> Draft:
    view = node_at_risk.view
    if node_at_risk.protection is not None:
        crossed = SpendEnforcementBlocked(
            owner=cap.owner,
            period=cap.period,
            left_micro_usd=max(0, left),
            limit_micro_usd=cap.micro_usd_max,
            until=snapshot.end(cap),
            protection=node_at_risk.protection,
        )
        return draft.adding(deferred=[Deferred(step=_STEP, subject=f"node/{view.node_uid}", reason=crossed)])
    if view.node_uid is not None and (tripped := brake.held_by(view, draft, state, policy)) is not None:
        return brake.held(draft, _STEP, f"node/{view.node_uid}", tripped)
    reason = SpendExhausted(
        owner=cap.owner,
        period=cap.period,
        spent_micro_usd=snapshot.spent[cap],
        limit_micro_usd=cap.micro_usd_max,
        until=snapshot.end(cap),
    )
    draft.free_capacity.remove(bin_key(view))
    if view.node_uid is not None:
        deadline_at = draft.as_of + timedelta(seconds=policy.drain_seconds_max)
        drain = draft.drain(view, reason, deadline_at=deadline_at, is_voluntary=False)
        return draft.adding(removals=[brake.marked(drain, view, draft)])
    if view.provider_id is None or view.action_id is None:
        return draft  # launching: released once there is an instance
    release = ReleaseInstance(
        action_id=draft.next_action_id(), provider_id=view.provider_id, order_action_id=view.action_id, reason=reason
    )
    return draft.adding(removals=[release])


def _node_at_risk(
    view: NodeView, unbilled: UnbilledTime, draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> _NodeAtRisk:
    pods = moving_pods(view, draft)
    lost_seconds = max((_lost_seconds(pod, draft) for pod in pods), default=0.0)
    price = unbilled.price_micro_usd_per_hour or 0
    priority = max((pod_priority(pod, job_spec(state, pod.job_id)) for pod in pods), default=-1)
    return _NodeAtRisk(
        view=view,
        unbilled=unbilled,
        protection=_protection(view, pods, draft, state),
        worth=(priority, round(price * lost_seconds / _SECONDS_PER_HOUR), -price, view.name),
        lost_seconds=lost_seconds,
        leaving_seconds=ENDING_SECONDS + (policy.drain_seconds_max if pods else 0.0),
    )


def _lost_seconds(pod: PodObserved, draft: Draft) -> float:
    """Return the work that would be repeated: since the last save, else since the start."""
    since = checkpointed_at(dict(pod.annotations)) or pod.started_at
    return 0.0 if since is None or draft.as_of <= since else (draft.as_of - since).total_seconds()


def _protection(view: NodeView, pods: Sequence[PodObserved], draft: Draft, state: ClusterState) -> str | None:
    """Return what keeps the node whatever it costs: an annotation, a PodDisruptionBudget, a non-preemptible job."""
    if view.node is not None and (mark := node_protection(view.node, draft.as_of)) is not None:
        return mark
    for pod in pods:
        spec = job_spec(state, pod.job_id)
        mark = pod_mark(pod, state.budgets.values(), draft.as_of)
        if mark is None and spec is not None and not spec.is_preemptible:
            mark = "its job is not preemptible"
        if mark is not None:
            return f"pod {pod.namespace}/{pod.name}: {mark}"
    return None
