"""Steps `release_idle` and `consolidate`: unneeded nodes are removed, never on missing data, never many at once.

Only nodes that were bought are ever removed. Whether a node is empty follows from its pods alone, never from telemetry.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.demand.elastic import elastic_job_of
from gpu_autoscaler.core.disruption import brake, repack
from gpu_autoscaler.core.disruption.disruption_budgets import removal_limit
from gpu_autoscaler.core.disruption.eligibility import gpu_seconds_at_risk
from gpu_autoscaler.core.disruption.move_price import SPAN_SECONDS, paid_reservation
from gpu_autoscaler.core.disruption.spare_nodes import Spare, expected_uses
from gpu_autoscaler.core.disruption.utilization import underutilized, utilization_cooldown
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.limits.override_bounds import exceeded_override
from gpu_autoscaler.core.next_change import has_lasted, has_lasted_longer, start_of_span
from gpu_autoscaler.core.nodes.boot_timeout import boot_timed_out, has_workload_pods
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView, Selected, bin_key
from gpu_autoscaler.core.placement.bins import low_requests, requested_ratio
from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.pools import idle_seconds_set
from gpu_autoscaler.core.provisioning.cooldown import removal_cooldown
from gpu_autoscaler.core.state.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import BuyNode, Deferred, DrainNode, ReleaseInstance
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons import defer, defer_limits, defer_waits, drain
from gpu_autoscaler.model.reasons.base import IdleRule
from gpu_autoscaler.model.reasons.buy import UnmetDemand

# ---- how long an empty node is kept
# Keeping an empty node until it has cost as much as its replacement (boot time at its price, and the wait) never costs
# more than twice the optimum (Karlin, Manasse, Rudolph, Sleator, "Competitive Snoopy Caching", 1988: rent or buy).


def _idle_time(view: NodeView, policy: ScalingPolicy) -> tuple[float, IdleRule]:
    """Return after how long without pods the node is removed, and by which rule: the time that is set, else break-even
    up to the policy's maximum, which also holds where the cost is unknown or zero. Reserved nodes cost nothing."""
    set_seconds = idle_seconds_set(policy, view.pool)
    if set_seconds is not None:
        return set_seconds, IdleRule(name="idle_seconds")
    offer = None if view.order is None or view.order.decision is None else view.order.decision.offer
    if offer is None:
        return policy.idle_seconds_max, IdleRule(name="idle_seconds_max")
    price = 0 if offer.capacity_type is CapacityType.RESERVED else offer.price_micro_usd_per_hour
    hourly = None if price is None else price + policy.node_overhead_micro_usd_per_hour
    if not hourly:
        return policy.idle_seconds_max, IdleRule(name="idle_seconds_max")
    waiting = policy.removal.waiting_micro_usd_per_hour
    again = offer.boot_seconds * (1.0 + waiting / hourly)
    is_bounded = again > policy.idle_seconds_max
    return min(policy.idle_seconds_max, again), IdleRule(
        name="idle_seconds_max" if is_bounded else "break_even",
        boot_seconds=offer.boot_seconds,
        node_micro_usd_per_hour=hourly,
        waiting_micro_usd_per_hour=waiting,
    )


