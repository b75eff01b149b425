"""Step `replace_drifted`: replaces nodes that are unhealthy, expired, drifted, to be rebalanced, or failed to boot.

Work moves to ready nodes, else a replacement is bought and awaited. Drift respects protected work, and so does expiry
for its grace period; health and failed boots do not. Force is used only at the drain's deadline.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.disruption import brake, repack
from gpu_autoscaler.core.disruption.disruption_budgets import removal_limit
from gpu_autoscaler.core.disruption.gpu_health import gpu_evidence, is_suspect
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.limits.override_bounds import protecting_directive
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.nodes.boot_timeout import boot_timed_out, has_workload_pods
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeIndex, NodeView, Selected, Table, bin_key
from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.provisioning.cooldown import removal_cooldown
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import NodeUid, derive_id
from gpu_autoscaler.model.reasons import drain
from gpu_autoscaler.model.reasons.defer import DeferReason, PodsFitNowhere, TooManyUnhealthy
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected

# ---- reasons to replace a node

_HASH_RANGE = 2**32


@lru_cache(4096)
def _early_ratio(name: str) -> float:
    return int(derive_id("expiry", name)[:8], 16) / _HASH_RANGE


def expires_at(name: str, created_at: datetime, policy: ScalingPolicy) -> datetime | None:
    """Return when the node expires, a little earlier for each by its name; None: never."""
    rules = policy.removal
    if rules.expire_seconds_max is None:
        return None
    early = _early_ratio(name) * rules.expire_jitter_ratio
    return created_at + timedelta(seconds=rules.expire_seconds_max * (1 - early))


def expired(view: NodeView, policy: ScalingPolicy, as_of: datetime) -> drain.NodeExpired | None:
    """Return that the node has expired."""
    if view.node is None:
        return None
    due_at = expires_at(view.name, view.node.created_at, policy)
    if due_at is None or as_of < due_at:
        return None
    created_at = view.node.created_at
    return drain.NodeExpired(
        age_seconds=(as_of - created_at).total_seconds(), age_seconds_max=(due_at - created_at).total_seconds()
    )


def is_overdue(view: NodeView, reason: drain.NodeExpired, policy: ScalingPolicy, as_of: datetime) -> bool:
    """True if an expired node has waited for protected work for the whole grace period."""
    seconds = reason.age_seconds_max + policy.removal.expire_grace_seconds
    return view.node is not None and has_lasted(view.node.created_at, seconds, as_of)


def suspect_nodes(state: ClusterState, policy: ScalingPolicy) -> AbstractSet[NodeUid]:
    """Return the nodes whose health is worth a closer look."""
    rules = policy.removal.gpu_health
    return state.unhealthy_since.keys() | {
        uid for uid, history in state.telemetry_history.items() if is_suspect(history, rules)
    }


def unhealthy(
    view: NodeView, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> drain.NodeUnhealthy | None:
    """Return what has been wrong with the node for too long. A node that never was usable is late, not unhealthy."""
    if view.node_uid is None or view.node is None or view.usable_since is None:
        return None
    since = state.unhealthy_since.get(view.node_uid)
    limit = policy.removal.unhealthy_seconds_max
    if since is not None and view.phase is NodePhase.LOST and has_lasted(since, limit, as_of):
        evidence = "fewer allocatable GPUs than before" if view.node.is_ready else "not ready"
        return drain.NodeUnhealthy(
            evidence=evidence, unhealthy_seconds=(as_of - since).total_seconds(), unhealthy_seconds_max=limit
        )
    return _unhealthy_gpu(view.node_uid, state, policy, as_of)


def _unhealthy_gpu(
    node_uid: NodeUid, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> drain.NodeUnhealthy | None:
    history = state.telemetry_history.get(node_uid)
    fault = None if history is None else gpu_evidence(history, policy.removal.gpu_health, as_of)
    if fault is None:
        return None
    return drain.NodeUnhealthy(
        evidence=fault.description,
        unhealthy_seconds=(as_of - fault.since).total_seconds(),
        unhealthy_seconds_max=policy.removal.gpu_health.evidence_seconds,
        is_fatal=fault.is_fatal,
    )


def rebalance_recommended(
    view: NodeView, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> drain.RebalanceRecommended | None:
    """Return a recent rebalance recommendation. The cloud neither dates it nor withdraws it."""
    noticed_at = None if view.provider_id is None else state.rebalance_recommended_at.get(view.provider_id)
    if noticed_at is None or has_lasted(noticed_at, policy.spot.rebalance_avoid_seconds, as_of):
        return None
    return drain.RebalanceRecommended(noticed_at=noticed_at)


def drifted(view: NodeView, policy: ScalingPolicy) -> drain.NodeDrifted | None:
    """Return how the node differs from what its pool would buy today. An unknown property is no difference."""
    if not policy.removal.is_drift_on or view.pool is None:
        return None
    pool = next((pool for pool in policy.pools if pool.name == view.pool), None)
    if pool is None:
        return drain.NodeDrifted(difference=f"pool {view.pool} no longer exists")
    difference = _filtered_out(view, pool) or _order_difference(view, pool)
    return None if difference is None else drain.NodeDrifted(difference=difference)


def _filtered_out(view: NodeView, pool: NodePool) -> str | None:
    for what, allowed, value in (
        ("instance type", pool.instance_types, view.instance_type),
        ("GPU model", pool.gpu_models, view.gpu_model),
        ("zone", pool.zones, view.zone),
        ("capacity type", pool.capacity_types, view.capacity_type),
    ):
        if allowed and value is not None and value not in allowed:
            return f"{what} {value} is no longer allowed in pool {pool.name}"
    return None


def _order_difference(view: NodeView, pool: NodePool) -> str | None:
    """Compare with the order alone: later changes to the node, or the cloud's omissions, would recur."""
    decision = None if view.order is None else view.order.decision
    if decision is None:
        return None
    ordered = dict(decision.labels)
    for key, value in sorted(pool.labels.items()):
        if ordered.get(key) != value:
            return f"pool {pool.name} now has label {key}={value}"
    return None if set(decision.taints) == set(pool.taints) else f"pool {pool.name} now has other taints"


