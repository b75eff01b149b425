"""Step `cover_demand`: waiting work is placed on capacity that is there or coming, else capacity is bought for it.

Capacity that is certain to become free within the allowed wait counts (`core/provisioning/expected_capacity.py`).
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cached_property

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft, Served
from gpu_autoscaler.core.placement.pod_affinity import describe_rules
from gpu_autoscaler.core.placement.shapes import Bin, BinReadiness, Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.basket import Basket
from gpu_autoscaler.core.provisioning.batching import BatchWindow
from gpu_autoscaler.core.provisioning.cooldown import scale_up_cooldown
from gpu_autoscaler.core.provisioning.drain_cancellation import CancelableDrains
from gpu_autoscaler.core.provisioning.expected_capacity import ExpectedCapacity
from gpu_autoscaler.core.provisioning.gangs import Gangs, gang_backoff
from gpu_autoscaler.core.provisioning.keep_or_buy import KeepOrBuy
from gpu_autoscaler.core.provisioning.lots import KeptPlaces, Lot, LotOutcome, launch_groups, lots_of
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.provisioning.spot_waits import spot_wait
from gpu_autoscaler.core.provisioning.topology_domains import MissingMembers, SpreadZones
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import CancelDrain, Deferred
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.defer import CapacityNotFree, DeferReason, PodConstraintsViolated
from gpu_autoscaler.model.reasons.defer_waits import BatchWindowOpen, CapacityExpected, QueueHeadWaits

_STEP = "cover_demand"
# Plans of one turn while drains are canceled whose pods were counted elsewhere; the last one cancels no more of them.
_TRIES_COUNT_MAX = 4
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def cover_demand(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Place, buy for or defer with a reason every waiting item; gangs whole or not at all."""
    if not draft.demand:
        return draft
    cover = _covered(draft, state, policy, (), _TRIES_COUNT_MAX - 1)
    return msgspec.structs.replace(
        draft.adding(canceled_drains=cover.drains.canceled, purchases=cover.basket.purchases(), deferred=cover.held),
        claimed=draft.claimed | cover.claimed,
        served=cover.served,
        is_demand_met=draft.is_demand_met and cover.is_met,
    )


def _covered(
    draft: Draft, state: ClusterState, policy: ScalingPolicy, canceled: Iterable[CancelDrain], tries_left: int
) -> "_Cover":
    """Serve all demand, anew with the pods of canceled drains in place if others were placed without them there."""
    mark = draft.free_capacity.mark()
    cover = _Cover(draft, state, policy, canceled, may_return_counted=tries_left > 0)
    for lots in launch_groups(cover.lots):
        cover.serve_group(lots)
    if not (cover.drains.returned_counted and tries_left):
        return cover
    draft.free_capacity.rollback(mark)
    return _covered(draft, state, policy, cover.drains.canceled, tries_left - 1)


