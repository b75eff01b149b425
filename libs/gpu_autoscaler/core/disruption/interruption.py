"""Step `replace_doomed`: a node that the cloud takes back is emptied before its deadline.

Its pods are demand from now on (`core/demand/sources.py`), so that the same plan places them or buys for them.
"""

from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.disruption.drift import rebalance_recommended
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.placement.bins import bin_key
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.spot_waits import exclude_interrupted_from_spot
from gpu_autoscaler.core.state.state import ClusterState, NoticeRecord
from gpu_autoscaler.model.decisions import CancelDrain, DrainNode
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons.drain import NoticeWithdrawn, SpotReclaim


def drain_at_risk_nodes(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Every node under notice drains until its deadline; one whose notice was withdrawn stays."""
    drains = (_drain(view, draft, policy) for view in draft.views if view.notice is not None)
    returns = (_canceled_drain(view, draft, state) for view in draft.views if view.drain is not None)
    return draft.adding(
        removals=[drain for drain in drains if drain is not None],
        returns=[each for each in returns if each is not None],
    )


def exclude_spot(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Work that spot has interrupted too often counts on no spot from here on."""
    return msgspec.structs.replace(
        draft, demand=exclude_interrupted_from_spot(draft.demand, state, policy, draft.as_of)
    )


def avoid_rebalance_candidates(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Nodes that the cloud hints it may take are no room for anything more."""
    for view in draft.views if state.rebalance_recommended_at else ():
        if bin_key(view) in draft.free_capacity and rebalance_recommended(view, state, policy, draft.as_of) is not None:
            draft.free_capacity.remove(bin_key(view))
    return draft


def reclaim_deadline(notice: NoticeRecord, policy: ScalingPolicy) -> datetime:
    """The notice's own deadline, else the shortest that clouds give, from when it was first read."""
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
    told = notice.notice
    reason = SpotReclaim(notice_id=told.notice_id, kind=told.kind, reclaim_at=told.reclaim_at)
    return draft.drain(view, reason, deadline_at=deadline_at, is_voluntary=False)


def _canceled_drain(view: NodeView, draft: Draft, state: ClusterState) -> CancelDrain | None:
    """A drain whose only cause was a notice that stands no more is cancelled, unless the node is empty already."""
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
