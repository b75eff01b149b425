"""Step `empty_deleted`: a node that somebody deleted by hand is emptied as Kubernetes would have it, by a deadline.

And the finalizer that makes this possible: on which nodes it is missing, and from which it may be taken away, last of
all. The executor puts it and takes it (`scaler/finalizers.py`); it chooses nothing.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.nodes.correlation import INSTANCE_MISSING_SECONDS_MAX, RecordIndex, index_of
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.queries import counts_for_idleness, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import DrainNode, ReleaseInstance
from gpu_autoscaler.model.reasons.drain import NodeDeleted


class FinalizerChange(NamedTuple):
    """What is to be done about the finalizer of a node: put it there, or take it away."""

    view: NodeView
    is_wanted: bool


def finalizer_changes(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[FinalizerChange, ...]:
    """Return each node of ours whose finalizer is not as it is to be, by name. Nodes of others never carry it, nor do
    those that Karpenter makes for us: it holds them by its own, empties them, and waits for no other."""
    if not _may_change(index_of(state), policy):
        return ()
    due = []
    for view in node_views(state, as_of):
        if view.node is None or not view.is_ours:
            continue
        is_wanted = policy.removal.is_finalizer_on and not is_karpenter_managed(view.node)
        if view.node.deleting_since is not None:
            # It cannot be put any more. What it waits for is the end of the instance.
            is_wanted = view.node.is_guarded and is_wanted and not _has_ended(view, state)
        if is_wanted != view.node.is_guarded:
            due.append(FinalizerChange(view, is_wanted))
    return tuple(due)


@cached_by_identity(4)
def _may_change(index: RecordIndex, policy: ScalingPolicy) -> bool:
    """False where no node's finalizer can have to change: most often, and for as long as nodes say the same."""
    is_on = policy.removal.is_finalizer_on
    ours = (joined.node for joined in index.joined if joined.node is not None and joined.action_id is not None)
    return any(
        node.deleting_since is not None or node.is_guarded != (is_on and not is_karpenter_managed(node))
        for node in ours
    )


def is_karpenter_managed(node: NodeObserved) -> bool:
    """True from the first moment on: the taint goes when the label comes."""
    is_new = any(taint.key == labels.KARPENTER_UNREGISTERED_TAINT for taint in node.taints)
    return is_new or any(key == labels.KARPENTER_REGISTERED for key, _ in node.labels)


def drain_deleted_nodes(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Every node of ours that is held on its way out drains, with force at the end: its user has decided."""
    drains = (_drain(view, draft, state, policy) for view in draft.views)
    return draft.adding(removals=[drain for drain in drains if drain is not None])


def _drain(view: NodeView, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> DrainNode | None:
    node = view.node
    if node is None or node.deleting_since is None or not node.is_guarded or not view.is_ours:
        return None
    if _has_ended(view, state) or (view.drain is not None and view.drain.drained is not None):
        return None
    # Nobody may have been here for a while; what can save has a moment all the same.
    deadline_at = max(
        node.deleting_since + timedelta(seconds=policy.drain_seconds_max),
        draft.as_of + timedelta(seconds=policy.notice_seconds_default),
    )
    if view.reclaim_at is not None:  # the cloud takes it at the same time, and does not wait
        deadline_at = min(deadline_at, view.reclaim_at)
    decided = None if view.drain is None else view.drain.decision
    if isinstance(decided, ReleaseInstance):
        return None
    if isinstance(decided, DrainNode) and not decided.is_voluntary and decided.deadline_at <= deadline_at:
        return None
    return draft.drain(view, NodeDeleted(deleted_at=node.deleting_since), deadline_at=deadline_at, is_voluntary=False)


def _has_ended(view: NodeView, state: ClusterState) -> bool:
    """The cloud has confirmed the end of the instance, or its lists since the deletion have left it out for long."""
    if not view.is_counted:
        return True
    node, listed_at = view.node, state.instances_listed_at
    if node is None or node.deleting_since is None or listed_at is None:
        return False
    seen_at = None if view.provider_id is None else state.instances_seen_at.get(view.provider_id)
    last_seen_at = node.deleting_since if seen_at is None else max(seen_at, node.deleting_since)
    return (listed_at - last_seen_at).total_seconds() > INSTANCE_MISSING_SECONDS_MAX


# Nodes of ours that Karpenter ends by itself, with work on them that nobody has told to save. It answers
# interruptions, repairs, and ends what `kubectl delete nodeclaim` names: it taints such a node and evicts its
# pods at once (Karpenter, `pkg/controllers/node/termination/controller.go`, v1.12.1; read 2026-11-22). That
# is its to do: nothing is cordoned or evicted here, and no notice is counted against spot. But pods that save
# when they are told to would be told by nobody. Nothing of it is decided, so nothing is on record but what
# the pods then carry: what is due follows from the state.


class UnannouncedDeletion(NamedTuple):
    """A node on its way out by somebody else's hand, and since when."""

    node_name: str
    since: datetime


def unannounced_deletions(state: ClusterState) -> tuple[UnannouncedDeletion, ...]:
    """Return the nodes on which a pod is left that was not told since, by name."""
    found = []
    for node in state.nodes.values():
        if (since := node.deleting_since) is None or node.action_id is None or not is_karpenter_managed(node):
            continue
        here = filter(counts_for_idleness, pods_by_node(state).get(node.name, ()))
        if not all(is_announced(dict(pod.annotations), since) for pod in here):
            found.append(UnannouncedDeletion(node.name, since))
    return tuple(sorted(found))


def is_announced(annotations: Mapping[str, str], since: datetime) -> bool:
    """True for a pod that was asked to save by some instant after this one; what is older was about something else."""
    try:
        deadline_at = datetime.fromisoformat(annotations.get(labels.CHECKPOINT_REQUESTED, ""))
    except ValueError:
        return False
    return (deadline_at if deadline_at.tzinfo else deadline_at.replace(tzinfo=UTC)) >= since