class _Cover:
    """The demand of one planning run, and what became of it so far."""

    def __init__(
        self,
        draft: Draft,
        state: ClusterState,
        policy: ScalingPolicy,
        canceled: Iterable[CancelDrain],
        *,
        may_return_counted: bool,
    ) -> None:
        """The arguments after the policy are those of `CancelableDrains`."""
        catalog = OfferCatalog(draft.views, state, policy, draft.as_of)
        self.lots = tuple(lots_of(draft.demand))
        self.basket = Basket(draft, catalog, policy)
        self.drains = CancelableDrains(draft, catalog, policy, canceled, may_return_counted=may_return_counted)
        self.held: list[Deferred] = []
        self.claimed: set[str] = set()  # keys of the bins on which waiting work is counted
        self.served: dict[str, Served] = {}
        self.is_met = True
        self._strict_heads: dict[str, JobId] = {}  # by queue in which none passes: the first job without capacity
        self._draft = draft
        self._state = state
        self._policy = policy
        self._catalog = catalog
        self._avoided: dict[str, tuple[str, ...]] = {}  # by lot: bins that cost more to keep for it than a new node
        self._keep_or_buy = KeepOrBuy(state, policy, draft.as_of, draft.views, catalog)
        self._free_capacity = draft.free_capacity
        self._batch_window = BatchWindow(draft, policy)
        self._stale: DeferReason | None = stale_watch(state, policy, draft.as_of)  # nothing is bought at all
        self._kept = KeptPlaces(self.lots, draft.views, draft.free_capacity)
        self._gangs = Gangs(draft, policy, catalog, self.basket, self.drains, self._kept)
        bought_for = [lot for lot in self.lots if lot.first.is_bought_for and lot.first.blocked is None]
        self._zones = SpreadZones((lot.shape for lot in bought_for), catalog, draft.free_capacity)
        self._later = {lot.key: lot for lot in bought_for if self._zones.concern(lot.shape)}  # not served yet

    def serve_group(self, lots: tuple[Lot, ...]) -> None:
        """Serve a gang, or lots of single pods that one purchase serves, and record what became of them."""
        waiting: list[Lot] = []
        for lot in lots:
            self._later.pop(lot.key, None)
            if (behind := self._why_behind(lot.first)) is not None:
                self._kept.release(lot)
            blocked = behind or lot.first.blocked
            if blocked is None:
                waiting.append(lot)
            else:
                self._record(LotOutcome(lot=lot, reason=blocked))
        ready: list[Lot] = []
        for lot in waiting:
            if (too_early := self._gangs.why_too_early(lot.first)) is None:
                ready.append(lot)
            else:
                self._kept.release(lot)
                self._record(LotOutcome(lot=lot, reason=too_early))
        if not ready:
            return
        gang = ready[0].first.gang if ready[0].first.is_whole else None
        outcomes = self._serve(ready) if gang is None else self._gangs.serve(ready, self._serve)
        reason = outcomes[0].reason
        if gang is not None and reason is not None and all(item.key != gang for lot in ready for item in lot.items):
            self.held.append(Deferred(step=_STEP, subject=gang, reason=reason))
        for outcome in outcomes:
            self._record(outcome)
            if outcome.missing_count and self._zones.concern(outcome.lot.shape):
                self._zones.forget()

    def _why_behind(self, item: DemandItem) -> QueueHeadWaits | None:
        """Return why the item waits behind another of a queue in which none passes; None: it does not."""
        queue = item.strict_queue if item.source is DemandSource.QUEUED_JOB else None
        head = None if queue is None else self._strict_heads.get(queue)
        return None if queue is None or head is None else QueueHeadWaits(queue=queue, job_id=head)

    def _serve(self, lots: Sequence[Lot]) -> list[LotOutcome]:
        """Place each lot on capacity that is there, then on nodes whose drain is canceled, then on new nodes."""
        before = self._changes()
        outcomes = [self._place(lot) for lot in lots]
        short = [outcome for outcome in outcomes if outcome.missing_count]
        if not short or not lots[0].first.is_bought_for:
            for outcome in short:
                outcome.reason = _why_not_bought(outcome)
            return outcomes
        wanting = self._defer_closed(short)
        wanting = self._defer_to_ending_work(wanting)
        wanting = self._defer_to_burst(wanting)
        if wanting and all(outcome.lot.shape.pod_constraints.concerns_own_kind for outcome in wanting):
            self._buy_fleet(wanting)
        for outcome in wanting:
            if outcome.missing_count:
                self._buy_alone(outcome, may_share=self._changes() != before)
        for outcome in short:
            # Work that soon needs no purchase, or is bought better, keeps no node that costs more than a new one.
            if outcome.missing_count and not isinstance(outcome.reason, CapacityExpected | BatchWindowOpen):
                outcome.placed += self._place_on_avoided(outcome)
            if outcome.missing_count and not isinstance(outcome.reason, CapacityExpected | BatchWindowOpen):
                outcome.placed += self.drains.place(outcome.lot, outcome.missing_count, at_any_price=True)
            if not outcome.missing_count:
                outcome.reason = None
        return outcomes

    def _place_on_avoided(self, outcome: LotOutcome) -> tuple[str, ...]:
        """Place the missing members on the bins that the lot left unused for a new node, which cannot be bought."""
        lot = outcome.lot
        return self._free_capacity.place_on(self._avoided.get(lot.key, ()), lot.shape, outcome.missing_count)

    def _changes(self) -> tuple[int, int]:
        return self.basket.mark().orders_count, self.drains.mark()

    def _place(self, lot: Lot) -> LotOutcome:
        """Place the lot where capacity is free, or would be if a drain is canceled."""
        first, kept = lot.first, self._kept.of(lot)
        count = lot.members_count - len(kept)
        if (stays_on := self.drains.kept_source_node(lot)) is not None:
            return LotOutcome(lot=lot, kept=kept, placed=kept + (stays_on,) * count)
        if avoided := self._keep_or_buy.avoided(first, self._free_capacity):
            self._avoided[lot.key] = avoided
            self.basket.avoided_counts[first.key] = len(avoided)
        placed = self._free_capacity.place_most(lot.shape, count, first.prefers, avoided)
        if first.is_bought_for and self._zones.concern(lot.shape):
            placed = self._without_bought(placed, lot)
        outcome = LotOutcome(lot=lot, kept=kept, placed=kept + placed)
        if first.source is DemandSource.MOVING_POD and placed:
            self.drains.note_moved(lot)
        if first.source is DemandSource.MOVING_POD and outcome.missing_count:
            stays_on = self.drains.keep_source_node(lot)
            outcome.placed += () if stays_on is None else (stays_on,) * outcome.missing_count
        if first.is_bought_for and outcome.missing_count:
            outcome.placed += self.drains.place(lot, outcome.missing_count)
        return outcome

    def _without_bought(self, placed: tuple[str, ...], lot: Lot) -> tuple[str, ...]:
        """Take back members from nodes that this plan buys: their zones are assigned together with those of others."""
        bought = [key for key in placed if self._free_capacity.original_bin(key).readiness is BinReadiness.BOUGHT]
        self._free_capacity.remove_members(bought, lot.shape)
        return tuple(key for key in placed if key not in bought)

    def _defer_closed(self, short: Sequence[LotOutcome]) -> list[LotOutcome]:
        """Defer the lots for which nothing is bought now, whatever is available, and return the others."""
        for outcome in short:
            outcome.reason = self._why_closed(outcome.lot.oldest)
            outcome.is_closed = outcome.reason is not None
        return [outcome for outcome in short if not outcome.is_closed]

    def _why_closed(self, item: DemandItem) -> DeferReason | None:
        if self._stale is not None:
            return self._stale
        as_of = self._draft.as_of
        return (
            gang_backoff(item.gang, self._state, self._policy, as_of)
            or scale_up_cooldown(item, self._state.orders, self._policy, as_of)
            or spot_wait(item, self._catalog, self._state, self._policy, as_of)
        )

    def _defer_to_ending_work(self, short: Sequence[LotOutcome]) -> list[LotOutcome]:
        """Defer the lots that running work gives capacity within their allowed wait, and return the others."""
        reasons = [
            self._expected_capacity.takes(outcome.lot.oldest, outcome.lot.shape, outcome.missing_count)
            for outcome in short
        ]
        # Lots of one gang start together: waiting for capacity for a part of it gains nothing.
        if not all(reasons) and any(outcome.lot.first.gang is not None for outcome in short):
            return list(short)
        for outcome, reason in zip(short, reasons, strict=True):
            outcome.reason = reason
        return [outcome for outcome in short if outcome.reason is None]

    @cached_property
    def _expected_capacity(self) -> ExpectedCapacity:
        return ExpectedCapacity(self._draft, self._state, self._policy)

    def _defer_to_burst(self, short: Sequence[LotOutcome]) -> list[LotOutcome]:
        """Defer the lots that wait for the rest of their burst, and return the others.

        For a single lot of pods that are all alike, nodes that those pods fill are bought at once. A lot for which
        nothing can be bought is not deferred: it is to have that as its reason.
        """
        missing = {
            outcome.lot.key: outcome.lot.items[len(outcome.placed) :] for outcome in short if self._can_buy(outcome.lot)
        }
        reasons = self._batch_window.waiting(missing)
        for outcome in short:
            outcome.reason = reasons.get(outcome.lot.key)
        if len(reasons) == len(short) == 1 and short[0].lot.shape.pod_constraints.is_any:
            lot = short[0].lot
            sinces = tuple(item.since for item in missing[lot.key])
            self._assign(short[0], self.basket.buy_filled(MissingMembers(item=lot.first, sinces=sinces)), lot.shape)
        return [outcome for outcome in short if outcome.reason is None]

    def _can_buy(self, lot: Lot) -> bool:
        return self.basket.has_offering_within_limits(lot.first.billing_scope) and bool(
            self._catalog.members(lot.shape).any()
        )

    def _buy_fleet(self, short: Sequence[LotOutcome]) -> None:
        """Buy one fleet for all members that these lots miss, each in a zone that its rules allow."""
        if not any(self.basket.has_offering_within_limits(outcome.lot.first.billing_scope) for outcome in short):
            return
        parts = self._parts_in_zones(short)
        bought = self.basket.buy_together([part for _, part in parts]) if parts else ()
        for (number, part), keys in zip(parts, bought, strict=True):
            self._assign(short[number], keys, part.item.shape)

    def _parts_in_zones(self, short: Sequence[LotOutcome]) -> list[tuple[int, MissingMembers]]:
        """Return what is to be bought for these lots, each part in the zone that spread constraints assign to it.

        What other lots' new nodes have left in that zone is used first.
        """
        wants = [MissingMembers(item=entry.lot.first, sinces=entry.lot.sinces[len(entry.placed) :]) for entry in short]
        later = (MissingMembers(item=lot.first, sinces=lot.sinces) for lot in self._later.values())
        parts: list[tuple[int, MissingMembers]] = []
        for number, part in self._zones.parts(wants, later):
            shared: tuple[str, ...] = ()
            if self._zones.concern(short[number].lot.shape):
                shared = self._free_capacity.place_most(part.item.shape, part.count)
                short[number].placed += shared
            if len(shared) < part.count:
                parts.append((number, msgspec.structs.replace(part, sinces=part.sinces[len(shared) :])))
        return parts

    def _assign(self, outcome: LotOutcome, keys: tuple[str, ...], shape: Shape) -> None:
        """Note members on bins that were bought for them, whose free capacity is without them already."""
        outcome.placed += keys
        for key in keys:
            self._free_capacity.note(key, shape)

    def _buy_alone(self, outcome: LotOutcome, *, may_share: bool) -> None:
        """Buy for this lot alone as far as limits allow, and place it. `may_share`: what was bought or kept for the
        lots served with it may have capacity left."""
        item, count = outcome.lot.first, outcome.missing_count
        if not item.shape.pod_constraints.is_any:
            if self._zones.concern(item.shape):
                self._buy_alone_in_zones(outcome)
                return
            keys, outcome.reason = self.basket.buy_one_by_one(item, count)
            outcome.placed += keys
            return
        shared = self._free_capacity.place_most(item.shape, count) if may_share else ()
        covered, outcome.reason = self.basket.buy(item, count - len(shared))
        outcome.placed += shared + self._free_capacity.place_most(item.shape, covered)

    def _buy_alone_in_zones(self, outcome: LotOutcome) -> None:
        """Buy for the members of this lot one by one in the zones assigned to them; the others wait."""
        shape = outcome.lot.shape
        reasons: list[DeferReason] = []
        for _, part in self._parts_in_zones([outcome]):
            keys, reason = self.basket.buy_one_by_one(part.item, part.count)
            outcome.placed += keys
            reasons += [] if reason is None else [reason]
        if not self._catalog.members(shape).any():
            reasons.append(self._catalog.why_no_offering(shape))
        outcome.reason = (*reasons, PodConstraintsViolated(rules=describe_rules(shape.pod_constraints)))[0]

    def _record(self, outcome: LotOutcome) -> None:
        """Record for each item of the lot on which bins it counts, or why it has none."""
        first = outcome.lot.first
        is_head = outcome.missing_count > 0 and first.source is DemandSource.QUEUED_JOB
        if is_head and first.strict_queue is not None and first.job_id is not None:
            self._strict_heads.setdefault(first.strict_queue, first.job_id)
        for item, keys in self._kept.by_item(outcome):
            bins = [self._free_capacity.original_bin(key) for key in keys]
            self.claimed.update(keys)
            self.basket.assign(item, keys)
            if item.source in _OF_REQUESTS and item.gang is not None:
                found = _served(outcome, bins)
                self.served[item.gang] = self.served[item.gang].joined(found) if item.gang in self.served else found
            if not item.is_bought_for:
                if not bins:
                    self._batch_window.note(item)
                    if outcome.reason is not None:
                        self.held.append(Deferred(step=_STEP, subject=item.key, reason=outcome.reason))
                continue
            if not bins:
                self._gangs.note_unplaced(item)
            self.is_met = self.is_met and bool(bins) and all(entry.readiness is BinReadiness.READY for entry in bins)
            if not bins and outcome.reason is not None:
                self.held.append(Deferred(step=_STEP, subject=item.key, reason=outcome.reason))
            elif bins and all(entry.readiness is not BinReadiness.BOUGHT for entry in bins):
                self.held.append(Deferred(step=_STEP, subject=item.key, reason=_expected(bins)))


