"""Freshness of lists and watches. A failed or old list is not an empty cluster."""

from collections.abc import Mapping
from datetime import datetime

from gpu_autoscaler.core.next_change import has_lasted_longer
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.reasons.defer import WatchStale


def stale_watch(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> WatchStale | None:
    """Return the watch of nodes or pods that is too old; None: both are fresh."""
    seen_at = lists_seen_at(state)
    for source in ("nodes", "pods"):
        if (stale := _stale(source, seen_at[source], policy, as_of)) is not None:
            return stale
    return None


def stale_instances(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> WatchStale | None:
    """Return the age of the cloud's list of instances if it is too old; None: it is fresh."""
    return _stale("instances", state.instances_listed_at, policy, as_of)


def lists_seen_at(state: ClusterState) -> Mapping[str, datetime | None]:
    """Return by source up to when it is known what exists; None: it was never listed."""
    nodes, pods = state.nodes_synced, state.pods_synced
    return {
        "nodes": None if nodes is None else nodes.seen_at,
        "pods": None if pods is None else pods.seen_at,
        "instances": state.instances_listed_at,
    }


def _stale(source: str, seen_at: datetime | None, policy: ScalingPolicy, as_of: datetime) -> WatchStale | None:
    if seen_at is not None and not has_lasted_longer(seen_at, policy.watch_age_seconds_max, as_of):
        return None
    age_seconds = None if seen_at is None else (as_of - seen_at).total_seconds()
    return WatchStale(source=source, age_seconds=age_seconds, age_seconds_max=policy.watch_age_seconds_max)
