"""Steps `release_idle` and `consolidate`: what is not needed goes, never on missing data, never many at once.

Only nodes that we bought are ever removed. That a node is empty comes from pods alone; telemetry has no say here.
"""

from collections.abc import Iterator, Mapping
from datetime import timedelta

from gpu_autoscaler.core.bins import bin_key, requested_ratio
from gpu_autoscaler.core.bounds import beyond
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.further import elastic_job_of
from gpu_autoscaler.core.nodes.booting import boot_timed_out, has_workload_pods
from gpu_autoscaler.core.nodes.life import NodePhase, NodeView
from gpu_autoscaler.core.policies.removal import RemovalCause
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.removing.idling import idle_seconds_allowed
from gpu_autoscaler.core.removing.moving import (
    moving_pods,
    place_elsewhere,
    protected_node,
    protected_pod,
    too_soon,
)
from gpu_autoscaler.core.removing.pace import too_many_go
from gpu_autoscaler.core.removing.patience import stake_gpu_seconds
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.use import little_used, too_soon_again
from gpu_autoscaler.core.views import counts_for_idleness
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Deferred, ReleaseInstance
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons import (
    HourlyPriceLimit,
    Cooldown,
    DrainReason,
    GangAbandoned,
    GpusLimit,
    DeferReason,
    KeptAsBuffer,
    SpendLimit,
    PodConstraintsViolated,
    NodeIdle,
    NodeLost,
    NodeOrphaned,
    NodesLimit,
    NodeUnderused,
    NoOfferFits,
    NotYetIdle,
    OffersUnavailable,
    OverrideReached,
    PodsFitNowhere,
    PoolPaused,
    PriceUnknown,
    SavingTooSmall,
    UnmetDemand,
)
from gpu_autoscaler.model.waits import GangBackoff, GangTimedOut

# Why a gang is not bought that will not be bought a moment later either. A cooldown passes; an old list says nothing.
_NOTHING_TO_BUY = (
    GangBackoff,
    GangTimedOut,
    NoOfferFits,
    PodConstraintsViolated,
    OffersUnavailable,
    PriceUnknown,
    NodesLimit,
    GpusLimit,
    HourlyPriceLimit,
    SpendLimit,
    PoolPaused,
    OverrideReached,
)
_RELEASE = "release_idle"
_CONSOLIDATE = "consolidate"


