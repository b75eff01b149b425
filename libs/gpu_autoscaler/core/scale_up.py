"""Step `cover_demand`: waiting work gets room that is there or coming, else room that is bought.

Room is never waited for unless it is expected: how long running work takes is unknown, so nothing is gained by hoping.
What is certain to end within the wait that the policy allows is expected (`core/buying/soon.py`).
"""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.core.bins import node_bin
from gpu_autoscaler.core.buying.basket import Basket
from gpu_autoscaler.core.buying.burst import Burst
from gpu_autoscaler.core.buying.choice import Lacking
from gpu_autoscaler.core.buying.cooling import cooling
from gpu_autoscaler.core.buying.domains import domains_for
from gpu_autoscaler.core.buying.gangs import is_late, waits
from gpu_autoscaler.core.buying.keeping import callable_drain, is_cheaper_kept
from gpu_autoscaler.core.buying.lots import Lot, lots_of, served_together, shared_out
from gpu_autoscaler.core.buying.market import Market
from gpu_autoscaler.core.buying.parting import Want, parts_of
from gpu_autoscaler.core.buying.soon import Soon
from gpu_autoscaler.core.buying.sparing import awaits_spot
from gpu_autoscaler.core.demand_items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.freshness import stale_watch
from gpu_autoscaler.core.further import ordered_bins
from gpu_autoscaler.core.placing.acceptance import fits
from gpu_autoscaler.core.placing.company import Tally
from gpu_autoscaler.core.placing.shapes import Bin, Standing
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import CancelDrain, DrainNode, Deferred
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons import DemandReturned, DeferReason, CapacityExpected
from gpu_autoscaler.model.shape_reasons import NoDomainFits
from gpu_autoscaler.model.waits import BatchWindowOpen, GangPending, GangTimedOut

