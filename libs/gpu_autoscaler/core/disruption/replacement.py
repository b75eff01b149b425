"""Step `replace_expensive`: work moves from nodes to fewer or cheaper ones, once those are ready.

One search: the work of a node, or of several together, goes to nodes that are free, to new ones, or to both, and of the
moves that pay for themselves within the policy's payback time the one is made that saves most for its price. A node
bought for its price stays for that time, so that price changes never move work back and forth.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import NamedTuple

from gpu_autoscaler.core.demand.sources import job_spec, pod_shape
from gpu_autoscaler.core.disruption import repack
from gpu_autoscaler.core.disruption.disruption_budgets import removal_limit, removals_left
from gpu_autoscaler.core.disruption.move_price import HOUR_SECONDS, MovePricing, Price, added_micro_usd_per_hour
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.next_change import has_lasted, plain
from gpu_autoscaler.core.nodes.views import NodeIndex, NodeView, Table, bin_key
from gpu_autoscaler.core.placement.bins import low_requests, requested_ratio
from gpu_autoscaler.core.placement.pod_affinity import rules_of
from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.cooldown import rebuy_cooldown, recently_removed_types, removal_cooldown
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.interruption_history import rate_of, terminations_by_pool
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
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
    group: Sequence[NodeView],
    relocation: repack.Relocation | None,
    purchases: Iterable[Purchase],
    draft: Draft,
    state: ClusterState,
    policy: ScalingPolicy,
) -> bool:
    """True if work would move from an on-demand node to spot that is still interrupted too often."""
    if not any(view.capacity_type is CapacityType.ON_DEMAND for view in group):
        return False
    ends, hosts = terminations_by_pool(state, draft.as_of), relocation.hosts if relocation is not None else ()
    offers = [purchase.decision.offer for purchase in purchases]
    bought = (view.order.decision for view in draft.views if bin_key(view) in hosts and view.order is not None)
    offers += (decision.offer for decision in bought if decision is not None)
    return any(rate_of(offer, ends) > policy.spot.interruption_ratio_max for offer in offers)


_STEP = "replace_expensive"
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
    is_ready = partial(_may_be_replaced, bought=bought, draft=draft, state=state, policy=policy)
    return _best_move(_groups(old, is_ready, draft, policy), draft, state, policy)


class _Move(NamedTuple):
    """A move that pays for itself."""

    group: tuple[NodeView, ...]
    purchases: tuple[Purchase, ...]  # empty: the work fits on free nodes, and the only node of the group is drained
    price: Price


def _best_move(
    groups: Iterable[tuple[NodeView, ...]], draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> Draft:
    """Make the move that saves most for its price; defer the others with the reason."""
    removed_types = recently_removed_types(state, policy, draft.as_of)
    pricing, moves = MovePricing(draft, state, policy), list[_Move]()
    for group in groups:
        reason: DeferReason | None
        move, reason = _move(group, pricing, draft, state, policy)
        if move is not None:
            reason = rebuy_cooldown(tuple(purchase.decision for purchase in move.purchases), removed_types)
        if move is not None and reason is None:
            moves.append(move)
        elif reason is not None and len(group) == 1:
            draft = draft.deferring(_STEP, f"node/{group[0].node_uid}", reason)
    if not moves:
        return draft
    best = max(moves, key=lambda move: move.price.worth)  # of equals the first: the most expensive nodes
    if best.purchases:
        return draft.adding(purchases=best.purchases)
    (view,) = best.group
    pods = repack.moving_pods(view, draft)
    repack.place_elsewhere(best.group, pods, draft, state)
    return draft.adding(removals=[_drain(view, pods, view.price_micro_usd_per_hour, draft, policy)])


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
    views, payback_seconds = draft.views.table(_BY_AGE), policy.removal.replacement_payback_hours * HOUR_SECONDS
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
    least = max(_stays_seconds(view, draft, state, policy), policy.scale_down_cooldown_seconds)
    if least > 0 and (view.usable_since is None or not has_lasted(view.usable_since, least, draft.as_of)):
        return False
    return not _kept(view, draft, state, policy)


def _stays_seconds(view: NodeView, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> float:
    """Return for how long a node is left alone, whatever is cheaper."""
    payback_seconds = policy.removal.replacement_payback_hours * HOUR_SECONDS
    is_stand_in = stands_in_for_spot(view, draft, state)
    return min(payback_seconds, policy.spot.return_to_spot_seconds_min) if is_stand_in else payback_seconds


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
    """Yield the underused nodes all together, as many as may be removed, the most expensive nodes together, and then
    each of those. No more nodes are judged than are yielded: in an old fleet nearly all of them may be replaced."""
    count = max(0, min(removals_left(RemovalCause.UNDERUSED, draft, policy), _TRIES_COUNT_MAX))
    low = {bin_key(view) for view in draft.views.table(low_requests(policy.consolidation_requested_ratio_max))}
    underused = tuple(islice((view for view in nodes if bin_key(view) in low and is_ready(view)), count))
    expensive = tuple(islice(filter(is_ready, nodes), _TRIES_COUNT_MAX))
    if len(underused) > 1:
        yield underused
    if len(expensive[:count]) > 1 and set(map(bin_key, expensive[:count])) != set(map(bin_key, underused)):
        yield expensive[:count]
    for view in expensive:
        yield (view,)


def _move(
    group: tuple[NodeView, ...], pricing: MovePricing, draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> tuple[_Move | None, SavingTooSmall | None]:
    """Return the move of the group's work to free nodes, and to the cheapest new ones for what fits on none; the reason
    where that saves too little, and neither where it is impossible."""
    mark = draft.free_capacity.mark()
    pods = [pod for view in group for pod in repack.moving_pods(view, draft)]
    relocation = repack.place_elsewhere(group, pods, draft, state)
    purchases: tuple[Purchase, ...] = ()
    if relocation.unplaced and not relocation.coming:
        cause = RemovalCause.UNDERUSED
        purchases, _ = repack.replacement_fleet(relocation.unplaced, group, cause, draft, state, policy)
    draft.free_capacity.rollback(mark)
    is_possible = bool(purchases) or (relocation.fits and _may_be_merged(group, relocation, draft, state, policy))
    if not is_possible or leaves_for_risky_spot(group, relocation, purchases, draft, state, policy):
        return None, None
    price, least = pricing.price(group, relocation, purchases), policy.consolidation_saving_ratio_min
    if price is None or price.saved <= 0:
        return None, None
    if price.saving_ratio >= least and price.is_paid_back:
        return _Move(group, purchases, price), None
    return None, _too_small(price, least)


def _may_be_merged(
    group: tuple[NodeView, ...], relocation: repack.Relocation, draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> bool:
    """True for one node whose work may join that of others: little of it is requested, or the work leaves on-demand
    capacity for free spot or reserved nodes. The policy keeps other well used nodes apart."""
    if len(group) != 1 or bin_key(group[0]) in draft.buffers:
        return False
    if requested_ratio(group[0], draft.pods) <= policy.consolidation_requested_ratio_max:
        return True
    hosts = relocation.hosts
    is_cheaper = all(view.capacity_type is not CapacityType.ON_DEMAND for view in draft.views if bin_key(view) in hosts)
    return is_cheaper and stands_in_for_spot(group[0], draft, state)


def _too_small(price: Price, least: float) -> SavingTooSmall:
    if price.saving_ratio < least:
        return SavingTooSmall(saving_ratio=price.saving_ratio, saving_ratio_min=least)
    return SavingTooSmall(
        saving_ratio=price.saving_ratio,
        saving_ratio_min=least,
        saved_micro_usd=round(round(price.saved), -3),
        move_micro_usd=round(round(price.move), -3),
    )


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
    before, after = (
        [added_micro_usd_per_hour(view, state, policy, draft.as_of) for view in views] for views in (old, new)
    )
    is_price_unknown = None in (*before, *after)
    saving = sum(price or 0 for price in before) - sum(price or 0 for price in after)
    if last.cause != RemovalCause.UNDERUSED or len(new) < len(last.action_ids) or is_price_unknown or saving <= 0:
        return None
    if _kept(view, draft, state, policy):
        return None
    mark = draft.free_capacity.mark()
    relocation = repack.place_elsewhere((view,), pods, draft, state)
    if not relocation.fits:
        draft.free_capacity.rollback(mark)
        return None
    return _drain(view, pods, saving, draft, policy)


def _drain(
    view: NodeView, pods: Iterable[PodObserved], saving: int | None, draft: Draft, policy: ScalingPolicy
) -> DrainNode:
    underused = NodeUnderused(pods=tuple(pod.pod_uid for pod in pods), saving_micro_usd_per_hour=saving)
    return draft.drain(view, underused, deadline_at=draft.as_of + timedelta(seconds=policy.drain_seconds_max))