def _idle_times(
    empty: Sequence[NodeView], draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> Mapping[str, tuple[float, IdleRule]]:
    """Return after how long without pods each node is removed, and by which rule, by name of the node. What the next
    work will hardly use leaves before break-even."""
    result = {view.name: _idle_time(view, policy) for view in empty}
    limit = policy.removal.unneeded_idle_seconds
    leaving = {removal.node_name for removal in draft.removals if isinstance(removal, DrainNode)}
    leaving |= {
        view.name
        for view in empty
        if (_abandoned_gang(view, draft) is not None or _is_idle(view, result[view.name][0], draft))
        and _keeper(view, draft, state, policy) is None
    }
    spares = [
        Spare(view, seconds, rule.break_even_seconds)
        for view in empty
        for seconds, rule in [result[view.name]]
        if seconds > limit and rule.break_even_seconds is not None and view.name not in leaving
    ]
    for name, uses in expected_uses(spares, leaving, draft, state).items():
        if not uses.is_needed:
            seconds, rule = result[name]
            unneeded = msgspec.structs.replace(
                rule,
                name="unneeded",
                uses_count=uses.uses_count,
                starts_count=uses.starts_count,
                use_ratio_min=uses.use_ratio_min,
                kept_seconds=seconds,
            )
            result[name] = limit, unneeded
    return result


# Reasons not to buy for a gang that will not pass soon, unlike a cooldown or an old list.
_NOTHING_TO_BUY = (
    defer_waits.GangBackoff,
    defer_waits.GangTimedOut,
    defer.NoOfferFits,
    defer.PodConstraintsViolated,
    defer.OffersUnavailable,
    defer.PriceUnknown,
    defer_limits.NodesLimit,
    defer_limits.GpusLimit,
    defer_limits.HourlyPriceLimit,
    defer_limits.SpendLimit,
    defer_limits.PoolPaused,
    defer_limits.OverrideReached,
)
_RELEASE = "release_idle"
_CONSOLIDATE = "consolidate"


_EMPTY = Selected(lambda view: view.empty_since is not None)
_UNREADY = Selected(lambda view: view.phase is not NodePhase.READY)
_UNORDERED = Selected(lambda view: view.order is None)


def release_idle(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Drain nodes that were empty for long enough; release instances that never became usable or are orphaned. Nodes
    above an override's maximum, or bought for a gang that cannot be completed, are removed at once."""
    stale = stale_watch(state, policy, draft.as_of)
    if stale is not None:
        return draft.deferring(_RELEASE, "cluster", stale)
    draft = _release(draft, state, policy)
    # The most expensive first, so that a small budget saves most.
    free = (view for view in draft.views.table(_EMPTY) if bin_key(view) not in draft.claimed)
    empty = [view for view in free if _may_leave(view, draft)]
    idle_times = _idle_times(empty, draft, state, policy)
    for view in sorted(empty, key=lambda view: (-(view.price_micro_usd_per_hour or 0), view.name)):
        if view.empty_since is None:
            continue
        idle_seconds = (draft.as_of - view.empty_since).total_seconds()
        allowed_seconds, rule = idle_times[view.name]
        at_once = _abandoned_gang(view, draft) or exceeded_override(view, draft)
        reason: defer.DeferReason | None
        if at_once is None and not _is_idle(view, allowed_seconds, draft):
            reason = defer.NotYetIdle(idle_seconds=idle_seconds, idle_seconds_max=allowed_seconds, rule=rule)
        elif at_once is None:
            reason = _keeper(view, draft, state, policy) or _blocker(
                view, RemovalCause.EMPTY, draft, state, policy, is_unneeded=rule.name == "unneeded"
            )
        else:
            reason = repack.protected_node(view, draft) or removal_limit(view, RemovalCause.EMPTY, draft, policy)
        if reason is not None:
            draft = draft.deferring(_RELEASE, f"node/{view.node_uid}", reason)
        else:
            idle = drain.NodeIdle(idle_seconds=idle_seconds, idle_seconds_max=allowed_seconds, rule=rule)
            draft = draft.adding(removals=_drain(view, draft, policy, at_once or idle))
    return draft


def consolidate(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Drain at most one underused node whose pods may all be disturbed and fit on usable nodes. Not while work waits,
    or pods of an earlier drain still move: they may need the capacity."""
    is_quiet = draft.is_demand_met and not draft.disrupted_nodes() and stale_watch(state, policy, draft.as_of) is None
    if not policy.is_consolidation_on or not is_quiet:
        return draft
    little = underutilized(draft, state, policy)
    for view in _cheapest_first(list(_underused(draft, little, policy)), draft, policy):
        pods = tuple(pod for pod in draft.pods.get(view.name, ()) if counts_for_idleness(pod))
        reason = (
            _kept_as_paid(view, state, policy, draft.as_of)
            or _blocker(view, RemovalCause.UNDERUSED, draft, state, policy)
            or repack.protected_pod(pods, state, policy, draft.as_of)
        )
        saving_micro_usd_per_hour: int | None = None
        is_low = requested_ratio(view, draft.pods) <= policy.consolidation_requested_ratio_max
        used_ratio = None if is_low else little.get(view.node_uid or NodeUid(""))
        if reason is None and used_ratio is not None:
            reason = utilization_cooldown(state, policy, draft.as_of)
        if reason is None:
            reason, saving_micro_usd_per_hour = _move_all(view, pods, draft, state, policy)
        if reason is None:
            underused = drain.NodeUnderused(
                pods=tuple(pod.pod_uid for pod in pods),
                saving_micro_usd_per_hour=saving_micro_usd_per_hour,
                utilization_ratio=used_ratio,
            )
            return draft.adding(removals=_drain(view, draft, policy, underused))
        draft = draft.deferring(_CONSOLIDATE, f"node/{view.node_uid}", reason)
    return draft


def _cheapest_first(views: Sequence[NodeView], draft: Draft, policy: ScalingPolicy) -> Sequence[NodeView]:
    """Return the nodes in the order in which they are drained: those whose work has just saved, or that have few pods,
    are cheap. What work has not saved grows with time, so it is looked at once in each span."""
    if len(views) <= 1:  # no order, and no instant at which it changes
        return views
    at = start_of_span(draft.as_of, SPAN_SECONDS)

    def cost_to_empty(view: NodeView) -> tuple[float, int, str]:
        pods = repack.moving_pods(view, draft)
        return gpu_seconds_at_risk(pods, policy.removal.checkpoint_interval_seconds, at), len(pods), view.name

    return sorted(views, key=cost_to_empty)


# ---- removals and what prevents them


def _release(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Release purchases that missed their deadline or their gang, and instances without an order."""
    unready = draft.views.table(_UNREADY)
    releases = [
        (view, _missed_deadline(view, draft, policy) or _release_of_abandoned_gang(view, draft)) for view in unready
    ]
    # A release canceled because of work on the node may be newer than the state here.
    waits = {
        view.name: repack.retry_cooldown(view, state, policy, draft.as_of)
        for view, release in releases
        if release is not None
    }
    draft = draft.adding(
        deferred=[
            Deferred(step=_RELEASE, subject=f"order/{view.action_id}", reason=wait)
            for view in unready
            if (wait := waits.get(view.name)) is not None
        ]
    )
    for view, release in releases:
        if release is not None and waits[view.name] is None:
            draft = _releasing(release, view, draft, state, policy)
    unowned = (view for view in draft.views.table(_UNORDERED) if _is_unused(view, draft))
    orphans = [
        (view, since)
        for view in unowned
        if (since := _orphaned_since(view)) is not None
        and has_lasted_longer(since, policy.boot_seconds_max, draft.as_of)
        and repack.retry_cooldown(view, state, policy, draft.as_of) is None
    ]
    if not orphans:
        return draft
    stale = stale_instances(state, policy, draft.as_of)
    if stale is not None:
        return draft.deferring(_RELEASE, "cluster", stale)
    for view, since in orphans:
        if view.action_id is not None:
            release = ReleaseInstance(
                action_id=draft.next_action_id(),
                provider_id=view.provider_id,
                order_action_id=view.action_id,
                reason=drain.NodeOrphaned(seen_seconds=(draft.as_of - since).total_seconds()),
            )
            draft = _releasing(release, view, draft, state, policy)
    return draft


def _releasing(
    release: ReleaseInstance, view: NodeView, draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> Draft:
    """Add the release. An instance whose node is unknown may run work, unless it never had a node."""
    if not isinstance(release.reason, drain.NodeLost | drain.NodeOrphaned):
        return draft.adding(removals=[release])
    tripped = brake.held_by(view, draft, state, policy)
    if tripped is not None:
        return brake.held(draft, _RELEASE, f"order/{view.action_id}", tripped)
    return draft.adding(removals=[brake.marked(release, view, draft)])


def _missed_deadline(view: NodeView, draft: Draft, policy: ScalingPolicy) -> ReleaseInstance | None:
    """Release an order that missed its deadline. With pods on its node, it is replaced like an unhealthy node."""
    if view.phase is not NodePhase.FAILED or view.order is None or has_workload_pods(view, draft.pods):
        return None
    return ReleaseInstance(
        action_id=draft.next_action_id(),
        provider_id=view.provider_id,
        order_action_id=view.order.action_id,
        reason=drain.NodeLost() if view.has_lost_node else boot_timed_out(view, policy, draft.as_of),
    )


def _release_of_abandoned_gang(view: NodeView, draft: Draft) -> ReleaseInstance | None:
    """Release what boots for an abandoned gang. A launch under way is decided when it is done."""
    abandoned = _abandoned_gang(view, draft)
    if abandoned is None or not view.is_booting or view.provider_id is None or view.action_id is None:
        return None
    if bin_key(view) in draft.claimed or draft.pods.get(view.name):
        return None
    return ReleaseInstance(
        action_id=draft.next_action_id(), provider_id=view.provider_id, order_action_id=view.action_id, reason=abandoned
    )


def _abandoned_gang(view: NodeView, draft: Draft) -> drain.GangAbandoned | None:
    """Return why the gang that the node was bought for cannot be completed; None: it can, or that is unknown. A node
    for elastic members is of no use without their gang."""
    decision = None if view.order is None else view.order.decision
    gang = None if decision is None else decision.gang or _gang_of_elastic_members(decision)
    if gang is None:
        return None
    reasons = (deferred.reason for deferred in draft.deferred if deferred.subject == gang)
    final = next((reason for reason in reasons if isinstance(reason, _NOTHING_TO_BUY)), None)
    return None if final is None else drain.GangAbandoned(gang=gang, defer_reason=final.tag())


def _gang_of_elastic_members(decision: BuyNode) -> str | None:
    job_id = elastic_job_of(decision.reason.demand) if isinstance(decision.reason, UnmetDemand) else None
    return None if job_id is None else f"job/{job_id}"


def _is_unused(view: NodeView, draft: Draft) -> bool:
    """True if no node was ever seen, or one without work that never was usable."""
    if view.node is None:
        return True
    return view.phase is NodePhase.REGISTERED and not any(map(counts_for_idleness, draft.pods.get(view.name, ())))


def _orphaned_since(view: NodeView) -> datetime | None:
    """Return since when an instance with our tag has run without an order; None with an order or without the tag."""
    instance = view.instance
    if view.order is not None or view.drain is not None:
        return None
    if instance is None or view.action_id is None or instance.state not in ("pending", "running"):
        return None
    return instance.launched_at


def _may_leave(view: NodeView, draft: Draft) -> bool:
    is_free = view.drain is None and view.notice is None and view.node_uid not in draft.disrupted_nodes()
    return view.is_ours and view.is_usable and is_free


def _is_idle(view: NodeView, seconds: float, draft: Draft) -> bool:
    return view.empty_since is not None and has_lasted(view.empty_since, seconds, draft.as_of)


def _keeper(
    view: NodeView, draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> defer.KeptAsBuffer | defer.NodeProtected | None:
    """Return what keeps an empty node, however long it is idle."""
    return (
        _kept_as_buffer(view, draft)
        or _kept_as_paid(view, state, policy, draft.as_of)
        or repack.protected_node(view, draft)
    )


def _blocker(
    view: NodeView,
    cause: RemovalCause,
    draft: Draft,
    state: ClusterState,
    policy: ScalingPolicy,
    *,
    is_unneeded: bool = False,
) -> defer.DeferReason | None:
    """Return what prevents the removal: the node's annotations, its age, the minimum, or other removals. The age does
    not keep a node that is unneeded."""
    return (
        repack.protected_node(view, draft)
        or (None if is_unneeded else _minimum_age(view, draft, policy))
        or removal_cooldown(view.pool, cause, state, policy, draft.as_of)
        or removal_limit(view, cause, draft, policy)
    )


def _kept_as_buffer(view: NodeView, draft: Draft) -> defer.KeptAsBuffer | None:
    kept_for = draft.buffers.get(bin_key(view))
    return None if kept_for is None else defer.KeptAsBuffer(kept_for=kept_for)


def _kept_as_paid(
    view: NodeView, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> defer.KeptAsBuffer | None:
    """Return the reservation that keeps the node while it is paid: its removal saves nothing."""
    offer = paid_reservation(view, state, policy, as_of)
    return None if offer is None else defer.KeptAsBuffer(kept_for=f"{defer.RESERVATION}/{offer.key}")


def _minimum_age(view: NodeView, draft: Draft, policy: ScalingPolicy) -> defer_limits.Cooldown | None:
    since, cooldown_seconds = view.usable_since or draft.as_of, policy.scale_down_cooldown_seconds
    if has_lasted(since, cooldown_seconds, draft.as_of):
        return None
    return defer_limits.Cooldown(remaining_seconds=cooldown_seconds - (draft.as_of - since).total_seconds())


def _drain(view: NodeView, draft: Draft, policy: ScalingPolicy, reason: drain.DrainReason) -> Iterator[DrainNode]:
    if view.node_uid is not None:
        yield draft.drain(view, reason, deadline_at=draft.as_of + timedelta(seconds=policy.drain_seconds_max))


# ---- consolidation


def _underused(draft: Draft, little: Mapping[NodeUid, float], policy: ScalingPolicy) -> Iterator[NodeView]:
    """Yield nodes with work of which little is requested or used, and which this plan does not need."""
    low = draft.views.table(low_requests(policy.consolidation_requested_ratio_max))
    keys, needed = {bin_key(view) for view in low}, draft.claimed.union(draft.buffers)
    for view in draft.views if little else low:
        key = bin_key(view)
        is_underused = key in keys or view.node_uid in little
        if is_underused and key not in needed and view.empty_since is None and _may_leave(view, draft):
            yield view


def _move_all(
    view: NodeView, pods: tuple[PodObserved, ...], draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> tuple[defer.DeferReason | None, int | None]:
    """Place all pods on other usable nodes and return the saving an hour (None: unknown), or the reason why not."""
    mark = draft.free_capacity.mark()
    relocation = repack.place_elsewhere((view,), pods, draft, state)
    unplaced = [pod.pod_uid for pod in relocation.unplaced]
    reason: defer.DeferReason | None = None
    if unplaced or relocation.coming:
        reason = defer.PodsFitNowhere.of(unplaced or (pod.pod_uid for pod in pods))
    hosts = relocation.hosts
    prices = [host.price_micro_usd_per_hour for host in draft.views if host is view or bin_key(host) in hosts]
    saving = view.price_micro_usd_per_hour
    is_direct = policy.utilization_trigger == "direct"
    if reason is None and not is_direct and (saving is None or None in prices):
        reason = defer.PriceUnknown(offers=(view.instance_type or view.name,))
    whole = sum(price for price in prices if price is not None)
    if reason is None and not is_direct and (saving or 0) < policy.consolidation_saving_ratio_min * whole:
        reason = defer.SavingTooSmall(
            saving_ratio=(saving or 0) / whole, saving_ratio_min=policy.consolidation_saving_ratio_min
        )
    if reason is not None:
        draft.free_capacity.rollback(mark)
    return reason, saving
