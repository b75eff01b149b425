"""Freshness of lists and watches. A failed or old list is not an empty cluster."""

from datetime import datetime

from gpu_autoscaler.core.next_change import has_lasted_longer
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.reasons.defer import WatchStale


def stale_watch(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> WatchStale | None:
    """Return the watch of nodes or pods that is too old; None: both are fresh."""
    for source, synced in (("nodes", state.nodes_synced), ("pods", state.pods_synced)):
        stale = _stale(source, None if synced is None else synced.seen_at, policy, as_of)
        if stale is not None:
            return stale
    return None


def stale_instances(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> WatchStale | None:
    """Return the age of the cloud's list of instances if it is too old; None: it is fresh."""
    return _stale("instances", state.instances_listed_at, policy, as_of)


def _stale(source: str, seen_at: datetime | None, policy: ScalingPolicy, as_of: datetime) -> WatchStale | None:
    if seen_at is not None and not has_lasted_longer(seen_at, policy.watch_age_seconds_max, as_of):
        return None
    age_seconds = None if seen_at is None else (as_of - seen_at).total_seconds()
    return WatchStale(source=source, age_seconds=age_seconds, age_seconds_max=policy.watch_age_seconds_max)
