"""Offers, launches and removals: builders of stories, used through `tests/support/stories.py`."""

from collections.abc import Mapping
from datetime import datetime, timedelta

from tests.support.timed_facts import MINUTE, T0, Story, TimedFact, resources

from gpu_autoscaler.events.node import INSTANCE_STATE_VERSION, InstanceState, NodeInstanceObserved
from gpu_autoscaler.events.scaling import (
    ScalingDrainCancelled,
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingPlanMade,
    ScalingPodEvicted,
)
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotOffersSampled
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, Cut, DrainNode, Plan
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, PodUid, ProviderId
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.buy import BuyReason, RejectedOffer, RejectionCause, UnmetDemand
from gpu_autoscaler.model.reasons.drain import DrainReason, NodeIdle
from gpu_autoscaler.model.scheduling import Taint

# ---- available offers


def offer(
    instance_type: str = "p4d.24xlarge",
    *,
    gpus: int = 8,
    model: str | None = "A100",
    gpu_memory_gib: int | None = 40,
    cpu: float = 96,
    memory_gib: float = 1100,
    zone: str = "zone-a",
    capacity_type: CapacityType = CapacityType.SPOT,
    usd_per_hour: float | None = 10.0,
    boot_seconds: float = 120.0,
) -> Offer:
    """One purchase that is possible."""
    has_gpu = model is not None
    return Offer(
        instance_type=instance_type,
        zone=zone,
        capacity_type=capacity_type,
        resources=resources(gpus=gpus if has_gpu else 0, cpu=cpu, memory_gib=memory_gib, pods=110),
        gpu_model=model,
        gpu_memory_bytes=gpu_memory_gib * GIBIBYTE if has_gpu and gpu_memory_gib is not None else None,
        price_micro_usd_per_hour=None if usd_per_hour is None else round(usd_per_hour * 1_000_000),
        boot_seconds=boot_seconds,
    )


def on_sale(*offers: Offer, at: datetime = T0) -> Story:
    """All that the cloud sells, as sampled at this instant."""
    fact = SpotOffersSampled(
        epoch=1, version=int(at.timestamp()), provider="sim", offers=offers or (offer(),), sampled_at=at
    )
    return (TimedFact(fact, at),)


# ---- plans and orders


def planned(*decisions: AnyDecision, plan_id: str = "plan-1", at: datetime = T0) -> Story:
    """A plan that decided this."""
    plan = Plan(as_of=at, parent_sequence=0, decisions=decisions)
    fact = ScalingPlanMade(plan_id=PlanId(plan_id), plan=plan, cut=Cut(), policy_digest="p", core_digest="c")
    return (TimedFact(fact, at),)


def purchase(
    action_id: str,
    bought: Offer | None = None,
    *,
    pool: str = "default",
    at: datetime = T0,
    boot_seconds_max: float = 900.0,
    reason: BuyReason | None = None,
    labels: Mapping[str, str] | None = None,
    taints: tuple[Taint, ...] = (),
    gang: str | None = None,
    transaction: str | None = None,
) -> BuyNode:
    """The decision to buy one node."""
    return BuyNode(
        action_id=ActionId(action_id),
        pool=pool,
        offer=bought or offer(),
        labels=tuple(sorted((labels or {}).items())),
        taints=taints,
        deadline_at=at + timedelta(seconds=boot_seconds_max),
        reason=reason or UnmetDemand(demand=(), offers_considered=1, price_micro_usd_per_hour=10_000_000),
        gang=gang,
        transaction=None if transaction is None else ActionId(transaction),
    )


def spread(usd_per_hour: float, instead_of_usd_per_hour: float) -> UnmetDemand:
    """The reason of a node at this price because the share of a capacity pool excluded an offer at the other."""
    prices = [round(usd * MICRO_USD_PER_USD) for usd in (usd_per_hour, instead_of_usd_per_hour)]
    excluded = RejectedOffer(
        offer="full", price_micro_usd_per_hour=prices[1], because=RejectionCause.CAPACITY_POOL_SHARE
    )
    return UnmetDemand(
        demand=("job/train",), offers_considered=2, price_micro_usd_per_hour=prices[0], instead_of=excluded
    )


