"""Step `replace_expensive`: work moves from nodes to fewer or cheaper ones, once those are ready.

Only if the saving over the policy's payback time exceeds the cost of the move. A node bought for its price stays for
that time, so that price changes never move work back and forth.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice

from gpu_autoscaler.core.demand.sources import job_spec, pod_shape
from gpu_autoscaler.core.disruption import repack
from gpu_autoscaler.core.disruption.disruption_budgets import removal_limit, removals_left
from gpu_autoscaler.core.disruption.eligibility import gpu_seconds_at_risk
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.next_change import has_lasted, note_always, plain
from gpu_autoscaler.core.nodes.views import NodeIndex, NodeView, Table, bin_key
from gpu_autoscaler.core.placement.bins import low_requests
from gpu_autoscaler.core.placement.pod_affinity import rules_of
from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.cooldown import rebuy_cooldown, recently_removed_types, removal_cooldown
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.interruption_history import rate_of, terminations_by_pool
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer import DeferReason, SavingTooSmall
from gpu_autoscaler.model.reasons.drain import NodeUnderused

# ---- return to spot


def stands_in_for_spot(view: NodeView, draft: Draft, state: ClusterState) -> bool:
    """True for an on-demand node all of whose work may run on spot: it was bought while spot was unavailable."""
    if view.capacity_type is not CapacityType.ON_DEMAND:
        return False
    rules = rules_of(state)
    shapes = (pod_shape(pod, job_spec(state, pod.job_id), rules) for pod in repack.moving_pods(view, draft))
    return all(shape.is_spot_allowed for shape in shapes)


def leaves_for_risky_spot(
    group: tuple[NodeView, ...],
    purchases: tuple[Purchase, ...],
    state: ClusterState,
    policy: ScalingPolicy,
    as_of: datetime,
) -> bool:
    """True if work would move from an on-demand node to spot that is still interrupted too often."""
    if not any(view.capacity_type is CapacityType.ON_DEMAND for view in group):
        return False
    ends = terminations_by_pool(state, as_of)
    return any(rate_of(purchase.decision.offer, ends) > policy.spot.interruption_ratio_max for purchase in purchases)


_STEP = "replace_expensive"
_HOUR_SECONDS = 3600.0
# Groups and nodes that are priced in one plan; bounds its time. Source: our own.
_TRIES_COUNT_MAX = 8


def replace_expensive(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Drain at most one node onto its replacement, or buy one replacement; only while nothing else moves."""
    is_quiet = draft.is_demand_met and not draft.disrupted_nodes() and not draft.purchases
    if not policy.is_consolidation_on or not is_quiet or stale_watch(state, policy, draft.as_of) is not None:
        return draft
    bought = repack.replacements(state.orders)
    for view in draft.views if bought else ():
        is_due = view.node_uid in bought and _may_leave(view) and bin_key(view) not in draft.claimed
        if is_due and (drain := _onto_replacement(view, bought, draft, state, policy)) is not None:
            return draft.adding(removals=[drain])
    old = [view for view in _old_enough(draft, policy) if bin_key(view) not in draft.claimed]
    old.sort(key=lambda view: (-(view.price_micro_usd_per_hour or 0), view.name))
    removed_types = recently_removed_types(state, policy, draft.as_of)
    is_ready = partial(_may_be_replaced, bought=bought, draft=draft, state=state, policy=policy)
    for group in _groups(old, is_ready, draft, policy):
        reason: DeferReason | None
        purchases, reason = _cheaper(group, draft, state, policy)
        if (
            purchases
            and (reason := rebuy_cooldown(tuple(purchase.decision for purchase in purchases), removed_types)) is None
        ):
            return draft.adding(purchases=purchases)
        if purchases:
            note_always(draft.as_of)  # the cost of the move grows, until it is not worth it
        if reason is not None and len(group) == 1:
            draft = draft.deferring(_STEP, f"node/{group[0].node_uid}", reason)
    return draft


def _may_leave(view: NodeView) -> bool:
    """True for a usable managed node with work and a known price."""
    is_here = view.is_ours and view.is_usable and view.drain is None and view.notice is None
    return is_here and view.empty_since is None and view.price_micro_usd_per_hour is not None


