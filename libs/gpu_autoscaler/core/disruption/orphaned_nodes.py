"""Orphaned nodes: managed Node objects whose instance is gone, and which are due to be deleted from Kubernetes.

Step `upkeep` decides their removal. The executor (`scaler/orphaned_nodes.py`) queries the cloud twice before it deletes
one: a list that lacks an instance proves nothing. Foreign nodes and those that Karpenter holds are never named.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from gpu_autoscaler.core.disruption.deleted_nodes import is_karpenter_managed
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.nodes.correlation import INSTANCE_MISSING_SECONDS_MAX, RecordIndex, index_of
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, OrderRecord
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId

# Time for others to remove the node, after the end of the instance and after the node became unready.
# A cloud-controller-manager checks unready nodes every five seconds (`--node-monitor-period`; Kubernetes, "Cloud
# Controller Manager", node controller; read 2026-11-22), slowed by the cloud's rate limits.
ORPHANED_SECONDS = 120.0


class OrphanedNode(NamedTuple):
    """A Node object, and the instance that is gone."""

    node_name: str
    node_uid: NodeUid
    provider_id: ProviderId
    gone_since: datetime


def orphaned_nodes(state: ClusterState, as_of: datetime) -> tuple[OrphanedNode, ...]:
    """Return each managed node that may be deleted once the cloud confirms that its instance is gone, by name."""
    due = [
        OrphanedNode(node.name, node.node_uid, provider_id, since)
        for node, provider_id in _silent_nodes(index_of(state))
        if (since := _gone_since(node, provider_id, state)) is not None and has_lasted(since, ORPHANED_SECONDS, as_of)
    ]
    return tuple(sorted(due))


@cached_by_identity(4)
def _silent_nodes(index: RecordIndex) -> tuple[tuple[NodeObserved, ProviderId], ...]:
    """Return the managed nodes that are not ready and not being deleted; usually none."""
    nodes = (records.node for records in index.records if records.node is not None and records.action_id is not None)
    return tuple(
        (node, node.provider_id)
        for node in nodes
        if node.provider_id is not None
        and not node.is_ready
        and node.deleting_since is None
        and not is_karpenter_managed(node)
    )


def _gone_since(node: NodeObserved, provider_id: ProviderId, state: ClusterState) -> datetime | None:
    """Return since when both the instance has ended and the node is unready; None: it is not so.

    If the end was never reported (after a restart, when the cloud no longer shows the instance), lists have to lack the
    instance for so long that none of them was merely late.
    """
    silent_since, listed_at = state.unhealthy_since.get(node.node_uid), state.instances_listed_at
    if silent_since is None or listed_at is None:
        return None
    seen_at = state.instances_seen_at.get(provider_id)
    instance = state.instances.get(provider_id)
    shown_end = None if instance is None or instance.state != "terminated" else instance.terminated_at
    ended_at = shown_end or _confirmed_ends(state.orders, state.drains).get(provider_id)
    is_shown_after_all = (
        instance is not None
        and instance.state != "terminated"
        and ended_at is not None
        and seen_at is not None
        and seen_at > ended_at
    )
    if ended_at is not None and not is_shown_after_all:
        return max(ended_at, silent_since)
    missing_since = silent_since if seen_at is None else max(seen_at, silent_since)
    is_missing = (listed_at - missing_since).total_seconds() > INSTANCE_MISSING_SECONDS_MAX
    return missing_since if is_missing else None


@cached_by_identity(4)
def _confirmed_ends(
    orders: Mapping[ActionId, OrderRecord], drains: Mapping[ActionId, DrainRecord]
) -> Mapping[ProviderId, datetime]:
    facts = (record.terminated for records in (orders, drains) for record in records.values())
    return {fact.provider_id: fact.terminated_at for fact in facts if fact is not None and fact.provider_id is not None}