def release_idle(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Nodes that were empty for long enough drain; instances that never became usable, or nobody's, are given back.

    What was bought for a gang that cannot be completed goes at once: nothing else needs it, and nothing will idle it.
    So does what is more than somebody allows for a while.
    """
    stale = stale_watch(state, policy, draft.as_of)
    if stale is not None:
        return draft.adding(deferred=[Deferred(step=_RELEASE, subject="cluster", reason=stale)])
    draft = _give_back(draft, state, policy)
    # The dearest go first, so that a small budget saves most.
    empty = (view for view in draft.views if view.empty_since is not None)
    for view in sorted(empty, key=lambda view: (-(view.price_micro_usd_per_hour or 0), view.name)):
        if view.empty_since is None or not _may_leave(view, draft) or bin_key(view) in draft.claimed:
            continue
        idle_seconds = (draft.as_of - view.empty_since).total_seconds()
        allowed_seconds = idle_seconds_allowed(view, policy)
        at_once = _given_up(view, draft) or beyond(view, draft)
        reason: DeferReason | None
        if at_once is None and idle_seconds < allowed_seconds:
            reason = NotYetIdle(idle_seconds=idle_seconds, idle_seconds_max=allowed_seconds)
        elif at_once is None:
            reason = _kept_ahead(view, draft) or _blocker(view, RemovalCause.EMPTY, draft, policy)
        else:
            reason = protected_node(view, draft) or too_many_go(view, RemovalCause.EMPTY, draft, policy)
        if reason is not None:
            held = Deferred(step=_RELEASE, subject=f"node/{view.node_uid}", reason=reason)
            draft = draft.adding(deferred=[held])
        else:
            idle = NodeIdle(idle_seconds=idle_seconds, idle_seconds_max=allowed_seconds)
            draft = draft.adding(removals=_drain(view, draft, policy, at_once or idle))
    return draft


def consolidate(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """At most one little used node drains: every pod on it may be disturbed and has a place on a usable node.

    Not while work waits for nodes, nor while pods of an earlier drain still move: the room may be theirs.
    """
    is_quiet = draft.is_demand_met and not draft.disturbing() and stale_watch(state, policy, draft.as_of) is None
    if not policy.is_consolidation_on or not is_quiet:
        return draft
    little = little_used(draft, state, policy)
    for view in sorted(_underused(draft, little, policy), key=lambda view: _dearness(view, draft, policy)):
        pods = tuple(pod for pod in draft.pods.get(view.name, ()) if counts_for_idleness(pod))
        reason = _blocker(view, RemovalCause.UNDERUSED, draft, policy) or protected_pod(
            pods, state, policy, draft.as_of
        )
        saving_micro_usd_per_hour: int | None = None
        used_ratio = None if _asks_little(view, draft, policy) else little.get(view.node_uid or NodeUid(""))
        if reason is None and used_ratio is not None:
            reason = too_soon_again(state, policy, draft.as_of)
        if reason is None:
            reason, saving_micro_usd_per_hour = _move_all(view, pods, draft, state, policy)
        if reason is None:
            underused = NodeUnderused(
                pods=tuple(pod.pod_uid for pod in pods),
                saving_micro_usd_per_hour=saving_micro_usd_per_hour,
                utilization_ratio=used_ratio,
            )
            return draft.adding(removals=_drain(view, draft, policy, underused))
        held = Deferred(step=_CONSOLIDATE, subject=f"node/{view.node_uid}", reason=reason)
        draft = draft.adding(deferred=[held])
    return draft


def _dearness(view: NodeView, draft: Draft, policy: ScalingPolicy) -> tuple[float, int, str]:
    """Nodes whose work saved just now are cheap to empty, and so are those with few pods."""
    pods = moving_pods(view, draft)
    return stake_gpu_seconds(pods, policy.removal.checkpoint_interval_seconds, draft.as_of), len(pods), view.name


# ---- what may go, and what keeps it


def _give_back(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Purchases that missed their deadline or their gang, and instances that no decision stands behind."""
    unready = [view for view in draft.views if view.phase is not NodePhase.READY]
    undone = [(view, _late(view, draft, policy) or _without_gang(view, draft)) for view in unready]
    # Where work was found at the last look, what is known here may still be older than that.
    waits = {view.name: too_soon(view, state, policy, draft.as_of) for view, release in undone if release is not None}
    draft = draft.adding(
        removals=[each for view, each in undone if each is not None and waits[view.name] is None],
        deferred=[
            Deferred(step=_RELEASE, subject=f"order/{view.action_id}", reason=wait)
            for view in unready
            if (wait := waits.get(view.name)) is not None
        ],
    )
    nobodys = (view for view in draft.views if view.order is None and _is_unused(view, draft))
    orphans = [
        view
        for view in nobodys
        if _orphaned_seconds(view, draft) > policy.boot_seconds_max
        and too_soon(view, state, policy, draft.as_of) is None
    ]
    if not orphans:
        return draft
    stale = stale_instances(state, policy, draft.as_of)
    if stale is not None:
        return draft.adding(deferred=[Deferred(step=_RELEASE, subject="cluster", reason=stale)])
    return draft.adding(
        removals=[
            ReleaseInstance(
                action_id=draft.next_action_id(),
                provider_id=view.provider_id,
                order_action_id=view.action_id,
                reason=NodeOrphaned(seen_seconds=_orphaned_seconds(view, draft)),
            )
            for view in orphans
            if view.action_id is not None
        ]
    )


def _late(view: NodeView, draft: Draft, policy: ScalingPolicy) -> ReleaseInstance | None:
    """Give back what missed its deadline. Where pods run on it already it is renewed, as a sick node is."""
    if view.phase is not NodePhase.FAILED or view.order is None or has_workload_pods(view, draft.pods):
        return None
    return ReleaseInstance(
        action_id=draft.next_action_id(),
        provider_id=view.provider_id,
        order_action_id=view.order.action_id,
        reason=NodeLost() if view.has_lost_node else boot_timed_out(view, policy, draft.as_of),
    )


def _without_gang(view: NodeView, draft: Draft) -> ReleaseInstance | None:
    """Give back what boots for a gang that is given up. One whose launch is under way is looked at when it is done."""
    given_up = _given_up(view, draft)
    if given_up is None or not view.is_booting or view.provider_id is None or view.action_id is None:
        return None
    if bin_key(view) in draft.claimed or draft.pods.get(view.name):
        return None
    return ReleaseInstance(
        action_id=draft.next_action_id(),
        provider_id=view.provider_id,
        order_action_id=view.action_id,
        reason=given_up,
    )


def _given_up(view: NodeView, draft: Draft) -> GangAbandoned | None:
    """Return why the gang that the node was bought for cannot be completed; None where it can, or nobody knows.

    What was bought for members beyond a gang alone is of no use without it; the gang needs none of that.
    """
    decision = None if view.order is None else view.order.decision
    gang = None if decision is None else decision.gang or _gang_before(decision)
    if gang is None:
        return None
    reasons = (held.reason for held in draft.deferred if held.subject == gang)
    final = next((reason for reason in reasons if isinstance(reason, _NOTHING_TO_BUY)), None)
    return None if final is None else GangAbandoned(gang=gang, defer_reason=final.tag())


def _gang_before(decision: BuyNode) -> str | None:
    job_id = elastic_job_of(decision.reason.demand) if isinstance(decision.reason, UnmetDemand) else None
    return None if job_id is None else f"job/{job_id}"


def _is_unused(view: NodeView, draft: Draft) -> bool:
    """True where no node was ever seen, or one that never was usable, without work on it."""
    if view.node is None:
        return True
    return view.phase is NodePhase.REGISTERED and not any(map(counts_for_idleness, draft.pods.get(view.name, ())))


def _orphaned_seconds(view: NodeView, draft: Draft) -> float:
    """How long an instance with our tag has run without an order; 0 for one that has one, or no tag."""
    instance = view.instance
    if view.order is not None or view.drain is not None:
        return 0.0
    if instance is None or view.action_id is None or instance.state not in ("pending", "running"):
        return 0.0
    return (draft.as_of - instance.launched_at).total_seconds()


def _may_leave(view: NodeView, draft: Draft) -> bool:
    """Only a usable node of ours goes by choice, and not twice."""
    is_free = view.drain is None and view.notice is None and view.node_uid not in draft.disturbing()
    return view.is_ours and view.is_usable and is_free


def _blocker(view: NodeView, cause: RemovalCause, draft: Draft, policy: ScalingPolicy) -> DeferReason | None:
    """What keeps a node that could go: its own marks, its youth, the minimum, or others that are going."""
    return protected_node(view, draft) or _young(view, draft, policy) or too_many_go(view, cause, draft, policy)


def _kept_ahead(view: NodeView, draft: Draft) -> KeptAsBuffer | None:
    kept_for = draft.ahead.get(bin_key(view))
    return None if kept_for is None else KeptAsBuffer(kept_for=kept_for)


def _young(view: NodeView, draft: Draft, policy: ScalingPolicy) -> Cooldown | None:
    usable_seconds = 0.0 if view.usable_since is None else (draft.as_of - view.usable_since).total_seconds()
    if usable_seconds < policy.scale_down_cooldown_seconds:
        return Cooldown(remaining_seconds=policy.scale_down_cooldown_seconds - usable_seconds)
    return None


def _drain(view: NodeView, draft: Draft, policy: ScalingPolicy, reason: DrainReason) -> Iterator[DrainNode]:
    """The drain of a registered node; nothing for one that is not."""
    if view.node_uid is not None:
        yield draft.drain(view, reason, deadline_at=draft.as_of + timedelta(seconds=policy.drain_seconds_max))


# ---- consolidation


def _underused(draft: Draft, little: Mapping[NodeUid, float], policy: ScalingPolicy) -> Iterator[NodeView]:
    """Nodes with work on them, of which little is asked or used, and on which this plan counts for nothing more."""
    for view in draft.views:
        if view.empty_since is not None or not _may_leave(view, draft) or bin_key(view) in draft.claimed:
            continue
        if bin_key(view) in draft.ahead:
            continue
        if view.node_uid in little or _asks_little(view, draft, policy):
            yield view


def _asks_little(view: NodeView, draft: Draft, policy: ScalingPolicy) -> bool:
    return requested_ratio(view, draft.pods) <= policy.consolidation_requested_ratio_max


def _move_all(
    view: NodeView, pods: tuple[PodObserved, ...], draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> tuple[DeferReason | None, int | None]:
    """Place all pods on other usable nodes and return the saving an hour, None where nobody knows; or say why not."""
    mark = draft.room.mark()
    places = place_elsewhere((view,), pods, draft, state)
    homeless = [pod.pod_uid for pod in places.homeless]
    reason: DeferReason | None = None
    if homeless or places.coming:
        reason = PodsFitNowhere(pods=tuple(homeless or (pod.pod_uid for pod in pods)))
    prices = [each.price_micro_usd_per_hour for each in draft.views if each is view or bin_key(each) in places.hosts]
    saving = view.price_micro_usd_per_hour
    is_direct = policy.utilization_trigger == "direct"
    if reason is None and not is_direct and (saving is None or None in prices):
        reason = PriceUnknown(offers=(view.instance_type or view.name,))
    whole = sum(price for price in prices if price is not None)
    if reason is None and not is_direct and (saving or 0) < policy.consolidation_saving_ratio_min * whole:
        reason = SavingTooSmall(
            saving_ratio=(saving or 0) / whole, saving_ratio_min=policy.consolidation_saving_ratio_min
        )
    if reason is not None:
        draft.room.rollback(mark)
    return reason, saving