class _ByAge(Table[tuple[NodeView, ...]]):
    """The nodes that may leave, the one that became usable first at the front."""

    def build(self, nodes: NodeIndex) -> tuple[NodeView, ...]:
        """Sort all of them."""
        return tuple(sorted(filter(_may_leave, nodes), key=_age_order))

    def update(
        self, table: tuple[NodeView, ...], removed: Sequence[NodeView], added: Sequence[NodeView], _: NodeIndex
    ) -> tuple[NodeView, ...]:
        """Replace the changed ones."""
        views = list(table)
        for view in filter(_may_leave, removed):
            del views[bisect_left(views, _age_order(view), key=_age_order)]
        for view in filter(_may_leave, added):
            insort(views, view, key=_age_order)
        return tuple(views)


def _age_order(view: NodeView) -> tuple[datetime, str, str]:
    return view.usable_since or _LONG_AGO, view.name, view.node_uid or ""


_BY_AGE = _ByAge()
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def _old_enough(draft: Draft, policy: ScalingPolicy) -> Sequence[NodeView]:
    """Return the nodes that reached the lowest age at which one may be replaced."""
    views, payback_seconds = draft.views.table(_BY_AGE), policy.removal.replacement_payback_hours * _HOUR_SECONDS
    least = max(min(payback_seconds, policy.spot.return_to_spot_seconds_min), policy.scale_down_cooldown_seconds)
    count = bisect_right(views, plain(draft.as_of) - timedelta(seconds=least), key=lambda view: _age_order(view)[0])
    if count < len(views):  # the next one notes when it will be
        count += has_lasted(_age_order(views[count])[0], least, draft.as_of)
    return views[:count]


def _may_be_replaced(
    view: NodeView,
    bought: Mapping[NodeUid, repack.Replacement],
    draft: Draft,
    state: ClusterState,
    policy: ScalingPolicy,
) -> bool:
    """True if it is old enough, was not tried recently, and neither it nor its work is protected."""
    rules = policy.removal
    last = bought.get(view.node_uid) if view.node_uid is not None else None
    if last is not None and not has_lasted(last.planned_at, rules.replacement_cooldown_seconds, draft.as_of):
        return False
    horizon_seconds = rules.replacement_payback_hours * _HOUR_SECONDS
    if stands_in_for_spot(view, draft, state):
        horizon_seconds = min(horizon_seconds, policy.spot.return_to_spot_seconds_min)
    least = max(horizon_seconds, policy.scale_down_cooldown_seconds)
    if least > 0 and (view.usable_since is None or not has_lasted(view.usable_since, least, draft.as_of)):
        return False
    return not _kept(view, draft, state, policy)


