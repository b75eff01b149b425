"""Gangs: placed whole or not at all, within one domain if requested, with a back-off after purchases in vain."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.nodes.views import Grouped, NodeView, table_of
from gpu_autoscaler.core.placement.shapes import BinReadiness
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.provisioning_settings import GangPolicy
from gpu_autoscaler.core.provisioning.basket import Basket
from gpu_autoscaler.core.provisioning.drain_cancellation import CancelableDrains
from gpu_autoscaler.core.provisioning.lots import KeptPlaces, Lot, LotOutcome
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.provisioning.topology_domains import domains_for
from gpu_autoscaler.core.state.state import ClusterState, GangRecord
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.defer import NoDomainFits
from gpu_autoscaler.model.reasons.defer_waits import GangBackoff, GangPending, GangTimedOut

Serve = Callable[[Sequence[Lot]], list[LotOutcome]]


class Gangs:
    """Serves the gangs of one planning run: each has all its members placed, or none."""

    def __init__(
        self,
        draft: Draft,
        policy: ScalingPolicy,
        catalog: OfferCatalog,
        basket: Basket,
        drains: CancelableDrains,
        kept: KeptPlaces,
    ) -> None:
        self._draft = draft
        self._free_capacity = draft.free_capacity
        self._policy = policy
        self._catalog = catalog
        self._basket = basket
        self._drains = drains
        self._kept = kept
        self._unplaced_jobs: set[JobId] = set()  # queued jobs whose gang has no place

    def serve(self, lots: Sequence[Lot], serve: Serve) -> list[LotOutcome]:
        """Place all members of the gang by `serve`, or none of them; then every lot has the same reason."""
        within = lots[0].first.within
        outcomes = self._serve_in_one_domain(within, lots, serve) if within else self._serve_whole(lots, serve)
        for outcome in outcomes:
            if outcome.reason is not None:
                outcome.reason = self._basket.with_current_usage(outcome.reason)
        return outcomes

    def _serve_in_one_domain(self, key: str, lots: Sequence[Lot], serve: Serve) -> list[LotOutcome]:
        """Place a gang whose members share a value of this node label in the first domain that has capacity for all."""
        coming = frozenset(bin_key for lot in lots for bin_key in self._kept.release(lot))
        wanted = [(lot.shape, lot.members_count) for lot in lots]
        values = domains_for(key, wanted, self._free_capacity, self._catalog, coming)
        for value in values:
            outcomes = self._serve_whole([lot.restricted_to(key, value) for lot in lots], serve)
            if outcomes[0].placed:
                return outcomes
        members_count = sum(count for _, count in wanted)
        reason = NoDomainFits(topology_key=key, domains_count=len(values), members_count=members_count)
        return [LotOutcome(lot=lot, reason=reason) for lot in lots]

    def _serve_whole(self, lots: Sequence[Lot], serve: Serve) -> list[LotOutcome]:
        """Place all members, or undo everything that was placed, bought and canceled for them."""
        mark, bought_mark, canceled_mark = self._free_capacity.mark(), self._basket.mark(), self._drains.mark()
        outcomes = serve(lots)
        late = self._lateness(outcomes)
        if late is None and not any(outcome.missing_count for outcome in outcomes):
            return outcomes
        self._free_capacity.rollback(mark)
        self._basket.rollback(bought_mark)
        self._drains.rollback(canceled_mark)
        for outcome in outcomes:
            self._free_capacity.remove_members(outcome.kept, outcome.lot.shape)
        # Why nothing is bought for one member comes before why another could not be bought.
        by_reason = sorted(outcomes, key=lambda outcome: not outcome.is_closed)
        reason = late or next((outcome.reason for outcome in by_reason if outcome.reason is not None), None)
        return [LotOutcome(lot=lot, reason=reason) for lot in lots]

    def _lateness(self, outcomes: Sequence[LotOutcome]) -> GangTimedOut | None:
        """Return why the gang's nodes are given back: some of them did not become ready in time."""
        keys = (key for outcome in outcomes for key in outcome.placed)
        if all(self._free_capacity.original_bin(key).readiness is BinReadiness.READY for key in keys):
            return None
        gang = outcomes[0].lot.first.gang or ""
        begun_at = _waiting_since(self._draft.views, gang)
        if begun_at is None:
            return None
        most = self._policy.gangs.complete_seconds_max
        if not has_lasted(begun_at, most, self._draft.as_of):
            return None
        bought_seconds = (self._draft.as_of - begun_at).total_seconds()
        return GangTimedOut(gang=gang, bought_seconds=bought_seconds, complete_seconds_max=most)

    def note_unplaced(self, item: DemandItem) -> None:
        """Remember a queued job whose gang has no place."""
        if item.source is DemandSource.QUEUED_JOB and item.job_id is not None:
            self._unplaced_jobs.add(item.job_id)

    def why_too_early(self, item: DemandItem) -> GangPending | None:
        """Return why an elastic member gets no capacity yet: its gang has no place, and it is of no use before."""
        if item.source is not DemandSource.ELASTIC_MEMBER or item.job_id not in self._unplaced_jobs:
            return None
        return GangPending(job_id=item.job_id)


def gang_backoff(gang: str | None, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> GangBackoff | None:
    """Return until when nothing is bought for the gang; None: it may be bought for now, or is no gang."""
    record = None if gang is None else state.gangs.get(gang)
    if gang is None or record is None:
        return None
    retry_at = retried_at(record, policy.gangs)
    if as_of >= retry_at:
        return None
    return GangBackoff(gang=gang, abandoned_count=record.abandoned_count, retry_at=retry_at)


def retried_at(record: GangRecord, rules: GangPolicy) -> Instant:
    """Return when a gang that was bought for in vain may be bought for again.

    The wait doubles with each attempt, up to the policy's maximum.
    """
    seconds = rules.backoff_seconds_min
    for _ in range(record.abandoned_count - 1):
        if seconds >= rules.backoff_seconds_max:
            break
        seconds *= 2
    return record.abandoned_at + timedelta(seconds=min(seconds, rules.backoff_seconds_max))


def _awaited_by(view: NodeView) -> tuple[str, ...]:
    """Return the gang that waits for the node: it boots, or is empty."""
    decision = None if view.order is None else view.order.decision
    if decision is None or decision.gang is None or view.drain is not None:
        return ()
    return (decision.gang,) if view.is_booting or _is_unused(view) else ()


_AWAITED = Grouped(_awaited_by)


def _waiting_since(views: Sequence[NodeView], gang: str) -> Instant | None:
    """Return when the first node was bought that the gang still waits for."""
    awaited = table_of(views, _AWAITED).get(gang, ())
    return min((view.order.planned_at for view in awaited if view.order and view.order.planned_at), default=None)


def _is_unused(view: NodeView) -> bool:
    """True for a node on which nothing has run yet; a node that a gang left after an earlier start is merely idle."""
    empty_since, usable_since = view.empty_since, view.usable_since
    return empty_since is not None and usable_since is not None and empty_since <= usable_since
