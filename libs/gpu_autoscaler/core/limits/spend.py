"""Money by day and month: what is spent, what is promised, and whether one more purchase would pass a limit.

Spent is what the ledger charged, and the price of all time since that it has not charged yet. Promised is, for every
node from the plan that buys it on, its price for as long as it may still run: the longest remaining time of its work
and what it takes to remove it, to the end of the period at most. Unknown time is the rest of the period. So what is
within a limit when it is bought stays within it, whatever happens later.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.demand.items import BillingScope
from gpu_autoscaler.core.demand.sources import job_spec
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.nodes.boot_timeout import has_workload_pods
from gpu_autoscaler.core.nodes.views import NodePhase, NodeView
from gpu_autoscaler.core.placement.bins import PodsByNode
from gpu_autoscaler.core.policy.limit_settings import SpendPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.ledger import CLUSTER, Period, owners_of, period_end, period_name, period_start
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.core.state.state import ClusterState, OrderRecord
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.defer import PriceUnknown, WatchStale
from gpu_autoscaler.model.reasons.defer_limits import SpendLimit

# What instances still claim of money limits: their time since the last charge, and as long as they may yet
# run. Read by `core/limits/spend.py`. A node claims from the plan that buys it on; what has ended claims
# what is not charged of it.

# From the last pod's end to the end of billing: a tick, the executor's step, the cloud's own time to end a machine.
ENDING_SECONDS = 120.0
_OVER = (NodePhase.DRAINED, NodePhase.TERMINATING, NodePhase.FAILED)


class UnbilledTime(NamedTuple):
    """One instance's time that is not in the ledger."""

    name: str
    provider_id: ProviderId | None
    owners: tuple[str, ...]  # whose limits it counts against
    price_micro_usd_per_hour: int | None
    from_at: datetime  # charged up to here, or begun
    until_at: datetime | None  # the latest at which billing ends; None: nobody knows

    def micro_usd(self, from_at: datetime, to_at: datetime) -> int:
        """What it costs between two instants; 0 where it does not reach in between, or has no price."""
        until_at = to_at if self.until_at is None else min(self.until_at, to_at)
        return cost_rounded_up(self.price_micro_usd_per_hour or 0, max(self.from_at, from_at), until_at)


def cost_rounded_up(price_micro_usd_per_hour: int, from_at: datetime, to_at: datetime) -> int:
    """A limit is held to the micro-dollar, so no remainder is left out."""
    if to_at <= from_at or not price_micro_usd_per_hour:
        return 0
    return cost_micro_usd(price_micro_usd_per_hour, to_at - from_at) + 1


def tail_seconds(policy: ScalingPolicy) -> float | None:
    """How long a node may still run once its work is over; None: the policy may keep it for ever."""
    if any(pool.nodes_count_min or pool.is_paused for pool in policy.pools):
        return None
    if policy.nodes_count_min or policy.headrooms or policy.scheduled_limits or policy.forecast.is_on:
        return None
    return max(policy.idle_seconds_max, policy.scale_down_cooldown_seconds) + policy.drain_seconds_max + ENDING_SECONDS


def unbilled_time_of(
    state: ClusterState, views: tuple[NodeView, ...], pods: PodsByNode, policy: ScalingPolicy, as_of: datetime
) -> tuple[UnbilledTime, ...]:
    """Every claim there is, of nodes that count against limits and of those that are gone."""
    counted = (view for view in views if view.is_ours and view.is_counted)
    return (*(_claim(view, pods, state, policy, as_of) for view in counted), *_of_the_gone(state, views))