_STEP = "replace_drifted"


class _Due(msgspec.Struct, frozen=True):
    """A node to replace, and whether protection is ignored."""

    view: NodeView
    cause: RemovalCause
    reason: (
        drain.NodeUnhealthy | drain.NodeExpired | drain.NodeDrifted | drain.RebalanceRecommended | drain.BootTimedOut
    )
    is_forced: bool


def replace_drifted(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Drain each due node, wait for its replacement, or defer it with the reason."""
    leaving = draft.leaving_nodes()
    due = [candidate for candidate in _due(draft, state, policy) if candidate.view.name not in leaving]
    if not due:
        return draft
    stale = stale_watch(state, policy, draft.as_of) or _too_many_unhealthy(due, draft, policy)
    if isinstance(stale, TooManyUnhealthy):
        draft = draft.deferring(_STEP, "cluster", stale)
        due = [candidate for candidate in due if not isinstance(candidate.reason, drain.NodeUnhealthy)]
    elif stale is not None:
        return draft.deferring(_STEP, "cluster", stale)
    for candidate in due:  # a node to be replaced takes no other work
        if bin_key(candidate.view) in draft.free_capacity:
            draft.free_capacity.close(bin_key(candidate.view))
    due.sort(key=lambda entry: (entry.cause is not RemovalCause.UNHEALTHY, not entry.is_forced, entry.view.name))
    for candidate in due:
        draft = _remove(candidate, draft, state, policy)
    return draft


def _is_removable(view: NodeView) -> bool:
    return view.is_ours and view.drain is None and view.notice is None and view.node_uid is not None


_FAILED = Selected(lambda view: view.phase is NodePhase.FAILED and _is_removable(view))


def _due(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Iterator[_Due]:
    reason: drain.NodeUnhealthy | drain.NodeExpired | None
    ages = draft.views.table(_ages_under(policy))
    is_unhealthy: set[str] = set()
    suspects = suspect_nodes(state, policy)
    if suspects:
        for view in filter(_is_removable, draft.views):
            if view.node_uid in suspects and (reason := unhealthy(view, state, policy, draft.as_of)) is not None:
                is_unhealthy.add(view.name)
                yield _Due(view, RemovalCause.UNHEALTHY, reason, is_forced=reason.is_fatal)
    yield from (
        _Due(view, RemovalCause.UNHEALTHY, boot_timed_out(view, policy, draft.as_of), is_forced=True)
        for view in draft.views.table(_FAILED)
        if has_workload_pods(view, draft.pods)
    )
    if state.rebalance_recommended_at:
        for view in filter(_is_removable, draft.views):
            recommendation = (
                rebalance_recommended(view, state, policy, draft.as_of) if view.phase is NodePhase.READY else None
            )
            if recommendation is not None and view.name not in is_unhealthy and bin_key(view) not in draft.claimed:
                is_unhealthy.add(view.name)
                yield _Due(view, RemovalCause.REBALANCE_RECOMMENDED, recommendation, is_forced=False)
    for view in (*ages.drifted, *(ages.by_age[: bisect_right(ages.expires_at, draft.as_of)])):
        if view.phase is not NodePhase.READY or bin_key(view) in draft.claimed or view.name in is_unhealthy:
            continue
        if (reason := expired(view, policy, draft.as_of)) is not None:
            yield _Due(view, RemovalCause.EXPIRED, reason, is_forced=is_overdue(view, reason, policy, draft.as_of))
        elif (drift := drifted(view, policy)) is not None:
            yield _Due(view, RemovalCause.DRIFTED, drift, is_forced=False)


class _Ages(NamedTuple):
    """Expiry and drift of nodes, which change with the nodes and the policy alone."""

    expires_at: list[datetime]  # ascending, of the nodes in `by_age`
    by_age: list[NodeView]  # by expiry and name
    drifted: tuple[NodeView, ...]  # those that are not in `by_age`


class _AgesUnder(Table[_Ages]):
    """Expiry and drift of the nodes under a policy."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._drifted = Selected(lambda view: _expiry_and_drift(view, policy)[1])

    def build(self, nodes: NodeIndex) -> _Ages:
        """Evaluate every node."""
        aged = sorted(((at, view) for view in nodes if (at := self._expires_at(view))), key=_by_age)
        return _Ages([at for at, _ in aged], [view for _, view in aged], self._drifted.build(nodes))

    def update(self, table: _Ages, removed: Sequence[NodeView], added: Sequence[NodeView], nodes: NodeIndex) -> _Ages:
        """Evaluate the replaced nodes."""
        expires_at, by_age = list(table.expires_at), list(table.by_age)
        for view in removed:
            if (at := self._expires_at(view)) is not None:
                place = bisect_left(expires_at, at)
                while by_age[place] is not view:
                    place += 1
                del expires_at[place], by_age[place]
        for view in added:
            if (at := self._expires_at(view)) is not None:
                place = bisect_left(expires_at, at)
                while place < len(by_age) and (expires_at[place], by_age[place].name) < (at, view.name):
                    place += 1
                expires_at.insert(place, at)
                by_age.insert(place, view)
        return _Ages(expires_at, by_age, self._drifted.update(table.drifted, removed, added, nodes))

    def _expires_at(self, view: NodeView) -> datetime | None:
        at, is_drifted = _expiry_and_drift(view, self._policy)
        return None if is_drifted else at


_ages_under = cached_by_identity(4)(_AgesUnder)


def _by_age(entry: tuple[datetime, NodeView]) -> tuple[datetime, str]:
    return entry[0], entry[1].name


def _expiry_and_drift(view: NodeView, policy: ScalingPolicy) -> tuple[datetime | None, bool]:
    """Return when the node expires, and whether it has drifted; nothing if it may not be removed by choice."""
    if not _is_removable(view):
        return None, False
    at = None if view.node is None else expires_at(view.name, view.node.created_at, policy)
    return at, drifted(view, policy) is not None


def _too_many_unhealthy(due: list[_Due], draft: Draft, policy: ScalingPolicy) -> TooManyUnhealthy | None:
    """Count unhealthy nodes of all, also of those that are not ours or leave: a fault of the network or of telemetry
    makes no difference between them."""
    if not any(isinstance(candidate.reason, drain.NodeUnhealthy) for candidate in due):
        return None
    suspects, state, rules = suspect_nodes(draft.state, policy), draft.state, policy.removal
    suspected = (view for view in draft.views if view.node_uid in suspects)
    unhealthy_count = sum(1 for view in suspected if unhealthy(view, state, policy, draft.as_of) is not None)
    nodes_count = sum(1 for view in draft.views if view.usable_since is not None)
    if unhealthy_count <= max(rules.unhealthy_nodes_ok_count, rules.unhealthy_ratio_max * nodes_count):
        return None
    return TooManyUnhealthy(
        unhealthy_count=unhealthy_count, nodes_count=nodes_count, unhealthy_ratio_max=rules.unhealthy_ratio_max
    )


def _remove(due: _Due, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    view, pods, subject = due.view, repack.moving_pods(due.view, draft), f"node/{due.view.node_uid}"
    reason: DeferReason | None = None
    if not due.is_forced:
        reason = repack.protected_node(view, draft) or repack.protected_pod(
            pods, state, policy, draft.as_of, beside=_pods_on_drained_nodes(draft)
        )
    reason = reason or repack.retry_cooldown(view, state, policy, draft.as_of)
    tripped = brake.held_by(view, draft, state, policy) if due.is_forced and reason is None else None
    if tripped is not None:  # before a replacement is bought
        return brake.held(draft, _STEP, subject, tripped)
    if isinstance(due.reason, drain.BootTimedOut):  # budgets never counted such a node, but it has pods
        reason = reason or protecting_directive(view, draft)
    else:
        pause = None if due.is_forced else removal_cooldown(view.pool, due.cause, state, policy, draft.as_of)
        reason = reason or pause or removal_limit(view, due.cause, draft, policy)
    if reason is not None:
        return draft.deferring(_STEP, subject, reason)
    mark = draft.free_capacity.mark()
    relocation = repack.place_elsewhere((view,), pods, draft, state)
    if relocation.fits:
        draft = draft.adding(removals=[_drain(due, draft, policy)])
        return msgspec.structs.replace(draft, claimed=draft.claimed | relocation.hosts)
    draft.free_capacity.rollback(mark)
    # A recommendation is not worth another node.
    if due.cause is RemovalCause.REBALANCE_RECOMMENDED and relocation.unplaced:
        return draft.deferring(_STEP, subject, PodsFitNowhere.of(pod.pod_uid for pod in relocation.unplaced))
    if not relocation.unplaced:
        last = max(relocation.coming, key=lambda entry: (entry.expected_at is None, entry.expected_at, entry.key))
        return draft.deferring(_STEP, subject, CapacityExpected(node=last.name, expected_at=last.expected_at))
    purchases, reason = repack.buy_replacement(view, due.cause, relocation, draft, state, policy)
    return draft.adding(purchases=purchases) if reason is None else draft.deferring(_STEP, subject, reason)


def _pods_on_drained_nodes(draft: Draft) -> Iterator[PodObserved]:
    disrupting = {removal.node_uid for removal in draft.removals if isinstance(removal, DrainNode)}
    for view in draft.views:
        if view.node_uid in disrupting:
            yield from repack.moving_pods(view, draft)


def _drain(due: _Due, draft: Draft, policy: ScalingPolicy) -> DrainNode:
    seconds = policy.removal.forced_drain_seconds if due.is_forced else policy.drain_seconds_max
    deadline_at = draft.as_of + timedelta(seconds=seconds)
    removal = draft.drain(due.view, due.reason, deadline_at=deadline_at, is_voluntary=not due.is_forced)
    return brake.marked(removal, due.view, draft) if due.is_forced else removal
