"""Step `empty_deleted`: a node that a user deleted is drained as Kubernetes would, by a deadline.

Also the finalizer that makes this possible, and nodes that Karpenter ends itself: step `upkeep` decides what is due.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.disruption.protection import save_request
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.next_change import note
from gpu_autoscaler.core.nodes.correlation import INSTANCE_MISSING_SECONDS_MAX
from gpu_autoscaler.core.nodes.views import NodeView, Selected, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.lineage import Derivation, part_of
from gpu_autoscaler.core.state.queries import counts_for_idleness, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import DrainNode, ReleaseInstance
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.drain import NodeDeleted


class FinalizerChange(NamedTuple):
    """A node whose finalizer is to be added or removed."""

    view: NodeView
    is_wanted: bool


def finalizer_changes(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[FinalizerChange, ...]:
    """Return each managed node whose finalizer is not as it should be, by name. Nodes that Karpenter makes for us have
    Karpenter's own finalizer, and Karpenter drains them."""
    views = node_views(state, as_of)
    if not policy.removal.is_finalizer_on:
        return tuple(FinalizerChange(view, is_wanted=False) for view in views.table(_WITH_FINALIZER))
    missing = [FinalizerChange(view, is_wanted=True) for view in views.table(_WITHOUT_FINALIZER)]
    unneeded = [
        FinalizerChange(view, is_wanted=False)
        for view in views.table(_MAY_LOSE_FINALIZER)
        if view.node is not None and (is_karpenter_managed(view.node) or _has_ended(view, state))
    ]
    return tuple(sorted((*missing, *unneeded), key=lambda change: change.view.name))


def is_karpenter_managed(node: NodeObserved) -> bool:
    """True from the first moment on: the taint is removed when the label is added."""
    is_new = any(taint.key == labels.KARPENTER_UNREGISTERED_TAINT for taint in node.taints)
    return is_new or any(key == labels.KARPENTER_REGISTERED for key, _ in node.labels)


_WITH_FINALIZER = Selected(lambda view: view.is_ours and view.node is not None and view.node.has_finalizer)
# Of a node that is being deleted it is kept until the instance has ended.
_MAY_LOSE_FINALIZER = Selected(
    lambda view: (
        view.is_ours
        and view.node is not None
        and view.node.has_finalizer
        and (view.node.deleting_since is not None or is_karpenter_managed(view.node))
    )
)
# To a node that is being deleted it can no longer be added.
_WITHOUT_FINALIZER = Selected(
    lambda view: (
        view.is_ours
        and view.node is not None
        and not view.node.has_finalizer
        and view.node.deleting_since is None
        and not is_karpenter_managed(view.node)
    )
)
_DELETED = Selected(lambda view: view.is_ours and view.node is not None and view.node.deleting_since is not None)


def drain_deleted_nodes(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Drain every managed node that is being deleted, by force at the deadline: its user has decided."""
    drains = (_drain(view, draft, state, policy) for view in draft.views.table(_DELETED))
    return draft.adding(removals=[drain for drain in drains if drain is not None])


def _drain(view: NodeView, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> DrainNode | None:
    node = view.node
    if node is None or node.deleting_since is None or not node.has_finalizer or not view.is_ours:
        return None
    if _has_ended(view, state) or (view.drain is not None and view.drain.drained is not None):
        return None
    # The scaler may have been away; work still gets time to save a checkpoint.
    notice = timedelta(seconds=policy.notice_seconds_default)
    deadline_at = max(node.deleting_since + timedelta(seconds=policy.drain_seconds_max), draft.as_of + notice)
    if view.reclaim_at is not None:  # the cloud interrupts it at the same time
        deadline_at = min(deadline_at, view.reclaim_at)
    decided = None if view.drain is None else view.drain.decision
    if isinstance(decided, ReleaseInstance):
        return None
    if isinstance(decided, DrainNode) and not decided.is_voluntary:
        note(draft.as_of, decided.deadline_at - notice)
        if decided.deadline_at <= deadline_at:
            return None
    return draft.drain(view, NodeDeleted(deleted_at=node.deleting_since), deadline_at=deadline_at, is_voluntary=False)


def _has_ended(view: NodeView, state: ClusterState) -> bool:
    """True if the cloud has confirmed the end of the instance, or its lists have lacked it since the deletion."""
    if not view.is_counted:
        return True
    node, listed_at = view.node, state.instances_listed_at
    if node is None or node.deleting_since is None or listed_at is None:
        return False
    seen_at = None if view.provider_id is None else state.instances_seen_at.get(view.provider_id)
    last_seen_at = node.deleting_since if seen_at is None else max(seen_at, node.deleting_since)
    return (listed_at - last_seen_at).total_seconds() > INSTANCE_MISSING_SECONDS_MAX


# ---- deletions by Karpenter
# Karpenter taints a node that it ends and evicts its pods at once (`pkg/controllers/node/termination/controller.go`,
# v1.12.1; read 2026-11-22). Only pods that save on request have to be notified: step `upkeep` decides it.


def _is_deleted_by_karpenter(node: NodeObserved) -> bool:
    return node.deleting_since is not None and node.action_id is not None and is_karpenter_managed(node)


_DELETED_BY_KARPENTER: Derivation[Mapping[NodeUid, NodeObserved]] = part_of("nodes", _is_deleted_by_karpenter)


class UnannouncedDeletion(NamedTuple):
    """A node that Karpenter deletes, and since when."""

    node_name: str
    node_uid: NodeUid
    since: datetime


def unannounced_deletions(state: ClusterState) -> tuple[UnannouncedDeletion, ...]:
    """Return the nodes with a pod that was not notified since, by name."""
    deletions = []
    for node in _DELETED_BY_KARPENTER.of(state).values():
        if (since := node.deleting_since) is None:
            continue
        here = filter(counts_for_idleness, pods_by_node(state).get(node.name, ()))
        if not all(is_announced(dict(pod.annotations), since) for pod in here):
            deletions.append(UnannouncedDeletion(node.name, node.node_uid, since))
    return tuple(sorted(deletions))


def is_announced(annotations: Mapping[str, str], since: datetime) -> bool:
    """True for a pod that was asked to save since then; an older request had another cause."""
    request = save_request(annotations)
    return request is not None and request.requested_at >= since
