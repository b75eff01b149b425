"""What the policy allows at most, and what already counts against it.

Counted are the nodes that we bought: each from the plan that decided it until the cloud confirmed that it is gone or
never was. Foreign nodes are room, but the limits are about what this system may buy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.demand.items import BillingScope
from gpu_autoscaler.core.draft import Draft, Purchase, is_chosen
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.intake.directives import NO_ACTIVE_DIRECTIVES, ActiveDirectives
from gpu_autoscaler.core.limits.override_bounds import OverrideUsage, bought_gpu_count, frozen_by
from gpu_autoscaler.core.limits.spend import PlannedSpend, SpendSnapshot, spend_caps, spend_snapshot_of
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.ledger import CLUSTER, owners_of
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Deferred, DrainNode, ReleaseInstance
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.buy import BelowMinimum, UtilizationHigh
from gpu_autoscaler.model.reasons.defer import DeferReason, PriceUnknown
from gpu_autoscaler.model.reasons.defer_limits import Frozen, GpusLimit, HourlyPriceLimit, NodesLimit


class _Counted(NamedTuple):
    """What counts before anything is bought, by owner."""

    nodes: Counter[str]
    gpus: Counter[str]
    price_micro_usd_per_hour: int
    unpriced: tuple[str, ...]


@cached_by_identity(2)
def _counted(views: tuple[NodeView, ...]) -> _Counted:
    counted = [view for view in views if view.is_ours and view.is_counted]
    nodes: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    alike = Counter(
        (view.pool, view.zone, view.labels.get(labels.PROJECT_ID), bought_gpu_count(view)) for view in counted
    )
    for (pool, zone, project, gpu_count), count in alike.items():
        for owner in owners_of(pool, zone, project):
            nodes[owner] += count
            gpus[owner] += count * gpu_count
    return _Counted(
        nodes=nodes,
        gpus=gpus,
        price_micro_usd_per_hour=sum(view.price_micro_usd_per_hour or 0 for view in counted),
        unpriced=tuple(sorted(view.name for view in counted if view.price_micro_usd_per_hour is None)),
    )


class LimitUsage:
    """How much of each limit is used up. A scratch pad, like the room: what is bought is added, or taken back."""

    def __init__(
        self,
        views: tuple[NodeView, ...],
        policy: ScalingPolicy,
        directives: ActiveDirectives = NO_ACTIVE_DIRECTIVES,
        books: SpendSnapshot | None = None,
    ) -> None:
        """`books` are needed where the policy limits money by day or month."""
        self._policy = policy
        self._headcount = OverrideUsage(views, directives)
        self._planned_spend = None if books is None else PlannedSpend(books)
        self._maxima = _maxima(policy)
        counted = _counted(views)
        self._nodes = counted.nodes.copy()
        self._gpus = counted.gpus.copy()
        self._price_micro_usd_per_hour = counted.price_micro_usd_per_hour
        self._unpriced = counted.unpriced

    @property
    def nodes_count(self) -> int:
        """Nodes of ours, orders in flight counted."""
        return self._nodes[CLUSTER]

    def add(self, pool: str, offer: Offer, customer: BillingScope, count: int = 1) -> None:
        """Count this many nodes of the offer more; a negative count takes them back."""
        owners = owners_of(pool, offer.zone, customer.project)
        for owner in owners:
            self._nodes[owner] += count
            self._gpus[owner] += count * offer.resources.gpu_count
        self._headcount.add(pool, offer, count)
        if self._planned_spend is not None:
            self._planned_spend.add(owners, offer, customer, count)
        self._price_micro_usd_per_hour += count * (offer.price_micro_usd_per_hour or 0)

    def with_current_usage(self, reason: DeferReason) -> DeferReason:
        """Return a limit with what counts against it now: what was counted for a try has been taken back."""
        if isinstance(reason, NodesLimit):
            return msgspec.structs.replace(reason, nodes_count=self._nodes[reason.owner])
        if isinstance(reason, GpusLimit):
            return msgspec.structs.replace(reason, gpu_count=self._gpus[reason.owner])
        return reason

    def excess(self, pool: str, offer: Offer, customer: BillingScope) -> DeferReason | None:
        """Return the limit that one more node of the offer would pass; None: it may be bought."""
        owners = owners_of(pool, offer.zone, customer.project)
        for owner in owners:
            nodes_max, gpus_max = self._maxima.get(owner, (None, None))
            if nodes_max is not None and self._nodes[owner] + 1 > nodes_max:
                return NodesLimit(nodes_count=self._nodes[owner], nodes_count_max=nodes_max, owner=owner)
            # A node without GPUs passes no limit of GPUs, not even one that is passed already.
            more = offer.resources.gpu_count
            if gpus_max is not None and more and self._gpus[owner] + more > gpus_max:
                return GpusLimit(gpu_count=self._gpus[owner], gpu_count_max=gpus_max, owner=owner)
        passed = self._headcount.excess(pool, offer) or self._excess_of_price(offer)
        if passed is not None or self._planned_spend is None:
            return passed
        return self._planned_spend.excess(owners, offer, customer)

    def _excess_of_price(self, offer: Offer) -> DeferReason | None:
        price_max, price = self._policy.price_micro_usd_per_hour_max, offer.price_micro_usd_per_hour
        if price_max is None:
            return None
        if self._unpriced or price is None:  # a node of unknown price is not free: nothing is proven while it runs
            return PriceUnknown(offers=self._unpriced or (offer.key,))
        if self._price_micro_usd_per_hour + price > price_max:
            return HourlyPriceLimit(price_micro_usd_per_hour=price, price_micro_usd_per_hour_max=price_max)
        return None


def limit_usage_of(draft: Draft, policy: ScalingPolicy) -> LimitUsage:
    """What is used up before this draft buys anything."""
    books = spend_snapshot_of(draft.state, draft.views, draft.pods, policy, draft.as_of) if spend_caps(policy) else None
    return LimitUsage(draft.views, policy, draft.directives, books)


def billing_scope_of(decision: BuyNode) -> BillingScope:
    """Whom a node is bought for, as its order says wherever it is seen."""
    project = next((value for key, value in decision.labels if key == labels.PROJECT_ID), None)
    return BillingScope(project, decision.work_seconds_max)


@cached_by_identity(4)
def _maxima(policy: ScalingPolicy) -> Mapping[str, tuple[int | None, int | None]]:
    """The most nodes and GPUs by owner; owners without a limit are left out."""
    maxima: dict[str, tuple[int | None, int | None]] = {}
    for kind, parts in (("zone", policy.limits.zones), ("project", policy.limits.projects)):
        maxima |= {f"{kind}/{part.name}": (part.nodes_count_max, part.gpu_count_max) for part in parts}
    maxima |= {f"pool/{pool.name}": (pool.nodes_count_max, pool.gpu_count_max) for pool in policy.pools}
    return maxima | {CLUSTER: (policy.nodes_count_max, policy.gpu_count_max)}


def trim(draft: Draft, policy: ScalingPolicy) -> Draft:
    """Nothing in the draft passes a limit: whole transactions go, those of lowest priority first.

    Involuntary drains stay: what the cloud takes is not ours to keep. So do cancelled drains, which change nothing.
    """
    frozen = frozen_by(draft.directives, policy)
    kept, dropped = _within_limits(draft.purchases, limit_usage_of(draft, policy), frozen)
    held = [
        Deferred(step="trim", subject=subject, reason=reason)
        for purchase, reason in dropped
        for subject in subjects(purchase.decision)
    ]
    removals = draft.removals
    if frozen is not None:
        removals = tuple(each for each in removals if isinstance(each, DrainNode) and not is_chosen(each))
        held += [
            Deferred(step="trim", subject=_removed(each), reason=frozen)
            for each in draft.removals
            if each not in removals
        ]
    return msgspec.structs.replace(draft, purchases=kept, removals=removals).adding(deferred=held)


def subjects(decision: BuyNode) -> tuple[str, ...]:
    """What a purchase is for, as subjects of what is held back with it."""
    return ("cluster",) if isinstance(decision.reason, BelowMinimum | UtilizationHigh) else decision.reason.demand


def _within_limits(
    purchases: Iterable[Purchase], account: LimitUsage, frozen: Frozen | None
) -> tuple[tuple[Purchase, ...], list[tuple[Purchase, DeferReason]]]:
    """Split purchases, which come by priority, into those within the limits and those beyond, with the limit."""
    transactions: dict[str, list[Purchase]] = {}
    for purchase in purchases:
        transactions.setdefault(purchase.transaction, []).append(purchase)
    kept: list[Purchase] = []
    dropped: list[tuple[Purchase, DeferReason]] = []
    beyond: dict[str, DeferReason] = {}
    for name, members in transactions.items():
        reason = frozen or _excess_of_all(members, account, beyond)
        if reason is None:
            kept += members
        else:
            beyond[name] = reason
            dropped += [(purchase, reason) for purchase in members]
    return tuple(kept), dropped


def _excess_of_all(
    members: list[Purchase], account: LimitUsage, beyond: Mapping[str, DeferReason]
) -> DeferReason | None:
    """Count all members, or none of them and return the first limit they pass."""
    needed = sorted(set().union(*(purchase.needs for purchase in members)))
    reason: DeferReason | None = next((beyond[name] for name in needed if name in beyond), None)
    counted: list[BuyNode] = []
    for purchase in members:
        decision = purchase.decision
        reason = reason or account.excess(decision.pool, decision.offer, billing_scope_of(decision))
        if reason is not None:
            break
        account.add(decision.pool, decision.offer, billing_scope_of(decision))
        counted.append(decision)
    if reason is not None:
        for decision in counted:
            account.add(decision.pool, decision.offer, billing_scope_of(decision), -1)
    return reason


def _removed(removal: DrainNode | ReleaseInstance) -> str:
    if isinstance(removal, DrainNode):
        return f"node/{removal.node_uid}"
    return f"action/{removal.order_action_id}"
