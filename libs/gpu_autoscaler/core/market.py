"""What can be bought: every offer in every pool that allows it, and why an offer cannot be had now.

A refusal reaches one offer, its zone, or its region: a zone out of addresses refuses everything there, a region's quota
refuses the capacity type there. It is remembered until its `retry_at`.

An offer is a promise; the latest usable node that came of it is what the next one is taken to be. So a node that comes
smaller than promised, or without a label, is not bought again and again for work that it cannot take.
"""

from datetime import datetime

import msgspec

from gpu_autoscaler.core.bins import PodsByNode, node_free_of_work, offered_bin
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.life import NodeView
from gpu_autoscaler.core.placement import Bin, Shape, accepts, members_that_fit
from gpu_autoscaler.core.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons import HoldReason, NoOfferFits, OffersRefused, PriceUnknown, WatchStale

_SHAPES_COUNT_MAX = 1024  # of which answers are kept beside one list of offers


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One offer in one pool, as a purchase for one shape."""

    pool: NodePool
    offer: Offer
    price_micro_usd_per_hour: int
    members_count: int  # of the shape, that a new node takes
    node: Bin  # as a new node would be, but for its name


class Assortment(msgspec.Struct, frozen=True, kw_only=True):
    """What may be bought for one shape, or why that is nothing."""

    candidates: tuple[Candidate, ...]
    hold_reason: HoldReason | None = None  # set where there are no candidates


class _Shelf:
    """Every offer in every pool that allows it, in order of offer and pool, as promised."""

    def __init__(self, offers: tuple[Offer, ...], pools: tuple[NodePool, ...]) -> None:
        self.promised = tuple(
            (pool, offer, offered_bin(pool, offer, ActionId("offered")))
            for offer in sorted(offers, key=lambda offer: offer.key)
            for pool in sorted(pools, key=lambda pool: pool.name)
            if allows(pool, offer)
        )
        self._members: dict[Shape, tuple[int, ...]] = {}

    def members(self, shape: Shape) -> tuple[int, ...]:
        """How many members of the shape each promised node takes."""
        found = self._members.get(shape)
        if found is None:
            if len(self._members) >= _SHAPES_COUNT_MAX:
                self._members.clear()
            found = self._members[shape] = tuple(members_that_fit(shape, node) for _, _, node in self.promised)
        return found


_shelf = remembered(4)(_Shelf)


class Market:
    """All that is for sale at one instant, asked by shape. Answers are kept, as shapes repeat."""

    def __init__(self, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> None:
        self._watch_seconds_max = policy.watch_seconds_max
        self._offers = None if state.offers is None else state.offers.offers
        self._shelf = _shelf(self._offers or (), policy.pools)
        latest = _latest_of_each_offer(draft.views)
        self._came = {
            number: _as_it_came(node, latest[pool.name, offer.key], draft.pods)
            for number, (pool, offer, node) in enumerate(self._shelf.promised if latest else ())
            if (pool.name, offer.key) in latest
        }
        self._refusals = _standing_refusals(state, draft.as_of)
        self._answers: dict[Shape, Assortment] = {}

    @property
    def offers_count(self) -> int:
        """How many purchases are possible in principle, whatever stands against them."""
        return len(self._shelf.promised)

    @property
    def _on_sale(self) -> list[tuple[NodePool, Offer, Bin]]:
        return [
            (pool, offer, self._came.get(number, node))
            for number, (pool, offer, node) in enumerate(self._shelf.promised)
        ]

    def for_shape(self, shape: Shape) -> Assortment:
        """Return every purchase that takes at least one member of this shape, in order of offer and pool."""
        answer = self._answers.get(shape)
        if answer is None:
            answer = self._answers[shape] = self._look_up(shape)
        return answer

    def _look_up(self, shape: Shape) -> Assortment:
        if self._offers is None:  # no list of offers is not an empty list
            reason = WatchStale(source="offers", age_seconds=None, age_seconds_max=self._watch_seconds_max)
            return Assortment(candidates=(), hold_reason=reason)
        buyable: list[Candidate] = []
        unpriced: set[str] = set()
        refused: dict[str, Instant] = {}
        promised_counts = self._shelf.members(shape)
        for number, (pool, offer, promised) in enumerate(self._shelf.promised):
            came = self._came.get(number)
            members_count = promised_counts[number] if came is None else members_that_fit(shape, came)
            if members_count == 0:
                continue
            node = promised if came is None else came
            price, retry_at = offer.price_micro_usd_per_hour, self.refused_until(offer)
            if retry_at is not None:
                refused[offer.key] = retry_at
            elif price is None:
                unpriced.add(offer.key)
            else:
                candidate = Candidate(
                    pool=pool, offer=offer, price_micro_usd_per_hour=price, members_count=members_count, node=node
                )
                buyable.append(candidate)
        if buyable:
            return Assortment(candidates=tuple(buyable))
        if refused:
            reason_refused = OffersRefused(offers=tuple(sorted(refused)), retry_at=min(refused.values()))
            return Assortment(candidates=(), hold_reason=reason_refused)
        if unpriced:
            return Assortment(candidates=(), hold_reason=PriceUnknown(offers=tuple(sorted(unpriced))))
        return Assortment(candidates=(), hold_reason=NoOfferFits(detail=self._what_is_missing(shape)))

    def refused_until(self, offer: Offer) -> Instant | None:
        """Return when the offer may be asked for again; None: now."""
        if not self._refusals:
            return None
        scopes = (("offer", offer.key), ("zone", offer.zone), ("region", _regional(offer)))
        return max((self._refusals[scope] for scope in scopes if scope in self._refusals), default=None)

    def _what_is_missing(self, shape: Shape) -> str:
        """Say what no offer has: the first thing that, taken alone, rules all of them out."""
        if not self._on_sale:
            return "no pool allows any offer"
        wanted, model = shape.resources.gpu_count, shape.gpu_model
        if wanted:
            of_model = "" if model is None else f" of model {model}"
            offers = [offer for _, offer, _ in self._on_sale if model in (None, offer.gpu_model)]
            most = max((offer.resources.gpu_count for offer in offers), default=0)
            if most < wanted:
                return f"no offer has {wanted} GPUs{of_model} on one node (most: {most})"
        if not any(accepts(shape, node) for _, _, node in self._on_sale):
            return "no offer has the labels, taints, GPU memory and capacity type that this asks for"
        return "no offer that is otherwise right has this much CPU, memory, disk and GPUs on one node"


def allows(pool: NodePool, offer: Offer) -> bool:
    """True when the pool's filters let this offer in."""
    return (
        (not pool.instance_types or offer.instance_type in pool.instance_types)
        and (not pool.gpu_models or offer.gpu_model in pool.gpu_models)
        and (not pool.zones or offer.zone in pool.zones)
        and (not pool.capacity_types or offer.capacity_type in pool.capacity_types)
    )


