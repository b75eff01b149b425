"""Spend budgets per day and month: what is spent, what is reserved, and whether a purchase would exceed a budget.

Spent is what the ledger charged, plus the price of the time since. Reserved is, for every node from the plan that buys
it, its price for the longest remaining time of its work (unknown: the rest of the period) plus its removal, at most to
the end of the period. So a purchase within a budget stays within it, whatever happens later.
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
from gpu_autoscaler.core.next_change import has_lasted_longer, note_whole
from gpu_autoscaler.core.nodes.boot_timeout import has_workload_pods
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView, PodsByNode, node_views
from gpu_autoscaler.core.policy.limit_settings import SpendPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.pools import idle_seconds_set
from gpu_autoscaler.core.state.ledger import CLUSTER, Period, owners_of, period_end, period_name, period_start
from gpu_autoscaler.core.state.queries import counts_for_idleness, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, OrderRecord
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.defer import PriceUnknown, WatchStale
from gpu_autoscaler.model.reasons.defer_limits import SpendLimit

# Spans are charged every minute, when the list of the cloud confirms the instance. A ledger that is further behind is
# not working, and the spend is unknown.
LEDGER_SECONDS_MAX = 900.0
# Spend is computed for the end of the half minute: slightly ahead, and constant within it.
SLOT_SECONDS = 30
# From the end of the last pod to the end of billing: a tick, the step of the executor, the termination by the cloud.
ENDING_SECONDS = 120.0
_ENDING_PHASES = (NodePhase.DRAINED, NodePhase.TERMINATING, NodePhase.FAILED)


# ---- spend caps: the limits of the policy


class SpendCap(msgspec.Struct, frozen=True, kw_only=True):
    """One spend budget of the policy."""

    owner: str  # cluster, pool/<name>, zone/<name> or project/<name>
    period: Period
    micro_usd_max: int
    is_hard: bool


@cached_by_identity(4)
def spend_caps(policy: ScalingPolicy) -> tuple[SpendCap, ...]:
    """Return every spend budget, those of the cluster first."""
    owned = [(CLUSTER, policy.limits.spend)]
    owned += [(f"pool/{pool.name}", pool.spend) for pool in policy.pools]
    owned += [(f"zone/{zone.name}", zone.spend) for zone in policy.limits.zones]
    owned += [(f"project/{project.name}", project.spend) for project in policy.limits.projects]
    return tuple(cap for owner, spend in owned for cap in _caps_of(owner, spend))


def _caps_of(owner: str, spend: SpendPolicy) -> Iterator[SpendCap]:
    if spend.day_micro_usd_max is not None:
        yield SpendCap(owner=owner, period="day", micro_usd_max=spend.day_micro_usd_max, is_hard=spend.is_hard)
    if spend.month_micro_usd_max is not None:
        yield SpendCap(owner=owner, period="month", micro_usd_max=spend.month_micro_usd_max, is_hard=spend.is_hard)


def slot(as_of: datetime) -> int:
    """Return the number of the half minute since 1970. Within it, spend changes by facts only."""
    note_whole(as_of, SLOT_SECONDS)
    return int(as_of.timestamp()) // SLOT_SECONDS


def counted_at(as_of: datetime) -> datetime:
    """Return the end of the half minute, the same object for all of it."""
    return _slot_end(slot(as_of))


@lru_cache(16)
def _slot_end(number: int) -> datetime:
    return datetime.fromtimestamp((number + 1) * SLOT_SECONDS, UTC)


# ---- unbilled time of instances


class UnbilledTime(NamedTuple):
    """Time of one instance that is not in the ledger: since the last charge, and as long as it may still run."""

    name: str
    provider_id: ProviderId | None
    owners: tuple[str, ...]  # whose budgets it counts against
    price_micro_usd_per_hour: int | None
    from_at: datetime  # end of the last charge, or launch
    until_at: datetime | None  # the latest end of billing; None: unknown

    def micro_usd(self, from_at: datetime, to_at: datetime) -> int:
        """Return the cost between two instants; 0 without an overlap or a price."""
        until_at = to_at if self.until_at is None else min(self.until_at, to_at)
        return cost_rounded_up(self.price_micro_usd_per_hour or 0, max(self.from_at, from_at), until_at)


def cost_rounded_up(price_micro_usd_per_hour: int, from_at: datetime, to_at: datetime) -> int:
    """Return the cost rounded up: budgets are exact to the micro-dollar."""
    if to_at <= from_at or not price_micro_usd_per_hour:
        return 0
    return cost_micro_usd(price_micro_usd_per_hour, to_at - from_at) + 1


def tail_seconds(policy: ScalingPolicy) -> float | None:
    """Return how long a node may run after its work; None: the policy may keep it forever."""
    if any(pool.nodes_count_min or pool.is_paused for pool in policy.pools):
        return None
    if policy.nodes_count_min or policy.headrooms or policy.scheduled_limits or policy.forecast.is_on:
        return None
    idle = (idle_seconds_set(policy, pool.name) for pool in policy.pools)
    longest = max(policy.idle_seconds_max if seconds is None else seconds for seconds in idle)
    return max(longest, policy.scale_down_cooldown_seconds) + policy.drain_seconds_max + ENDING_SECONDS


def unbilled_times(
    state: ClusterState, views: tuple[NodeView, ...], pods: PodsByNode, policy: ScalingPolicy, as_of: datetime
) -> tuple[UnbilledTime, ...]:
    """Return the unbilled time of every counted node and of terminated instances."""
    counted = (view for view in views if view.is_ours and view.is_counted)
    return (
        *(_unbilled_time(view, pods, state, policy, as_of) for view in counted),
        *_unbilled_time_of_terminated(state, views),
    )


def _unbilled_time(
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
    """Return the latest end of the node's billing, by the longest time of its work; None: unknown."""
    ending = timedelta(seconds=ENDING_SECONDS)
    if view.phase is NodePhase.FAILED and has_workload_pods(view, pods):
        return None  # it will be drained first
    drain = None if view.drain is None else view.drain.decision
    if view.phase in _ENDING_PHASES:
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
def _unbilled_time_of_terminated(state: ClusterState, views: tuple[NodeView, ...]) -> tuple[UnbilledTime, ...]:
    """The time of terminated instances that are not charged to their end."""
    counted = {view.provider_id for view in views if view.is_ours and view.is_counted}
    orders = _orders_by_instance(state.orders)
    times = (
        _terminated(provider_id, orders.get(provider_id), state.instances.get(provider_id), state)
        for provider_id in sorted({*orders, *state.instances})
        if provider_id not in counted
    )
    return tuple(time for time in times if time is not None)