def _claim(
    view: NodeView, pods: PodsByNode, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> UnbilledTime:
    launched = None if view.order is None else view.order.launched
    planned_at = None if view.order is None else view.order.planned_at
    began_at = (
        view.instance.launched_at
        if view.instance is not None
        else launched.launched_at
        if launched is not None
        else planned_at or as_of
    )
    return UnbilledTime(
        name=view.name,
        provider_id=view.provider_id,
        owners=owners_of(view.pool, view.zone, view.labels.get(labels.PROJECT_ID)),
        price_micro_usd_per_hour=view.price_micro_usd_per_hour,
        from_at=_uncharged_from(began_at, view.provider_id, state),
        until_at=billing_ends_by(view, pods, state, policy, as_of),
    )


def billing_ends_by(
    view: NodeView, pods: PodsByNode, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> datetime | None:
    """The latest instant at which the node's billing ends, as its work may take; None: nobody knows."""
    ending = timedelta(seconds=ENDING_SECONDS)
    if view.phase is NodePhase.FAILED and has_workload_pods(view, pods):
        return None  # its drain is to come
    drain = None if view.drain is None else view.drain.decision
    if view.phase in _OVER:
        return as_of + ending
    if isinstance(drain, DrainNode) and not drain.is_voluntary:
        return max(drain.deadline_at, as_of) + ending
    tail = tail_seconds(policy)
    if tail is None or view.phase is NodePhase.LOST:
        return None
    if view.is_booting:
        decision = None if view.order is None else view.order.decision
        if decision is None or decision.work_seconds_max is None or view.usable_by is None:
            return None
        return view.usable_by + timedelta(seconds=decision.work_seconds_max + tail)
    latest = as_of
    for pod in pods.get(view.name, ()):
        if not counts_for_idleness(pod):
            continue
        spec = job_spec(state, pod.job_id)
        if spec is None:
            return None
        latest = max(latest, (pod.started_at or as_of) + timedelta(seconds=spec.duration_seconds_max))
    return latest + timedelta(seconds=tail)


def _uncharged_from(began_at: datetime, provider_id: ProviderId | None, state: ClusterState) -> datetime:
    charge = None if provider_id is None else state.charges.get(provider_id)
    return began_at if charge is None else max(began_at, charge.until_at)


@cached_by_identity(2)
def _of_the_gone(state: ClusterState, views: tuple[NodeView, ...]) -> tuple[UnbilledTime, ...]:
    """The time of instances that are gone and not charged to their end."""
    counted = {view.provider_id for view in views if view.is_ours and view.is_counted}
    orders = _by_instance(state.orders)
    found = (
        _gone(provider_id, orders.get(provider_id), state.instances.get(provider_id), state)
        for provider_id in sorted({*orders, *state.instances})
        if provider_id not in counted
    )
    return tuple(claim for claim in found if claim is not None)


@cached_by_identity(2)
def _by_instance(orders: Mapping[ActionId, OrderRecord]) -> Mapping[ProviderId, OrderRecord]:
    return {order.launched.provider_id: order for order in orders.values() if order.launched is not None}


def _gone(
    provider_id: ProviderId, order: OrderRecord | None, instance: NodeInstanceObserved | None, state: ClusterState
) -> UnbilledTime | None:
    launched = None if order is None else order.launched
    said = None if order is None else order.terminated
    began = instance or launched
    ends = (None if part is None else part.terminated_at for part in (instance, said))
    ended_at = next((at for at in ends if at is not None), None)
    charge = state.charges.get(provider_id)
    if began is None or ended_at is None or (charge is not None and charge.is_corrected):
        return None
    from_at = _uncharged_from(began.launched_at, provider_id, state)
    if from_at >= ended_at:
        return None
    decision = None if order is None else order.decision
    parts = (instance, launched, None if decision is None else decision.offer)
    prices = (part.price_micro_usd_per_hour for part in parts if part is not None)
    told = {} if decision is None else dict(decision.labels)
    return UnbilledTime(
        name=provider_id,
        provider_id=provider_id,
        owners=owners_of(None if decision is None else decision.pool, began.zone, told.get(labels.PROJECT_ID)),
        price_micro_usd_per_hour=next((price for price in prices if price is not None), None),
        from_at=from_at,
        until_at=ended_at,
    )


# A span is charged once a minute, when the cloud's list confirms it; a ledger so far behind is not at work, and what it
# will say of the time since may be something else than we think.
LEDGER_SECONDS_MAX = 900.0
# Money is counted to the end of the half minute that it is asked in: a little ahead, and the same for all of it.
SLOT_SECONDS = 30


class SpendCap(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of the policy."""

    owner: str  # cluster, pool/<name>, zone/<name> or project/<name>
    period: Period
    micro_usd_max: int
    is_hard: bool


@cached_by_identity(4)
def spend_caps(policy: ScalingPolicy) -> tuple[SpendCap, ...]:
    """Every limit of cumulative money; the cluster's first."""
    owned = [(CLUSTER, policy.limits.spend)]
    owned += [(f"pool/{pool.name}", pool.spend) for pool in policy.pools]
    owned += [(f"zone/{zone.name}", zone.spend) for zone in policy.limits.zones]
    owned += [(f"project/{project.name}", project.spend) for project in policy.limits.projects]
    return tuple(cap for owner, money in owned for cap in _caps_of(owner, money))


def _caps_of(owner: str, money: SpendPolicy) -> Iterator[SpendCap]:
    if money.day_micro_usd_max is not None:
        yield SpendCap(owner=owner, period="day", micro_usd_max=money.day_micro_usd_max, is_hard=money.is_hard)
    if money.month_micro_usd_max is not None:
        yield SpendCap(owner=owner, period="month", micro_usd_max=money.month_micro_usd_max, is_hard=money.is_hard)


def slot(as_of: datetime) -> int:
    """The number of the half minute, since 1970: while it lasts, what is spent and promised changes by facts alone."""
    return int(as_of.timestamp()) // SLOT_SECONDS


def counted_at(as_of: datetime) -> datetime:
    """The end of the half minute: the very same instant for all of it."""
    return _slot_end(slot(as_of))


@lru_cache(16)
def _slot_end(number: int) -> datetime:
    return datetime.fromtimestamp((number + 1) * SLOT_SECONDS, UTC)


class SpendSnapshot:
    """What every limited owner has spent and promised at one instant. Read only."""

    def __init__(
        self,
        state: ClusterState,
        views: tuple[NodeView, ...],
        pods: PodsByNode,
        policy: ScalingPolicy,
        as_of: datetime,
    ) -> None:
        self.caps = spend_caps(policy)
        self.counted_at = counted_at(as_of)
        self._ends = {cap: period_end(cap.period, as_of) for cap in self.caps}
        self._needed: dict[tuple[datetime, int, float | None], int] = {}  # of each price, as offers share few
        self._claims = unbilled_time_of(state, views, pods, policy, self.counted_at) if self.caps else ()
        self._ledger_behind = _ledger_behind(state, self._claims, as_of)
        self._boot_seconds_max = policy.boot_seconds_max
        self._tail_seconds = tail_seconds(policy)
        self._doubts = {cap: self._doubt(cap) for cap in self.caps}
        self.spent: dict[SpendCap, int] = {}  # charged, and what is to be charged for time that is over
        self.promised: dict[SpendCap, int] = {}
        for cap in self.caps:
            charged = state.spent.get(period_name(cap.period, as_of), {}).get(cap.owner, 0)
            since, now = period_start(cap.period, as_of), min(self.counted_at, self.end(cap))
            self.spent[cap] = charged + sum(claim.micro_usd(since, now) for claim in self.claims(cap))
            self.promised[cap] = sum(self.rest(claim, cap) for claim in self.claims(cap))

    def claims(self, cap: SpendCap) -> list[UnbilledTime]:
        """The claims that count against this limit."""
        return [claim for claim in self._claims if cap.owner in claim.owners]

    def rest(self, claim: UnbilledTime, cap: SpendCap) -> int:
        """What the claim may still cost in the limit's period."""
        return claim.micro_usd(self.counted_at, self.end(cap))

    def end(self, cap: SpendCap) -> datetime:
        """When the limit's period is over, and the next begins with nothing spent."""
        return self._ends[cap]

    def doubt(self, cap: SpendCap) -> WatchStale | PriceUnknown | None:
        """Why nobody can say what the owner has spent; None: it is known."""
        return self._doubts[cap]

    def _doubt(self, cap: SpendCap) -> WatchStale | PriceUnknown | None:
        unpriced = sorted(claim.name for claim in self.claims(cap) if claim.price_micro_usd_per_hour is None)
        return PriceUnknown(offers=tuple(unpriced)) if unpriced else self._ledger_behind

    def needed(self, cap: SpendCap, price_micro_usd_per_hour: int, work_seconds_max: float | None) -> int:
        """What a node that is bought now may cost in the rest of the limit's period."""
        asked = (self.end(cap), price_micro_usd_per_hour, work_seconds_max)
        if asked not in self._needed:
            self._needed[asked] = self._cost_from_now(*asked)
        return self._needed[asked]

    def _cost_from_now(self, end: datetime, price_micro_usd_per_hour: int, work_seconds_max: float | None) -> int:
        begin = self.counted_at - timedelta(seconds=SLOT_SECONDS)
        if work_seconds_max is not None and self._tail_seconds is not None:
            seconds = self._boot_seconds_max + work_seconds_max + self._tail_seconds
            end = min(end, self.counted_at + timedelta(seconds=seconds))
        return cost_rounded_up(price_micro_usd_per_hour, begin, end)

    def passed(self, cap: SpendCap, needed_micro_usd: int, promised_micro_usd: int) -> SpendLimit | None:
        """Return the limit where a purchase that needs so much passes it; the plan promises so much besides."""
        reserved = self.promised[cap] + promised_micro_usd
        if self.spent[cap] + reserved + needed_micro_usd <= cap.micro_usd_max:
            return None
        return SpendLimit(
            owner=cap.owner,
            period=cap.period,
            spent_micro_usd=self.spent[cap],
            reserved_micro_usd=reserved,
            needed_micro_usd=needed_micro_usd,
            limit_micro_usd=cap.micro_usd_max,
            until=self.end(cap),
        )


spend_snapshot_of = cached_by_identity(2)(SpendSnapshot)


class PlannedSpend:
    """What a plan in the making promises besides what the books say. A scratch pad."""

    def __init__(self, books: SpendSnapshot) -> None:
        self._books = books
        self._more: Counter[SpendCap] = Counter()

    def add(self, owners: tuple[str, ...], offer: Offer, customer: BillingScope, count: int) -> None:
        """Promise the time of so many nodes; a negative count takes it back."""
        for cap in self._books.caps:
            if cap.owner in owners:
                self._more[cap] += count * self._needed(cap, offer, customer)

    def excess(
        self, owners: tuple[str, ...], offer: Offer, customer: BillingScope
    ) -> SpendLimit | WatchStale | PriceUnknown | None:
        """Return the limit that one more node would pass, or why nobody knows; None: it may be bought."""
        for cap in self._books.caps:
            if cap.owner not in owners:
                continue
            if (doubt := self._books.doubt(cap)) is not None:
                return doubt
            if offer.price_micro_usd_per_hour is None:
                return PriceUnknown(offers=(offer.key,))
            limit = self._books.passed(cap, self._needed(cap, offer, customer), self._more[cap])
            if limit is not None:
                return limit
        return None

    def _needed(self, cap: SpendCap, offer: Offer, customer: BillingScope) -> int:
        return self._books.needed(cap, offer.price_micro_usd_per_hour or 0, customer.work_seconds_max)


def _ledger_behind(state: ClusterState, claims: tuple[UnbilledTime, ...], as_of: datetime) -> WatchStale | None:
    """How far the ledger is behind what it could have charged, where that is too far; None: it is at work."""
    if state.ledger_reported_at is None:
        return WatchStale(source="ledger", age_seconds=None, age_seconds_max=LEDGER_SECONDS_MAX)
    worst_seconds = 0.0
    for claim in claims:
        seen_at = None if claim.provider_id is None else state.instances_seen_at.get(claim.provider_id)
        if seen_at is not None:
            until_at = min(seen_at, as_of, claim.until_at or as_of)
            worst_seconds = max(worst_seconds, (until_at - claim.from_at).total_seconds())
    if worst_seconds <= LEDGER_SECONDS_MAX:
        return None
    return WatchStale(source="ledger", age_seconds=worst_seconds, age_seconds_max=LEDGER_SECONDS_MAX)