def _kept(view: NodeView, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> bool:
    """True where pace, marks, a drain that was given up lately, or its pods keep the node."""
    return bool(
        removal_limit(view, RemovalCause.UNDERUSED, draft, policy)
        or removal_cooldown(view.pool, RemovalCause.UNDERUSED, state, policy, draft.as_of)
        or repack.protected_node(view, draft)
        or repack.retry_cooldown(view, state, policy, draft.as_of)
        or repack.protected_pod(repack.moving_pods(view, draft), state, policy, draft.as_of)
    )


def _groups(
    nodes: Sequence[NodeView], is_ready: Callable[[NodeView], bool], draft: Draft, policy: ScalingPolicy
) -> Iterator[tuple[NodeView, ...]]:
    """Yield the underused nodes all together, as many as may be removed, then one after the other. No more nodes are
    judged than are yielded: in an old fleet nearly all of them may be replaced."""
    count = min(removals_left(RemovalCause.UNDERUSED, draft, policy), _TRIES_COUNT_MAX)
    low = {bin_key(view) for view in draft.views.table(low_requests(policy.consolidation_requested_ratio_max))}
    underused = (view for view in nodes if bin_key(view) in low and is_ready(view))
    if len(together := tuple(islice(underused, max(0, count)))) > 1:
        yield together
    for view in islice(filter(is_ready, nodes), _TRIES_COUNT_MAX):
        yield (view,)


def _cheaper(
    group: tuple[NodeView, ...], draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> tuple[tuple[Purchase, ...], SavingTooSmall | None]:
    """Return what to buy in place of the group; empty if its work fits elsewhere or nothing is cheaper. With a saving
    that is too small, return that as the reason."""
    mark = draft.free_capacity.mark()
    relocation = repack.place_elsewhere(
        group, [pod for view in group for pod in repack.moving_pods(view, draft)], draft, state
    )
    purchases: tuple[Purchase, ...] = ()
    if relocation.unplaced and not relocation.coming:
        purchases, _ = repack.replacement_fleet(
            relocation.unplaced, group, RemovalCause.UNDERUSED, draft, state, policy
        )
    draft.free_capacity.rollback(mark)
    if not purchases or leaves_for_risky_spot(group, purchases, state, policy, draft.as_of):
        return (), None
    overhead = policy.node_overhead_micro_usd_per_hour
    before = sum((view.price_micro_usd_per_hour or 0) + overhead for view in group)
    after = sum((purchase.decision.offer.price_micro_usd_per_hour or 0) + overhead for purchase in purchases)
    if after >= before:
        return (), None
    saving_ratio, rules = (before - after) / before, policy.removal
    is_worth_it = (before - after) * rules.replacement_payback_hours > _move_micro_usd(group, purchases, draft, policy)
    if is_worth_it and saving_ratio >= policy.consolidation_saving_ratio_min:
        return purchases, None
    return (), SavingTooSmall(saving_ratio=saving_ratio, saving_ratio_min=policy.consolidation_saving_ratio_min)


def _move_micro_usd(
    group: tuple[NodeView, ...], purchases: tuple[Purchase, ...], draft: Draft, policy: ScalingPolicy
) -> float:
    """Return the cost of the move: new nodes while they boot, all while the old ones drain, and repeated work."""
    drain_hours = policy.drain_seconds_max / _HOUR_SECONDS
    cost = 0.0
    for purchase in purchases:
        offer = purchase.decision.offer
        cost += (offer.price_micro_usd_per_hour or 0) * (offer.boot_seconds / _HOUR_SECONDS + drain_hours)
    for view in group:
        node_at_risk = gpu_seconds_at_risk(
            repack.moving_pods(view, draft), policy.removal.checkpoint_interval_seconds, draft.as_of
        )
        gpu_price = (view.price_micro_usd_per_hour or 0) / max(1, view.allocatable.gpu_count)
        cost += gpu_price * node_at_risk / _HOUR_SECONDS
    return cost


def _onto_replacement(
    view: NodeView,
    bought: Mapping[NodeUid, repack.Replacement],
    draft: Draft,
    state: ClusterState,
    policy: ScalingPolicy,
) -> DrainNode | None:
    """Return the drain of a node whose replacement is ready, decided again with current data."""
    if view.node_uid is None:
        return None
    last, pods = bought[view.node_uid], repack.moving_pods(view, draft)
    new = [view for view in draft.views if view.action_id in last.action_ids and view.is_usable]
    old = [view for view in draft.views if view.node_uid in last.node_uids]
    saving = sum(view.price_micro_usd_per_hour or 0 for view in old)
    saving -= sum(view.price_micro_usd_per_hour or 0 for view in new)
    is_price_unknown = any(view.price_micro_usd_per_hour is None for view in (*old, *new))
    if last.cause != RemovalCause.UNDERUSED or len(new) < len(last.action_ids) or is_price_unknown or saving <= 0:
        return None
    if _kept(view, draft, state, policy):
        return None
    mark = draft.free_capacity.mark()
    relocation = repack.place_elsewhere((view,), pods, draft, state)
    if relocation.unplaced or relocation.coming:
        draft.free_capacity.rollback(mark)
        return None
    return draft.drain(
        view,
        NodeUnderused(pods=tuple(pod.pod_uid for pod in pods), saving_micro_usd_per_hour=saving),
        deadline_at=draft.as_of + timedelta(seconds=policy.drain_seconds_max),
    )