def _latest_of_each_offer(views: tuple[NodeView, ...]) -> dict[tuple[str, str], NodeView]:
    """The node that became usable last, by pool and offer."""
    latest: dict[tuple[str, str], NodeView] = {}
    usable = (view for view in views if view.is_usable and view.usable_since is not None and view.order is not None)
    for view in sorted(usable, key=lambda view: (view.usable_since, view.name)):
        decision = None if view.order is None else view.order.decision
        if decision is not None:
            latest[decision.pool, decision.offer.key] = view
    return latest


def _as_it_came(promised: Bin, came: NodeView, pods: PodsByNode) -> Bin:
    """The node that a purchase makes: the promise, with the amounts and labels of the node that came of it.

    Taints are taken from the promise: those that a node has besides are for a while, or for that node alone.
    """
    own = {key: value for key, value in came.labels.items() if key != labels.HOSTNAME}
    return msgspec.structs.replace(promised, free=node_free_of_work(came, pods), labels=own)


def _standing_refusals(state: ClusterState, as_of: datetime) -> dict[tuple[str, str], Instant]:
    """The latest `retry_at` still ahead, by scope and name."""
    standing: dict[tuple[str, str], Instant] = {}
    for order in state.orders.values():
        refused = order.refused
        if refused is None or refused.retry_at <= as_of:
            continue
        names = {"offer": refused.offer.key, "zone": refused.offer.zone, "region": _regional(refused.offer)}
        scope = (refused.scope, names[refused.scope])
        standing[scope] = max(refused.retry_at, standing.get(scope, refused.retry_at))
    return standing


def _regional(offer: Offer) -> str:
    """Region and capacity type of an offer: quotas count each capacity type of a region for itself.

    Zones are named after their region plus one character, with or without a dash: `eu-west-1a`, `europe-west1-b`,
    `westeurope-1` (documentation of AWS, Google Cloud and Azure on regions and zones, read 2026-11-21).
    """
    return f"{offer.zone[:-1].removesuffix('-')}/{offer.capacity_type}"