@cached_by_identity(2)
def _orders_by_instance(orders: Mapping[ActionId, OrderRecord]) -> Mapping[ProviderId, OrderRecord]:
    return {order.launched.provider_id: order for order in orders.values() if order.launched is not None}


def _terminated(
    provider_id: ProviderId, order: OrderRecord | None, instance: NodeInstanceObserved | None, state: ClusterState
) -> UnbilledTime | None:
    launched = None if order is None else order.launched
    terminated = None if order is None else order.terminated
    began = instance or launched
    ends = (None if part is None else part.terminated_at for part in (instance, terminated))
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
    node_labels = {} if decision is None else dict(decision.labels)
    pool, project = None if decision is None else decision.pool, node_labels.get(labels.PROJECT_ID)
    return UnbilledTime(
        name=provider_id,
        provider_id=provider_id,
        owners=owners_of(pool, began.zone, project),
        price_micro_usd_per_hour=next((price for price in prices if price is not None), None),
        from_at=from_at,
        until_at=ended_at,
    )


# ---- spent and reserved


class SpendSnapshot:
    """What every owner of a spend budget has spent and reserved at one instant. Read only."""

    def __init__(
        self, state: ClusterState, views: tuple[NodeView, ...], pods: PodsByNode, policy: ScalingPolicy, as_of: datetime
    ) -> None:
        self.caps = spend_caps(policy)
        self.counted_at = counted_at(as_of)
        self._ends = {cap: period_end(cap.period, as_of) for cap in self.caps}
        self._needed: dict[tuple[datetime, int, float | None], int] = {}  # by price: offers share few
        self._unbilled = unbilled_times(state, views, pods, policy, self.counted_at) if self.caps else ()
        self._ledger_behind = _ledger_behind(state, self._unbilled, as_of)
        self._boot_seconds_max = policy.boot_seconds_max
        self._tail_seconds = tail_seconds(policy)
        self._unknown = {cap: self._unknown_reason(cap) for cap in self.caps}
        self.spent: dict[SpendCap, int] = {}  # charged, and to be charged for past time
        self.reserved: dict[SpendCap, int] = {}
        for cap in self.caps:
            charged = state.spent.get(period_name(cap.period, as_of), {}).get(cap.owner, 0)
            since, now = period_start(cap.period, as_of), min(self.counted_at, self.end(cap))
            self.spent[cap] = charged + sum(time.micro_usd(since, now) for time in self.unbilled(cap))
            self.reserved[cap] = sum(self.reserved_for(time, cap) for time in self.unbilled(cap))

    def unbilled(self, cap: SpendCap) -> list[UnbilledTime]:
        """Return the unbilled time that counts against this budget."""
        return [time for time in self._unbilled if cap.owner in time.owners]

    def reserved_for(self, time: UnbilledTime, cap: SpendCap) -> int:
        """Return what the instance may still cost in the period of the budget."""
        return time.micro_usd(self.counted_at, self.end(cap))

    def end(self, cap: SpendCap) -> datetime:
        """Return the end of the period; the next one starts with nothing spent."""
        return self._ends[cap]

    def unknown_reason(self, cap: SpendCap) -> WatchStale | PriceUnknown | None:
        """Return why the spend of the owner is unknown; None: it is known."""
        return self._unknown[cap]

    def _unknown_reason(self, cap: SpendCap) -> WatchStale | PriceUnknown | None:
        unpriced = sorted(time.name for time in self.unbilled(cap) if time.price_micro_usd_per_hour is None)
        return PriceUnknown.of(unpriced) if unpriced else self._ledger_behind

    def needed(self, cap: SpendCap, price_micro_usd_per_hour: int, work_seconds_max: float | None) -> int:
        """Return what a node bought now may cost in the rest of the period."""
        key = (self.end(cap), price_micro_usd_per_hour, work_seconds_max)
        if key not in self._needed:
            self._needed[key] = self._cost_from_now(*key)
        return self._needed[key]

    def _cost_from_now(self, end: datetime, price_micro_usd_per_hour: int, work_seconds_max: float | None) -> int:
        begin = self.counted_at - timedelta(seconds=SLOT_SECONDS)
        return cost_rounded_up(price_micro_usd_per_hour, begin, min(end, self._billed_until(work_seconds_max) or end))

    def _billed_until(self, work_seconds_max: float | None) -> datetime | None:
        """Return the latest end of billing of a node bought now; None: unknown."""
        if work_seconds_max is None or self._tail_seconds is None:
            return None
        seconds = self._boot_seconds_max + work_seconds_max + self._tail_seconds
        return self.counted_at + timedelta(seconds=seconds)

    def is_open_ended(self, work_seconds_max: float) -> bool:
        """True if a node for such work may be billed to the end of every period, as one for work of unknown time."""
        until = self._billed_until(work_seconds_max)
        return until is None or all(until >= end for end in self._ends.values())

    def exceeded(self, cap: SpendCap, needed_micro_usd: int, planned_micro_usd: int) -> SpendLimit | None:
        """Return the limit that a purchase would exceed, besides what the plan reserves already; None: it fits."""
        reserved = self.reserved[cap] + planned_micro_usd
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


