"""What may still be spent, and what can be bought: limits of money by period, and all that is for sale."""

from http import HTTPStatus

import msgspec
from aiohttp import web

from gpu_autoscaler.core.buying.price_ages import is_stale, priced_at
from gpu_autoscaler.core.buying.refusals import reaches, standing
from gpu_autoscaler.core.nodes.life import node_views
from gpu_autoscaler.core.spending.money import spend_snapshot_of
from gpu_autoscaler.core.views import pods_by_node
from gpu_autoscaler.core.words.sentences import sentence
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler_services.gateway.reading import READ_MODEL
from gpu_autoscaler_services.gateway.routes import Route, answer


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of money, and how much of it is used up."""

    owner: str  # cluster, pool/<name>, zone/<name> or project/<name>
    period: str  # day or month, of UTC
    limit_micro_usd: int
    spent_micro_usd: int  # charged, and time that is over and not charged yet
    reserved_micro_usd: int  # promised to what runs or is on order
    left_micro_usd: int  # below zero: more was promised than there is
    is_hard: bool  # what runs makes way before it is passed
    until: Instant  # the period's end
    doubt: str  # why nobody can say; empty: the figures are known


class BudgetList(msgspec.Struct, frozen=True, kw_only=True):
    """Every limit of money by day and month that the policy has."""

    as_of: Instant
    items: tuple[Budget, ...]


class OfferShown(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is for sale, and whether the cloud is asked for it now."""

    name: str  # type/zone/capacity type
    instance_type: str
    zone: str
    capacity_type: CapacityType
    gpu_count: int
    gpu_model: str | None
    price_micro_usd_per_hour: int | None  # None: nobody said it, and it is not bought
    price_source: str | None  # None: not told
    priced_at: Instant | None  # when its source said it last; None: there is no price
    is_price_stale: bool  # older than the policy has it
    refused_until: Instant | None  # None: it may be asked for
    refused_because: str  # empty: it may be asked for


class OfferList(msgspec.Struct, frozen=True, kw_only=True):
    """All that is for sale, by name."""

    as_of: Instant
    sampled_at: Instant | None  # None: nothing was sampled yet
    items: tuple[OfferShown, ...]


async def budget_handler(request: web.Request) -> web.Response:
    """What is spent, promised and left of each limit, in the period of now."""
    model = request.app[READ_MODEL]
    state, as_of = model.view.state, model.clock.now()
    books = spend_snapshot_of(state, node_views(state, as_of), pods_by_node(state), model.policy, as_of)
    items = []
    for cap in books.caps:
        spent, reserved, doubt = books.spent[cap], books.promised[cap], books.doubt(cap)
        items.append(
            Budget(
                owner=cap.owner,
                period=cap.period,
                limit_micro_usd=cap.micro_usd_max,
                spent_micro_usd=spent,
                reserved_micro_usd=reserved,
                left_micro_usd=cap.micro_usd_max - spent - reserved,
                is_hard=cap.is_hard,
                until=books.end(cap),
                doubt="" if doubt is None else sentence(doubt),
            )
        )
    return answer(request, BudgetList(as_of=as_of, items=tuple(items)))


async def offers_handler(request: web.Request) -> web.Response:
    """All that is for sale, with what the cloud would not sell lately."""
    model = request.app[READ_MODEL]
    state, as_of = model.view.state, model.clock.now()
    refusals, told = standing(state, as_of), state.offers
    items = []
    for offer in sorted(() if told is None else told.offers, key=lambda offer: offer.key):
        found = [refusals[scope] for scope in reaches(offer) if scope in refusals]
        last = max(found, key=lambda refusal: refusal.until, default=None)
        items.append(
            OfferShown(
                name=offer.key,
                instance_type=offer.instance_type,
                zone=offer.zone,
                capacity_type=offer.capacity_type,
                gpu_count=offer.resources.gpu_count,
                gpu_model=offer.gpu_model,
                price_micro_usd_per_hour=offer.price_micro_usd_per_hour,
                price_source=offer.price_source,
                priced_at=None if told is None else priced_at(offer, told),
                is_price_stale=told is not None and is_stale(offer, told, model.policy, as_of),
                refused_until=None if last is None else last.until,
                refused_because=""
                if last is None
                else f"{last.code} for {last.scope} {last.name}, {last.tries_count} in a row: {last.message}",
            )
        )
    sampled_at = None if state.offers is None else state.offers.sampled_at
    return answer(request, OfferList(as_of=as_of, sampled_at=sampled_at, items=tuple(items)))


ROUTES = (
    Route(
        method="GET",
        path="/api/v1/budget",
        handler=budget_handler,
        summary="What is spent, promised and left of each limit of money",
        tag="money",
        answers={HTTPStatus.OK: BudgetList},
    ),
    Route(
        method="GET",
        path="/api/v1/offers",
        handler=offers_handler,
        summary="All that is for sale, and what the cloud would not sell lately",
        tag="decisions",
        answers={HTTPStatus.OK: OfferList},
    ),
)
