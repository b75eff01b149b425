"""What makes a node due to be replaced, read from its own evidence: sickness, age, and a policy that has changed."""

from collections.abc import Set as AbstractSet
from datetime import datetime, timedelta
from functools import lru_cache

from gpu_autoscaler.core.gpu_health import gpu_evidence, is_suspect
from gpu_autoscaler.core.nodes.life import NodePhase, NodeView
from gpu_autoscaler.core.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.hints import RebalanceRecommended
from gpu_autoscaler.model.ids import NodeUid, derive_id
from gpu_autoscaler.model.reasons import NodeDrifted, NodeExpired, NodeUnhealthy

_HASH_RANGE = 2**32


@lru_cache(4096)
def _early_ratio(name: str) -> float:
    return int(derive_id("expiry", name)[:8], 16) / _HASH_RANGE


def expires_at(name: str, created_at: datetime, policy: ScalingPolicy) -> datetime | None:
    """Return when a node is old enough to go, a little earlier for each by its name; None: never."""
    rules = policy.removal
    if rules.expire_seconds_max is None:
        return None
    early = _early_ratio(name) * rules.expire_jitter_ratio
    return created_at + timedelta(seconds=rules.expire_seconds_max * (1 - early))


def expired(view: NodeView, policy: ScalingPolicy, as_of: datetime) -> NodeExpired | None:
    """Return that the node is old enough to go."""
    if view.node is None:
        return None
    due_at = expires_at(view.name, view.node.created_at, policy)
    if due_at is None or as_of < due_at:
        return None
    created_at = view.node.created_at
    return NodeExpired(
        age_seconds=(as_of - created_at).total_seconds(), age_seconds_max=(due_at - created_at).total_seconds()
    )


def is_overdue(reason: NodeExpired, policy: ScalingPolicy) -> bool:
    """True when an expired node has waited for protected work for as long as the policy lets it."""
    return reason.age_seconds >= reason.age_seconds_max + policy.removal.expire_grace_seconds


def suspected(state: ClusterState, policy: ScalingPolicy) -> AbstractSet[NodeUid]:
    """Return the nodes that a look for sickness is worth while at."""
    rules = policy.removal.gpu_health
    return state.unhealthy_since.keys() | {uid for uid, trail in state.telemetry_history.items() if is_suspect(trail, rules)}


def sick(view: NodeView, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> NodeUnhealthy | None:
    """Return what has been amiss with the node for too long. One that never was usable is not sick but late."""
    if view.node_uid is None or view.node is None or view.usable_since is None:
        return None
    since = state.unhealthy_since.get(view.node_uid)
    if since is not None and view.phase is NodePhase.LOST:
        unhealthy_seconds, limit = (as_of - since).total_seconds(), policy.removal.unhealthy_seconds_max
        if unhealthy_seconds >= limit:
            evidence = "it offers fewer GPUs than it had" if view.node.is_ready else "it was not ready"
            return NodeUnhealthy(evidence=evidence, unhealthy_seconds=unhealthy_seconds, unhealthy_seconds_max=limit)
    return _sick_gpu(view.node_uid, state, policy, as_of)


def _sick_gpu(node_uid: NodeUid, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> NodeUnhealthy | None:
    trail = state.telemetry_history.get(node_uid)
    found = None if trail is None else gpu_evidence(trail, policy.removal.gpu_health, as_of)
    if found is None:
        return None
    return NodeUnhealthy(
        evidence=found.words,
        unhealthy_seconds=(as_of - found.since).total_seconds(),
        unhealthy_seconds_max=policy.removal.gpu_health.evidence_seconds,
        is_fatal=found.is_fatal,
    )


def hinted(view: NodeView, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> RebalanceRecommended | None:
    """Return that the cloud hinted lately that it may take the node. It says no more about when, nor takes it back."""
    noticed_at = None if view.provider_id is None else state.rebalance_recommended_at.get(view.provider_id)
    if noticed_at is None or (as_of - noticed_at).total_seconds() >= policy.spot.rebalance_avoid_seconds:
        return None
    return RebalanceRecommended(noticed_at=noticed_at)


def drifted(view: NodeView, policy: ScalingPolicy) -> NodeDrifted | None:
    """Return in what the node is not what its pool would buy today. What is unknown of it is no difference."""
    if not policy.removal.is_drift_on or view.pool is None:
        return None
    pool = next((each for each in policy.pools if each.name == view.pool), None)
    if pool is None:
        return NodeDrifted(difference=f"pool {view.pool} is gone")
    difference = _filtered_out(view, pool) or _ordered_otherwise(view, pool)
    return None if difference is None else NodeDrifted(difference=difference)


def _filtered_out(view: NodeView, pool: NodePool) -> str | None:
    for what, allowed, value in (
        ("instance type", pool.instance_types, view.instance_type),
        ("GPU model", pool.gpu_models, view.gpu_model),
        ("zone", pool.zones, view.zone),
        ("capacity type", pool.capacity_types, view.capacity_type),
    ):
        if allowed and value is not None and value not in allowed:
            return f"{what} {value} is not allowed in pool {pool.name} any more"
    return None


def _ordered_otherwise(view: NodeView, pool: NodePool) -> str | None:
    """By the order alone: what somebody wrote on the node since, or the cloud left out, would be so again."""
    decision = None if view.order is None else view.order.decision
    if decision is None:
        return None
    ordered = dict(decision.labels)
    for key, value in sorted(pool.labels.items()):
        if ordered.get(key) != value:
            return f"pool {pool.name} now has label {key}={value}"
    return None if set(decision.taints) == set(pool.taints) else f"pool {pool.name} now has other taints"
