"""Limits of nodes, GPUs, price and spend, and their usage.

Nodes that we bought count from the plan that decided them until the cloud confirms their end; other nodes do not count.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.demand.items import BillingScope, DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft, Purchase, is_discretionary
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.intake.directives import NO_ACTIVE_DIRECTIVES, ActiveDirectives
from gpu_autoscaler.core.limits.override_bounds import OverrideUsage, frozen_by
from gpu_autoscaler.core.limits.spend import PlannedSpend, SpendSnapshot, spend_caps, spend_snapshot_of
from gpu_autoscaler.core.nodes.views import Counted, NodeView, Selected, table_of
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.ledger import CLUSTER, owners_of
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import FORCED, BuyNode, Deferred, DrainNode, ReleaseInstance, rejection_subjects
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.buy import BelowMinimum, UtilizationHigh
from gpu_autoscaler.model.reasons.defer import DeferReason, PriceUnknown
from gpu_autoscaler.model.reasons.defer_limits import Frozen, GpusLimit, HourlyPriceLimit, NodesLimit
from gpu_autoscaler.model.reasons.defer_waits import PlanFull


class _Usage(NamedTuple):
    """Usage by owner before the plan buys anything."""

    nodes: Counter[str]
    gpus: Counter[str]
    nodes_of_unknown: int  # of an unknown pool and project: they may be those of any
    gpus_of_unknown: int
    price_micro_usd_per_hour: int
    unpriced: tuple[str, ...]


class _Equal(NamedTuple):
    """What counted nodes have in common."""

    pool: str | None
    zone: str | None
    project: str | None
    gpu_count: int
    price_micro_usd_per_hour: int | None
    is_owner_known: bool


def _equal(view: NodeView) -> _Equal | None:
    if not view.is_ours or not view.is_counted:
        return None
    project, price = view.labels.get(labels.PROJECT_ID), view.price_micro_usd_per_hour
    return _Equal(view.pool, view.zone, project, view.gpu_count, price, view.is_owner_known)


_EQUAL = Counted(_equal)
_UNPRICED = Selected(lambda view: view.is_ours and view.is_counted and view.price_micro_usd_per_hour is None)


@cached_by_identity(4)
def _usage_of(equal: Mapping[_Equal, int], unpriced: tuple[NodeView, ...]) -> _Usage:
    nodes: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    for kind, count in equal.items():
        for owner in owners_of(kind.pool, kind.zone, kind.project):
            nodes[owner] += count
            gpus[owner] += count * kind.gpu_count
    unknown = [(kind, count) for kind, count in equal.items() if not kind.is_owner_known]
    return _Usage(
        nodes=nodes,
        gpus=gpus,
        nodes_of_unknown=sum(count for _, count in unknown),
        gpus_of_unknown=sum(kind.gpu_count * count for kind, count in unknown),
        price_micro_usd_per_hour=sum((kind.price_micro_usd_per_hour or 0) * count for kind, count in equal.items()),
        unpriced=tuple(sorted(view.name for view in unpriced)),
    )


class LimitUsage:
    """Usage of every limit while a plan is made. Mutable: purchases are added or taken back."""

    def __init__(
        self,
        views: Sequence[NodeView],
        policy: ScalingPolicy,
        directives: ActiveDirectives = NO_ACTIVE_DIRECTIVES,
        spend: SpendSnapshot | None = None,
    ) -> None:
        """`spend` is required if the policy has spend budgets."""
        self._policy = policy
        self._override_usage = OverrideUsage(views, directives)
        self._spend, self._planned_spend = spend, None if spend is None else PlannedSpend(spend)
        self._maxima = _maxima(policy)
        usage = _usage_of(table_of(views, _EQUAL), table_of(views, _UNPRICED))
        self._nodes = usage.nodes.copy()
        self._gpus = usage.gpus.copy()
        self._of_unknown = usage.nodes_of_unknown, usage.gpus_of_unknown
        self._price_micro_usd_per_hour = usage.price_micro_usd_per_hour
        self._unpriced = usage.unpriced

    @property
    def nodes_count(self) -> int:
        """Number of counted nodes, launches in flight included."""
        return self._nodes[CLUSTER]

    def add(self, pool: str, offer: Offer, scope: BillingScope, count: int = 1) -> None:
        """Add nodes of the offer; a negative count takes them back."""
        owners = owners_of(pool, offer.zone, scope.project)
        for owner in owners:
            self._nodes[owner] += count
            self._gpus[owner] += count * offer.resources.gpu_count
        self._override_usage.add(pool, offer, count)
        if self._planned_spend is not None:
            self._planned_spend.add(owners, offer, scope, count)
        self._price_micro_usd_per_hour += count * (offer.price_micro_usd_per_hour or 0)

    def with_current_usage(self, reason: DeferReason) -> DeferReason:
        """Return the limit with the current usage, without purchases that were taken back."""
        if isinstance(reason, NodesLimit):
            return msgspec.structs.replace(reason, nodes_count=self._usage(reason.owner)[0])
        if isinstance(reason, GpusLimit):
            return msgspec.structs.replace(reason, gpu_count=self._usage(reason.owner)[1])
        return reason

    def excess(self, pool: str, offer: Offer, scope: BillingScope) -> DeferReason | None:
        """Return the limit that one more node of the offer would exceed; None: it may be bought."""
        owners = owners_of(pool, offer.zone, scope.project)
        for owner in owners:
            if owner not in self._maxima:
                continue
            nodes_max, gpus_max = self._maxima[owner]
            nodes_count, gpu_count = self._usage(owner)
            if nodes_max is not None and nodes_count + 1 > nodes_max:
                return NodesLimit(nodes_count=nodes_count, nodes_count_max=nodes_max, owner=owner)
            # A node without GPUs exceeds no GPU limit, even if the limit is exceeded already.
            more = offer.resources.gpu_count
            if gpus_max is not None and more and gpu_count + more > gpus_max:
                return GpusLimit(gpu_count=gpu_count, gpu_count_max=gpus_max, owner=owner)
        exceeded = self._override_usage.excess(pool, offer) or self._excess_of_price(offer)
        if exceeded is not None or self._planned_spend is None:
            return exceeded
        return self._planned_spend.excess(owners, offer, scope)

    def reserved_work_seconds(self, work_seconds_max: float) -> float | None:
        """Return the work time that spend is reserved for; None: the same as for work of unknown time."""
        return None if self._spend is None or self._spend.is_open_ended(work_seconds_max) else work_seconds_max

    def _usage(self, owner: str) -> tuple[int, int]:
        """Return nodes and GPUs of the owner; of a pool or project also those of which neither is known."""
        nodes, gpus = self._of_unknown if owner.startswith(("pool/", "project/")) else (0, 0)
        return self._nodes.get(owner, 0) + nodes, self._gpus.get(owner, 0) + gpus

    def _excess_of_price(self, offer: Offer) -> DeferReason | None:
        price_max, price = self._policy.price_micro_usd_per_hour_max, offer.price_micro_usd_per_hour
        if price_max is None:
            return None
        if self._unpriced or price is None:  # an unknown price is not free
            return PriceUnknown.of(self._unpriced or (offer.key,))
        if self._price_micro_usd_per_hour + price > price_max:
            return HourlyPriceLimit(price_micro_usd_per_hour=price, price_micro_usd_per_hour_max=price_max)
        return None


def limit_usage_of(draft: Draft, policy: ScalingPolicy) -> LimitUsage:
    """Return the usage before this draft buys anything."""
    spend = spend_snapshot_of(draft.state, draft.views, draft.pods, policy, draft.as_of) if spend_caps(policy) else None
    return LimitUsage(draft.views, policy, draft.directives, spend)


def billing_scope_of(decision: BuyNode) -> BillingScope:
    """Return the billing scope of a purchase."""
    project = next((value for key, value in decision.labels if key == labels.PROJECT_ID), None)
    return BillingScope(project, decision.work_seconds_max)


@cached_by_identity(4)
def _maxima(policy: ScalingPolicy) -> Mapping[str, tuple[int | None, int | None]]:
    """Maximum nodes and GPUs by owner, for owners with limits."""
    maxima: dict[str, tuple[int | None, int | None]] = {}
    for kind, parts in (("zone", policy.limits.zones), ("project", policy.limits.projects)):
        maxima |= {f"{kind}/{part.name}": (part.nodes_count_max, part.gpu_count_max) for part in parts}
    maxima |= {f"pool/{pool.name}": (pool.nodes_count_max, pool.gpu_count_max) for pool in policy.pools}
    maxima |= {CLUSTER: (policy.nodes_count_max, policy.gpu_count_max)}
    return {owner: most for owner, most in maxima.items() if most != (None, None)}


def trim(draft: Draft, policy: ScalingPolicy) -> Draft:
    """Drop whole transactions that exceed a limit, lowest priority first. Drains of nodes that the cloud takes back and
    canceled drains are kept."""
    frozen = frozen_by(draft.directives, policy)
    kept, dropped = _within_limits(draft, policy, frozen)
    reasons = [(subject, reason) for purchase, reason in dropped for subject in subjects(purchase.decision)]
    kept, withdrawn = _without_lost_gangs(kept, dict(reasons), draft.demand)
    # A gang of several nodes has one entry, with its first reason.
    first = dict(reversed((*reasons, *withdrawn)))
    deferred = [Deferred(step="trim", subject=subject, reason=reason) for subject, reason in reversed(first.items())]
    draft, deferred = _without_rejected_removals(draft, deferred)
    removals = draft.removals
    if frozen is not None:
        removals = tuple(drain for drain in removals if isinstance(drain, DrainNode) and not is_discretionary(drain))
        deferred += [
            Deferred(step="trim", subject=_subject(removal), reason=frozen)
            for removal in draft.removals
            if removal not in removals
        ]
    return msgspec.structs.replace(draft, purchases=kept, removals=removals).adding(deferred=deferred)


def _without_rejected_removals(draft: Draft, deferred: list[Deferred]) -> tuple[Draft, list[Deferred]]:
    """Drop removals and canceled drains that are set aside, and defer them.

    What is set aside keeps no node from the drain that a notice or a deletion forces on it.
    """
    if not draft.rejected:
        return draft, deferred
    kept: list[DrainNode | ReleaseInstance] = []
    for removal in draft.removals:
        (subject,) = rejection_subjects(removal)
        is_forced = isinstance(removal, DrainNode) and not is_discretionary(removal)
        reason = draft.rejected.get(f"{FORCED}{subject}" if is_forced else subject)
        if reason is None:
            kept.append(removal)
        else:
            deferred = [*deferred, Deferred(step="trim", subject=_subject(removal), reason=reason)]
    canceled = tuple(drain for drain in draft.canceled_drains if f"node/{drain.node_uid}" not in draft.rejected)
    return msgspec.structs.replace(draft, removals=tuple(kept), canceled_drains=canceled), deferred


# ---- how much one plan decides. What is beyond waits for the next plan, which follows at once.

PURCHASES_COUNT_MAX = 2_000
PURCHASES_BYTES_MAX = 3 * 2**20  # as JSON
TRANSACTION_BYTES_MAX = 5 * 2**20  # of a gang that fills a plan alone
REMOVALS_COUNT_MAX = 2_000  # without forced drains, which never wait


def cut_to_one_plan(draft: Draft) -> Draft:
    """Defer the purchases and removals beyond what one plan holds. Transactions stay whole, in their order."""
    kept, deferred = _first_purchases(draft.purchases)
    reasons = {deferral.subject: deferral.reason for deferral in deferred}
    kept, withdrawn = _without_lost_gangs(kept, reasons, draft.demand)
    deferred += [Deferred(step=_CUT_STEP, subject=subject, reason=reason) for subject, reason in withdrawn]
    removals: list[DrainNode | ReleaseInstance] = []
    count = 0
    for removal in draft.removals:
        is_forced = isinstance(removal, DrainNode) and not removal.is_voluntary
        if is_forced or count < REMOVALS_COUNT_MAX:
            removals.append(removal)
            count += not is_forced
        else:
            full = PlanFull(decisions_count=REMOVALS_COUNT_MAX)
            deferred.append(Deferred(step=_CUT_STEP, subject=_subject(removal), reason=full))
    return msgspec.structs.replace(draft, purchases=kept, removals=tuple(removals)).adding(deferred=deferred)


_CUT_STEP = "cut_to_one_plan"


def _first_purchases(purchases: tuple[Purchase, ...]) -> tuple[tuple[Purchase, ...], list[Deferred]]:
    """Return the purchases of the first transactions that one plan holds, and the deferrals of the others."""
    kept: list[Purchase] = []
    dropped: dict[str, PlanFull] = {}  # by transaction
    kept_bytes = 0
    is_full = False
    for name, members in _transactions(purchases).items():
        size = sum(len(msgspec.json.encode(purchase.decision)) for purchase in members)
        is_too_large = size > TRANSACTION_BYTES_MAX
        has_place = len(kept) + len(members) <= PURCHASES_COUNT_MAX and kept_bytes + size <= PURCHASES_BYTES_MAX
        needs_dropped = any(needed in dropped for purchase in members for needed in purchase.depends_on)
        # The first one that does not fit is the first of the next plan: smaller ones do not overtake it for ever.
        is_full = is_full or not (has_place or is_too_large or not kept)
        if is_full or is_too_large or needs_dropped:
            nodes_count = len(members) if is_too_large else 1
            dropped[name] = PlanFull(decisions_count=len(kept), nodes_count=nodes_count, is_too_large=is_too_large)
        else:
            kept += members
            kept_bytes += size
    deferred = [
        Deferred(step=_CUT_STEP, subject=subject, reason=dropped[purchase.transaction])
        for purchase in purchases
        if purchase.transaction in dropped
        for subject in subjects(purchase.decision)
    ]
    return tuple(kept), deferred


def _transactions(purchases: Iterable[Purchase]) -> Mapping[str, list[Purchase]]:
    """Return the purchases by transaction, in the order of the first of each."""
    transactions: dict[str, list[Purchase]] = {}
    for purchase in purchases:
        transactions.setdefault(purchase.transaction, []).append(purchase)
    return transactions


def subjects(decision: BuyNode) -> tuple[str, ...]:
    """Return the subjects of a purchase, for deferrals."""
    return ("cluster",) if isinstance(decision.reason, BelowMinimum | UtilizationHigh) else decision.reason.demand


def _without_lost_gangs(
    kept: Iterable[Purchase], reasons: Mapping[str, DeferReason], demand: Iterable[DemandItem]
) -> tuple[tuple[Purchase, ...], list[tuple[str, DeferReason]]]:
    """Remove gangs that lost a purchase, and their elastic members, from the demand of the purchases that are kept.

    `reasons` are those of the subjects of dropped purchases. A node that only such gangs would use is not bought.
    Returns also the subjects that lost their purchase only here, with the reason of their gang.
    """
    if not reasons:
        return tuple(kept), []
    owners = {item.key: _owner_of(item) for item in demand}
    lost = {owner: reasons[key] for key, owner in owners.items() if key in reasons and not key.startswith("member/")}
    withdrawn = {key: lost[owner] for key, owner in owners.items() if owner in lost}
    remaining: list[Purchase] = []
    also_deferred: dict[str, DeferReason] = {}
    for purchase in kept:
        decision = purchase.decision
        served = subjects(decision)
        left = tuple(subject for subject in served if subject not in withdrawn)
        also_deferred |= {subject: withdrawn[subject] for subject in served if subject not in {*left, *reasons}}
        if left == served or isinstance(decision.reason, BelowMinimum | UtilizationHigh):
            remaining.append(purchase)
        elif left or decision.gang is not None:
            reason = msgspec.structs.replace(decision.reason, demand=left)
            decision = msgspec.structs.replace(decision, reason=reason)
            remaining.append(msgspec.structs.replace(purchase, decision=decision))
    return tuple(remaining), list(also_deferred.items())


def _owner_of(item: DemandItem) -> str:
    """Return what the item is served with, or not at all: its gang, the job of an elastic member, or itself."""
    if item.source is DemandSource.ELASTIC_MEMBER:
        return f"job/{item.job_id}"
    return item.gang or item.key


def _within_limits(
    draft: Draft, policy: ScalingPolicy, frozen: Frozen | None
) -> tuple[tuple[Purchase, ...], list[tuple[Purchase, DeferReason]]]:
    """Split purchases, ordered by priority, into those within the limits and the others, with the exceeded limit.

    What is set aside for a violation is dropped as well, with all of its transaction.
    """
    if not draft.purchases:
        return (), []
    usage = limit_usage_of(draft, policy)
    kept: list[Purchase] = []
    dropped: list[tuple[Purchase, DeferReason]] = []
    dropped_transactions: dict[str, DeferReason] = {}
    for name, members in _transactions(draft.purchases).items():
        reason = frozen or _rejected(members, draft) or _excess_of_all(members, usage, dropped_transactions)
        if reason is None:
            kept += members
        else:
            dropped_transactions[name] = reason
            dropped += [(purchase, reason) for purchase in members]
    return tuple(kept), dropped


def _rejected(members: Iterable[Purchase], draft: Draft) -> DeferReason | None:
    """Return why one of the purchases is set aside; None: none is."""
    if not draft.rejected:
        return None
    subjects = (subject for purchase in members for subject in rejection_subjects(purchase.decision))
    return next((draft.rejected[subject] for subject in subjects if subject in draft.rejected), None)


def _excess_of_all(
    members: list[Purchase], usage: LimitUsage, dropped_transactions: Mapping[str, DeferReason]
) -> DeferReason | None:
    """Add all members; or add none and return the first exceeded limit."""
    needed = sorted(set().union(*(purchase.depends_on for purchase in members)))
    reason: DeferReason | None = next(
        (dropped_transactions[name] for name in needed if name in dropped_transactions), None
    )
    counted: list[BuyNode] = []
    for purchase in members:
        decision = purchase.decision
        reason = reason or usage.excess(decision.pool, decision.offer, billing_scope_of(decision))
        if reason is not None:
            break
        usage.add(decision.pool, decision.offer, billing_scope_of(decision))
        counted.append(decision)
    if reason is not None:
        for decision in counted:
            usage.add(decision.pool, decision.offer, billing_scope_of(decision), -1)
    return reason


def _subject(removal: DrainNode | ReleaseInstance) -> str:
    if isinstance(removal, DrainNode):
        return f"node/{removal.node_uid}"
    return f"action/{removal.order_action_id}"
