"""Step `replace_doomed`: a node under an interruption notice is drained before its deadline.

Its pods become demand (`core/demand/sources.py`), so that the same plan places them or buys for them.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.disruption.drift import rebalance_recommended
from gpu_autoscaler.core.draft import DRAINED, Draft
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView, Selected, bin_key
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.spot_waits import exclude_interrupted_from_spot
from gpu_autoscaler.core.state.state import ClusterState, NoticeRecord, OrderRecord
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.model.decisions import CancelDrain, DrainNode
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.reasons.drain import NoticeWithdrawn, SpotReclaim

_AT_RISK = Selected(lambda view: view.notice is not None)


def drain_at_risk_nodes(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Drain every node under notice until its deadline; cancel drains whose notice was withdrawn."""
    drains = (_drain(view, draft, policy) for view in draft.views.table(_AT_RISK))
    returns = (_canceled_drain(view, draft, state) for view in draft.views.table(DRAINED))
    return draft.adding(
        removals=[drain for drain in drains if drain is not None],
        canceled_drains=[cancellation for cancellation in returns if cancellation is not None],
    )


def exclude_spot(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Exclude spot for work that was interrupted too often."""
    return msgspec.structs.replace(
        draft, demand=exclude_interrupted_from_spot(draft.demand, state, policy, draft.as_of)
    )


def avoid_rebalance_candidates(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Plan no more work on nodes with a rebalance recommendation."""
    for view in draft.views if state.rebalance_recommended_at else ():
        if bin_key(view) in draft.free_capacity and rebalance_recommended(view, state, policy, draft.as_of) is not None:
            draft.free_capacity.close(bin_key(view))
    return draft


def reclaim_deadline(notice: NoticeRecord, policy: ScalingPolicy) -> datetime:
    """Return the notice's deadline, else the shortest that clouds give, counted from when it was first received."""
    if notice.notice.reclaim_at is not None:
        return notice.notice.reclaim_at
    return notice.first_received_at + timedelta(seconds=policy.notice_seconds_default)


def _drain(view: NodeView, draft: Draft, policy: ScalingPolicy) -> DrainNode | None:
    notice = view.notice
    if notice is None or view.node_uid is None or view.phase in (NodePhase.DRAINED, NodePhase.TERMINATING):
        return None
    deadline_at = reclaim_deadline(notice, policy)
    decided = None if view.drain is None else view.drain.decision
    if isinstance(decided, DrainNode) and not decided.is_voluntary and decided.deadline_at <= deadline_at:
        return None
    received = notice.notice
    reason = SpotReclaim(notice_id=received.notice_id, kind=received.kind, reclaim_at=received.reclaim_at)
    return draft.drain(view, reason, deadline_at=deadline_at, is_voluntary=False)


def _canceled_drain(view: NodeView, draft: Draft, state: ClusterState) -> CancelDrain | None:
    """Cancel a drain caused only by a notice that was withdrawn, unless the node is empty already."""
    drain = view.drain
    if drain is None or view.notice is not None or drain.cancel is not None or drain.drained is not None:
        return None
    decided = drain.decision
    if not isinstance(decided, DrainNode) or not isinstance(decided.reason, SpotReclaim):
        return None
    notice = state.notices.get(decided.reason.notice_id)
    if notice is None or notice.withdrawn is None or view.phase is NodePhase.TERMINATING:
        return None
    return CancelDrain(
        action_id=draft.next_action_id(),
        drain_action_id=ActionId(drain.action_id),
        node_uid=decided.node_uid,
        node_name=decided.node_name,
        reason=NoticeWithdrawn(notice_id=decided.reason.notice_id),
    )


# ---- ends of paid reservations: the plan announces them as notices, which the next plan acts on


class ReservationEnd(NamedTuple):
    """An instance, and the end of its paid reservation."""

    provider_id: ProviderId
    paid_until: datetime


def reservation_ends(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[ReservationEnd, ...]:
    """Return each living instance whose paid reservation is about to end and that has no notice yet, by id."""
    ahead = timedelta(seconds=policy.reservation_drain_seconds)
    ends = [end for end in _reservations(state.instances, state.orders) if as_of >= end.paid_until - ahead]
    if not ends:
        return ()
    notices = [record.notice for record in state.notices.values() if record.notice.kind == "paid_period_over"]
    known = {(notice.provider_id, notice.reclaim_at) for notice in notices}
    return tuple(end for end in ends if end not in known)


@cached_by_identity(4)
def _reservations(
    instances: Mapping[ProviderId, NodeInstanceObserved], orders: Mapping[ActionId, OrderRecord]
) -> tuple[ReservationEnd, ...]:
    ends: list[ReservationEnd] = []
    for instance in instances.values():
        order = None if instance.action_id is None else orders.get(instance.action_id)
        until = None if order is None or order.decision is None else order.decision.offer.paid_until
        if until is not None and instance.state != "terminated":
            ends.append(ReservationEnd(instance.provider_id, until))
    return tuple(sorted(ends))