_STEP = "cover_demand"
_PASSING = (CapacityExpected, BatchWindowOpen)  # why something is not bought that soon needs no purchase, or is bought better
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def cover_demand(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Every waiting item has room, is bought for, or is held back with the reason; gangs whole or not at all."""
    market = Market(draft, state, policy)
    cover = _Cover(draft, state, policy, market)
    lots = tuple(lots_of(draft.demand))
    cover.keep(lots)
    for together in served_together(lots):
        cover.serve(together)
    return msgspec.structs.replace(
        draft.adding(returns=cover.returns, purchases=cover.basket.purchases(), deferred=cover.held),
        claimed=draft.claimed | cover.claimed,
        is_demand_met=draft.is_demand_met and cover.is_met,
    )


class _Cover:
    """What became of the demand so far."""

    def __init__(self, draft: Draft, state: ClusterState, policy: ScalingPolicy, market: Market) -> None:
        self.basket = Basket(draft, market, policy)
        self._state = state
        self._policy = policy
        self._market = market
        self.returns: list[CancelDrain] = []
        self.held: list[Deferred] = []
        self.claimed: set[str] = set()
        self.is_met = True
        self._closed_reason: DeferReason | None = stale_watch(state, policy, draft.as_of)  # nothing is bought at all
        self._before = (0, 0)  # what was bought and called back before the lots that are served now
        self._draft = draft
        self._burst = Burst(draft, policy)
        self._coming_free: Soon | None = None  # read where somebody waits, and then once
        self._room = draft.room
        self._ordered = ordered_bins(draft.views)
        self._without_place: set[JobId] = set()  # jobs of the queue whose gang has none
        self._kept: dict[str, tuple[str, ...]] = {}  # by the key of a lot's first item
        drains = ((view, callable_drain(view)) for view in draft.views if view.drain is not None)
        self._callable_back = {drain.node_uid: (view, drain) for view, drain in drains if drain is not None}

    def keep(self, lots: tuple[Lot, ...]) -> None:
        """What was bought stays with whom it was bought for, whoever comes meanwhile: else it is bought for again.

        Each pod keeps its own place first, as its plan had it, until it stands there: placed one lot after the other,
        some would take what was meant for the next, or wait for each other to be even.
        """
        waiting = [lot for lot in lots if lot.first.is_bought_for] if self._ordered.any else []
        own = {lot.first.key: Counter(key for item in lot.items if (key := self._ordered.own(item))) for lot in waiting}
        self._kept = {lot.first.key: self._room.keep_on(own[lot.first.key], lot.shape) for lot in waiting}
        open_counts: Counter[Tally] = Counter()
        for lot in waiting:
            lacking_count = lot.members_count - len(self._kept[lot.first.key])
            open_counts.update(dict.fromkeys(lot.shape.company.tallies if lacking_count else (), lacking_count))
        for lot in waiting:
            kept = self._kept[lot.first.key]
            if kept and not lot.shape.company.is_any:
                wrong = self._room.misplaced(kept, lot.shape, open_counts)
                self._room.take_back(wrong, lot.shape)
                self._kept[lot.first.key] = tuple(key for key in kept if key not in wrong)
        for lot in waiting:
            kept = self._kept[lot.first.key]
            keys = dict.fromkeys(key for item in lot.items for key in self._ordered.of(item))
            if keys and len(kept) < lot.members_count:
                more = self._room.place_on(keys, lot.shape, lot.members_count - len(kept))
                self._kept[lot.first.key] = kept + more

    def serve(self, lots: tuple[Lot, ...]) -> None:
        """Place the lots on what is there, then on what can be called back, then on what can be bought."""
        blocked = [lot for lot in lots if lot.first.blocked is not None]
        for lot in blocked:
            self._settle(lot, (), lot.first.blocked)
        if blocked:
            lots = tuple(lot for lot in lots if lot.first.blocked is None)
        if lots and lots[0].first.source is DemandSource.ELASTIC_MEMBER:
            lots = self._of_gangs_with_places(lots)
        if lots and lots[0].first.gang is not None and lots[0].first.is_bought_for and lots[0].first.within:
            self._serve_within(lots[0].first.within, lots)
        elif lots:
            self._serve(lots)

    def _of_gangs_with_places(self, lots: tuple[Lot, ...]) -> tuple[Lot, ...]:
        """Members beyond a gang are of no use before it runs: they take no room, and nothing is bought for them."""
        served: list[Lot] = []
        for lot in lots:
            if lot.first.job_id is None or lot.first.job_id not in self._without_place:
                served.append(lot)
                continue
            self._room.take_back(self._kept.pop(lot.first.key, ()), lot.shape)
            self._settle(lot, (), GangPending(job_id=lot.first.job_id))
        return tuple(served)

    def _serve_within(self, key: str, lots: tuple[Lot, ...]) -> None:
        """Serve a gang whose members share a value of this label, in the first domain that can have them all."""
        coming: set[str] = set()
        for lot in lots:
            kept = self._kept.pop(lot.first.key, ())
            coming.update(kept)
            self._room.take_back(kept, lot.shape)
        wanted = [(lot.shape, lot.members_count) for lot in lots]
        values = domains_for(key, wanted, self._room, self._market, frozenset(coming))
        if not any(self._serve(tuple(lot.bound_to(key, value) for lot in lots), is_last=False) for value in values):
            count = sum(lot.members_count for lot in lots)
            reason = NoDomainFits(topology_key=key, domains_count=len(values), members_count=count)
            reasons = self._none_of(lots[0].first.gang or "", lots, {0: reason})
            for number, lot in enumerate(lots):
                self._settle(lot, (), reasons[number])

    def _serve(self, lots: tuple[Lot, ...], *, is_last: bool = True) -> bool:
        """Return False where a gang cannot be had; unless that was the last try, nothing is said of it then."""
        mark, bought_mark, returns_count = self._room.mark(), self.basket.mark(), len(self.returns)
        self._before = bought_mark, returns_count
        kept = [self._kept.get(lot.first.key, ()) for lot in lots]
        placed = [keys + self._place(lot, lot.members_count - len(keys)) for lot, keys in zip(lots, kept, strict=True)]
        short = [number for number, lot in enumerate(lots) if len(placed[number]) < lot.members_count]
        gang = lots[0].first.gang if lots[0].first.is_bought_for else None
        reasons: dict[int, DeferReason] = {}
        if short and lots[short[0]].first.is_bought_for:
            for each in short:
                if (closed := self._closed(lots[each].first)) is not None:
                    reasons[each] = closed
            reasons |= self._patient(lots, [each for each in short if each not in reasons], placed)
            reasons |= self._coming(lots, [each for each in short if each not in reasons], placed)
            wanting = [each for each in short if each not in reasons]
            if wanting and all(lots[each].shape.company.is_plain for each in wanting):
                self._buy_together(lots, wanting, placed)
            for each in wanting:
                lacking_count = lots[each].members_count - len(placed[each])
                reason = self._buy_alone(lots[each].first, lacking_count, placed, each) if lacking_count else None
                if reason is not None:
                    reasons[each] = reason
            self._keep_dear(lots, [each for each in short if not isinstance(reasons.get(each), _PASSING)], placed)
            reasons = {each: why for each, why in reasons.items() if len(placed[each]) < lots[each].members_count}
        if gang is not None and (late := self._is_late(gang, placed)) is not None:
            reasons = {0: late}
        if gang is not None and (reasons or any(len(placed[each]) < lots[each].members_count for each in short)):
            self._room.rollback(mark)
            self.basket.rollback(bought_mark)
            del self.returns[returns_count:]
            for number, lot in enumerate(lots):
                self._room.take_back(kept[number], lot.shape)
                placed[number] = ()
            if not is_last:
                return False
            reasons = self._none_of(gang, lots, reasons)
        for number, lot in enumerate(lots):
            self._settle(lot, placed[number], reasons.get(number))
        return True

    def _closed(self, item: DemandItem) -> DeferReason | None:
        """Return why nothing is bought for it now, whatever could be had."""
        if self._closed_reason is not None:
            return self._closed_reason
        as_of = self._draft.as_of
        gang = None if item.gang is None else waits(item.gang, self._state, self._policy, as_of)
        cooldown = cooling(item, self._state.orders, self._policy, as_of)
        return gang or cooldown or awaits_spot(item, self._market, self._policy, as_of)

    def _patient(self, lots: tuple[Lot, ...], short: list[int], placed: list[tuple[str, ...]]) -> dict[int, DeferReason]:
        """Return the lots that need no purchase: running work gives them room within the wait that they are allowed."""
        found: dict[int, DeferReason] = {}
        for each in short:
            lot, missing_count = lots[each], lots[each].members_count - len(placed[each])
            expected = self._soon().takes(lot.first, lot.shape, missing_count)
            if expected is not None:
                found[each] = expected
        # Lots of one gang start together: to wait for a part of it gains nothing.
        return found if len(found) == len(short) or all(lots[each].first.gang is None for each in short) else {}

    def _coming(
        self, lots: tuple[Lot, ...], short: list[int], placed: list[tuple[str, ...]]
    ) -> Mapping[int, DeferReason]:
        """Return the lots that wait for the rest of their burst; of one whose pods are all alike nodes are bought that
        those fill. What cannot be bought anyway is told why."""
        lacking = {each: lots[each].items[len(placed[each]) :] for each in short if self._can_buy(lots[each])}
        found = self._burst.waiting(lacking) if lacking else {}
        if len(found) == len(short) == 1 and (lot := lots[short[0]]).shape.company.is_any:
            sinces = tuple(item.since for item in lacking[short[0]])
            keys = self.basket.buy_filled(Lacking(item=lot.first, sinces=sinces))
            placed[short[0]] += keys
            for key in keys:
                self._room.note(key, lot.shape)
        return found

    def _can_buy(self, lot: Lot) -> bool:
        return self.basket.is_open_to(lot.first.customer) and bool(self._market.members(lot.shape).any())

    def _soon(self) -> Soon:
        if self._coming_free is None:
            self._coming_free = Soon(self._draft, self._state, self._policy)
        return self._coming_free

    def _is_late(self, gang: str, placed: list[tuple[str, ...]]) -> GangTimedOut | None:
        """Return why the gang's nodes go back: some of those that it counts on did not come in time."""
        if all(self._room.as_put(key).standing is Standing.READY for keys in placed for key in keys):
            return None
        return is_late(gang, self._draft, self._policy)

    def _none_of(self, gang: str, lots: tuple[Lot, ...], reasons: dict[int, DeferReason]) -> dict[int, DeferReason]:
        """What keeps one lot of a gang from its room keeps all; a group of pods is spoken of by its name as well."""
        reason = next(iter(reasons.values()), None)
        if reason is None:
            return {}
        reason = self.basket.with_current_usage(reason)
        if all(item.key != gang for lot in lots for item in lot.items):
            self.held.append(Deferred(step=_STEP, subject=gang, reason=reason))
        return dict.fromkeys(range(len(lots)), reason)

    def _place(self, lot: Lot, count: int) -> tuple[str, ...]:
        """Place so many members where there is room, and where there is if a drain is cancelled."""
        first = lot.first
        placed = self._room.place_most(lot.shape, count, first.prefers)
        if first.source is DemandSource.MOVING_POD and len(placed) < count:
            self._stop_moving(lot)
        if first.is_bought_for and len(placed) < count:
            placed += self._call_back(lot, count - len(placed))
        return placed

    def _buy_together(self, lots: tuple[Lot, ...], short: list[int], placed: list[tuple[str, ...]]) -> None:
        """Buy one fleet for what these lots lack, each pod in a zone that the rules leave it."""
        if not any(self.basket.is_open_to(lots[each].first.customer) for each in short):
            return
        wants = [Want(shape=lots[each].shape, sinces=lots[each].sinces[len(placed[each]) :]) for each in short]
        parts = parts_of(wants, self._market, self._room)
        items = [msgspec.structs.replace(lots[short[part.want]].first, shape=part.shape) for part in parts]
        lacking = [Lacking(item=item, sinces=part.sinces) for item, part in zip(items, parts, strict=True)]
        for part, keys in zip(parts, self.basket.buy_together(lacking) if parts else (), strict=True):
            placed[short[part.want]] += keys
            for key in keys:
                self._room.note(key, part.shape)

    def _buy_alone(self, item: DemandItem, count: int, placed: list[tuple[str, ...]], number: int) -> DeferReason | None:
        """Buy for this lot as far as limits let, and place it; return why no more."""
        if not item.shape.company.is_any:
            keys, reason = self.basket.buy_one_by_one(item, count)
            placed[number] += keys
            return reason
        # What was bought, or called back, for the lots beside it may have room left.
        is_news = self._before != (self.basket.mark(), len(self.returns))
        beside = self._room.place_most(item.shape, count) if is_news else ()
        covered, reason = self.basket.buy(item, count - len(beside))
        placed[number] += beside + self._room.place_most(item.shape, covered)
        return reason

    def _keep_dear(self, lots: tuple[Lot, ...], short: list[int], placed: list[tuple[str, ...]]) -> None:
        """What could not be bought is placed on nodes that leave, though they cost more than new ones would."""
        for each in short:
            lacking_count = lots[each].members_count - len(placed[each])
            if lacking_count:
                placed[each] += self._call_back(lots[each], lacking_count, at_any_price=True)

    def _call_back(self, lot: Lot, count: int, *, at_any_price: bool = False) -> tuple[str, ...]:
        """Cancel drains by choice whose nodes take members of the lot, and place them there; of nodes that cost less
        than new ones, or all of them."""
        placed: tuple[str, ...] = ()
        for view, drain in self._callable_back.values():
            node = node_bin(view, self._draft.pods, Standing.READY)
            if len(placed) == count or node.key in self._room or not fits(lot.shape, node):
                continue
            mark = self._room.mark()
            self._room.put(node)
            here = self._room.place_most(lot.shape, count - len(placed))
            if not here or not (
                at_any_price or is_cheaper_kept(view, lot.shape, len(here), self._market, self._policy)
            ):
                self._room.rollback(mark)
                continue
            self._cancel(drain, lot)
            placed += here
        return placed

    def _stop_moving(self, lot: Lot) -> None:
        """Pods have no place besides the node that they were to leave: it stays."""
        if lot.first.leaves not in self._callable_back:
            return
        view, drain = self._callable_back[lot.first.leaves]
        node = node_bin(view, self._draft.pods, Standing.READY)
        if node.key not in self._room:
            self._room.put(node)
            self._cancel(drain, lot)

    def _cancel(self, drain: DrainNode, lot: Lot) -> None:
        self.returns.append(
            CancelDrain(
                action_id=self._draft.next_action_id(),
                drain_action_id=drain.action_id,
                node_uid=drain.node_uid,
                node_name=drain.node_name,
                reason=DemandReturned(demand=tuple(item.key for item in lot.items)),
            )
        )

    def _settle(self, lot: Lot, placed: tuple[str, ...], reason: DeferReason | None) -> None:
        """Note for each item where it counts on room, or why it has none."""
        kept = self._ordered if self._kept.get(lot.first.key) else None
        for item, keys in shared_out(lot, placed, kept):
            bins = [self._room.as_put(key) for key in keys]
            self.claimed.update(keys)
            self.basket.assign(item, keys)
            if not item.is_bought_for:
                if not bins:
                    self._burst.note(item)
                continue
            if not bins and item.source is DemandSource.QUEUED_JOB and item.job_id is not None:
                self._without_place.add(item.job_id)
            self.is_met = self.is_met and bool(bins) and all(each.standing is Standing.READY for each in bins)
            if not bins and reason is not None:
                self.held.append(Deferred(step=_STEP, subject=item.key, reason=reason))
            elif bins and all(each.standing is not Standing.BOUGHT for each in bins):
                self.held.append(Deferred(step=_STEP, subject=item.key, reason=_expected(bins)))


def _expected(bins: list[Bin]) -> CapacityExpected:
    """The last of the bins to be usable; those that are ready wait only for the scheduler."""
    last = max(bins, key=lambda each: (each.standing, each.expected_at or _LONG_AGO, each.key))
    return CapacityExpected(node=last.name, expected_at=last.expected_at)