_OF_REQUESTS = frozenset({DemandSource.PROVISIONING, DemandSource.CAPACITY_CHECK, DemandSource.BOOKED})


def _why_not_bought(outcome: LotOutcome) -> CapacityNotFree | None:
    """Return why members without capacity are not bought for; None: they are placed otherwise, or have a node."""
    sources = (DemandSource.CAPACITY_CHECK, DemandSource.CHECKED_POD, DemandSource.BOOKED)
    return _why_not_free(outcome) if outcome.lot.first.source in sources else None


def _why_not_free(outcome: LotOutcome) -> CapacityNotFree:
    return CapacityNotFree(members_count=outcome.lot.members_count)


def _served(outcome: LotOutcome, bins: Sequence[Bin]) -> Served:
    """Return what became of the members of a request; in a lot of their own."""
    late = [entry for entry in bins if entry.readiness is not BinReadiness.READY]
    return Served(
        missing=outcome.reason or _why_not_free(outcome) if outcome.missing_count else None,
        is_ready=not late and not outcome.missing_count,
        is_ordered=all(entry.readiness is not BinReadiness.BOUGHT for entry in bins),
        expected_at=max((entry.expected_at for entry in late if entry.expected_at is not None), default=None),
    )


def _expected(bins: Sequence[Bin]) -> CapacityExpected:
    """Return which of the bins is usable last; if all are ready, the item waits only for the Kubernetes scheduler."""
    last = max(bins, key=lambda entry: (entry.readiness, entry.expected_at or _LONG_AGO, entry.key))
    return CapacityExpected(node=last.name, expected_at=last.expected_at)