def bought(
    decision: BuyNode,
    *,
    at: datetime = T0,
    plan_id: str | None = None,
    is_ordered: bool = True,
    is_launched: bool = True,
    is_refused: bool = False,
    retry_after: timedelta = 3 * MINUTE,
) -> Story:
    """A purchase on its way: planned, ordered, and launched or refused, all at this instant."""
    plan = PlanId(plan_id or f"plan-{decision.action_id}")
    story = planned(decision, plan_id=plan, at=at)
    action_id = decision.action_id
    if not is_ordered:
        return story
    ordered = ScalingNodeOrdered(
        action_id=action_id,
        plan_id=plan,
        pool=decision.pool,
        offer=decision.offer,
        deadline_at=decision.deadline_at,
        labels=decision.labels,
        gang=decision.gang,
        slices=decision.slices,
    )
    story = (*story, TimedFact(ordered, at))
    if is_refused:
        refused = ScalingLaunchRefused(
            action_id=action_id,
            plan_id=plan,
            offer=decision.offer,
            code="InsufficientInstanceCapacity",
            message="no capacity",
            scope="offer",
            refused_at=at,
            retry_at=at + retry_after,
        )
        return (*story, TimedFact(refused, at))
    if not is_launched:
        return story
    launched = ScalingNodeLaunched(
        action_id=action_id,
        plan_id=plan,
        provider_id=provider_id(action_id),
        instance_type=decision.offer.instance_type,
        zone=decision.offer.zone,
        capacity_type=decision.offer.capacity_type,
        price_micro_usd_per_hour=decision.offer.price_micro_usd_per_hour,
        launched_at=at,
    )
    return (*story, TimedFact(launched, at), *instance(decision, at=at))


def provider_id(name: str) -> ProviderId:
    """The instance of a node or an action of this name."""
    return ProviderId(f"sim:///zone-a/i-{name}")


def instance(decision: BuyNode, *, state: InstanceState = "running", at: datetime = T0) -> Story:
    """The cloud's own word about the instance that this purchase made."""
    fact = NodeInstanceObserved(
        epoch=1,
        version=INSTANCE_STATE_VERSION[state],
        provider_id=provider_id(decision.action_id),
        action_id=decision.action_id,
        state=state,
        instance_type=decision.offer.instance_type,
        zone=decision.offer.zone,
        capacity_type=decision.offer.capacity_type,
        price_micro_usd_per_hour=decision.offer.price_micro_usd_per_hour,
        launched_at=at,
        terminated_at=at if state == "terminated" else None,
    )
    return (TimedFact(fact, at),)


def drained(
    name: str,
    *,
    action_id: str | None = None,
    reason: DrainReason | None = None,
    is_voluntary: bool = True,
    is_started: bool = True,
    at: datetime = T0,
    seconds_max: float = 600.0,
    cancelled_at: datetime | None = None,
    abandoned_because: str = "",
) -> Story:
    """The node of this name is being drained since `at`, or until `cancelled_at`."""
    action = ActionId(action_id or f"drain-{name}")
    instance_id = provider_id(f"buy-{name}")
    decision = DrainNode(
        action_id=action,
        node_uid=NodeUid(f"uid-{name}"),
        node_name=name,
        provider_id=instance_id,
        is_voluntary=is_voluntary,
        deadline_at=at + timedelta(seconds=seconds_max),
        reason=reason or NodeIdle(idle_seconds=600.0, idle_seconds_max=600.0),
    )
    story = planned(decision, plan_id=f"plan-{action}", at=at)
    if not is_started:
        return story
    started = ScalingDrainStarted(
        action_id=action,
        plan_id=PlanId(f"plan-{action}"),
        node_uid=decision.node_uid,
        node_name=name,
        provider_id=instance_id,
        is_voluntary=is_voluntary,
        deadline_at=decision.deadline_at,
        started_at=at,
    )
    if cancelled_at is None:
        return (*story, TimedFact(started, at))
    cancelled = ScalingDrainCancelled(
        action_id=action,
        plan_id=PlanId(f"plan-{action}"),
        drain_action_id=action,
        node_uid=decision.node_uid,
        node_name=name,
        cancelled_at=cancelled_at,
        abandoned_because=abandoned_because,
    )
    return (*story, TimedFact(started, at), TimedFact(cancelled, cancelled_at))


def evicted(name: str, *, off: str, is_forced: bool = False, at: datetime = T0) -> Story:
    """The drain of that node (`drained`) evicted the pod of this name."""
    action = ActionId(f"drain-{off}")
    fact = ScalingPodEvicted(
        action_id=action,
        plan_id=PlanId(f"plan-{action}"),
        node_name=off,
        pod_uid=PodUid(f"uid-{name}"),
        pod=f"default/{name}",
        is_forced=is_forced,
        evicted_at=at,
    )
    return (TimedFact(fact, at),)


def notice(name: str, *, reclaim_at: datetime | None = None, at: datetime = T0, event: str = "1") -> Story:
    """The cloud will take the instance of the node of this name."""
    fact = SpotNoticeReceived(
        provider_id=provider_id(f"buy-{name}"),
        kind="terminate",
        provider_event=event,
        reclaim_at=reclaim_at,
        node_name=name,
        received_at=at,
    )
    return (TimedFact(fact, at),)