class SpendUse(NamedTuple):
    """How much of one spend budget is used, for displays and metrics only."""

    owner: str
    period: Period
    used_ratio: float | None  # None: the spend is unknown


def spend_uses(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[SpendUse, ...]:
    """Return the spent share of every spend budget. A budget of zero is used up from the start."""
    if not spend_caps(policy):
        return ()
    snapshot = SpendSnapshot(state, node_views(state, as_of), pods_by_node(state), policy, as_of)
    return tuple(SpendUse(cap.owner, cap.period, _used_ratio(snapshot, cap)) for cap in snapshot.caps)


def _used_ratio(snapshot: SpendSnapshot, cap: SpendCap) -> float | None:
    if snapshot.unknown_reason(cap) is not None:
        return None
    return snapshot.spent[cap] / cap.micro_usd_max if cap.micro_usd_max else 1.0


class PlannedSpend:
    """What a plan in the making reserves besides the snapshot. Mutable."""

    def __init__(self, snapshot: SpendSnapshot) -> None:
        self._snapshot = snapshot
        self._reserved: Counter[SpendCap] = Counter()

    def add(self, owners: tuple[str, ...], offer: Offer, scope: BillingScope, count: int) -> None:
        """Reserve the cost of `count` nodes; a negative count releases it."""
        for cap in self._snapshot.caps:
            if cap.owner in owners:
                self._reserved[cap] += count * self._needed(cap, offer, scope)

    def excess(
        self, owners: tuple[str, ...], offer: Offer, scope: BillingScope
    ) -> SpendLimit | WatchStale | PriceUnknown | None:
        """Return the budget that one more node would exceed, or why that is unknown; None: it fits."""
        for cap in self._snapshot.caps:
            if cap.owner not in owners:
                continue
            if (unknown := self._snapshot.unknown_reason(cap)) is not None:
                return unknown
            if offer.price_micro_usd_per_hour is None:
                return PriceUnknown(offers=(offer.key,))
            limit = self._snapshot.exceeded(cap, self._needed(cap, offer, scope), self._reserved[cap])
            if limit is not None:
                return limit
        return None

    def _needed(self, cap: SpendCap, offer: Offer, scope: BillingScope) -> int:
        return self._snapshot.needed(cap, offer.price_micro_usd_per_hour or 0, scope.work_seconds_max)


def _ledger_behind(state: ClusterState, unbilled: tuple[UnbilledTime, ...], as_of: datetime) -> WatchStale | None:
    """Return how far the ledger is behind, if too far; None: it is working."""
    if state.ledger_reported_at is None:
        return WatchStale(source="ledger", age_seconds=None, age_seconds_max=LEDGER_SECONDS_MAX)
    worst_seconds = 0.0
    for time in unbilled:
        seen_at = None if time.provider_id is None else state.instances_seen_at.get(time.provider_id)
        if seen_at is None:
            continue
        until_at = seen_at if time.until_at is None else min(seen_at, time.until_at)
        seconds = (until_at - time.from_at).total_seconds()
        if seconds > LEDGER_SECONDS_MAX and has_lasted_longer(time.from_at, LEDGER_SECONDS_MAX, as_of):
            worst_seconds = max(worst_seconds, min(seconds, (as_of - time.from_at).total_seconds()))
    if not worst_seconds:
        return None
    return WatchStale(source="ledger", age_seconds=worst_seconds, age_seconds_max=LEDGER_SECONDS_MAX)
