"""Spend budgets and available offers over REST."""

from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.core.limits.spend import spend_snapshot_of
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.provisioning.price_age import is_stale, priced_at
from gpu_autoscaler.core.provisioning.unavailable_offers import active_unavailability, scopes_of
from gpu_autoscaler.core.state.ledger import Period
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler_services.api_rights import READ_CLUSTER, READ_COSTS
from gpu_autoscaler_services.gateway.paging import PageQuery, page
from gpu_autoscaler_services.gateway.read_model import READ_MODEL
from gpu_autoscaler_services.gateway.routes import INVALID, Route, answer, read_query


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A spend budget and how much of it is used."""

    owner: str  # cluster, pool/<name>, zone/<name> or project/<name>
    period: Period  # of UTC
    limit_micro_usd: int
    spent_micro_usd: int  # charged, and elapsed time not charged yet
    reserved_micro_usd: int  # committed to running and ordered instances
    left_micro_usd: int  # negative: more is committed than the limit
    is_hard: bool  # nodes are removed before the limit is exceeded
    until: Instant  # end of the period
    unknown_reason: str  # why the figures are unknown; empty: they are known


class BudgetList(msgspec.Struct, frozen=True, kw_only=True):
    """Spend budgets of the policy, by owner and period, in pages."""

    as_of: Instant
    items: tuple[Budget, ...]
    next_cursor: str | None = None  # None: last page


class OfferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An offer, and whether it is available now."""

    name: str  # type/zone/capacity type
    instance_type: str
    zone: str
    capacity_type: CapacityType
    gpu_count: int
    gpu_model: str | None
    price_micro_usd_per_hour: int | None  # None: unknown, so the offer is not bought
    price_source: str | None  # None: unknown
    priced_at: Instant | None  # when the source reported it last; None: no price
    is_price_stale: bool  # older than the policy allows
    unavailable_until: Instant | None  # end of the back-off; None: available
    unavailable_reason: str  # empty: available


class OfferList(msgspec.Struct, frozen=True, kw_only=True):
    """Offers by name, in pages."""

    as_of: Instant
    sampled_at: Instant | None  # None: not sampled yet
    items: tuple[OfferStatus, ...]
    next_cursor: str | None = None  # None: last page


class BudgetsQuery(PageQuery, frozen=True, kw_only=True):
    """Query of budgets."""

    owner: Annotated[str | None, msgspec.Meta(description="Only budgets of this owner, e.g. project/research.")] = None
    period: Annotated[Period | None, msgspec.Meta(description="Only budgets of this period.")] = None


class OffersQuery(PageQuery, frozen=True, kw_only=True):
    """Query of offers."""

    zone: Annotated[str | None, msgspec.Meta(description="Only offers in this zone.")] = None
    instance_type: Annotated[str | None, msgspec.Meta(description="Only offers of this instance type.")] = None
    capacity_type: Annotated[CapacityType | None, msgspec.Meta(description="Only offers of this capacity type.")] = None
    gpu_model: Annotated[str | None, msgspec.Meta(description="Only offers with this GPU model.")] = None
    is_available: Annotated[
        bool | None, msgspec.Meta(description="Only offers that are available now, or only those that are not.")
    ] = None

    def wants(self, offer: Offer) -> bool:
        """Return whether the offer is wanted, available or not."""
        return (
            self.zone in {None, offer.zone}
            and self.instance_type in {None, offer.instance_type}
            and self.capacity_type in {None, offer.capacity_type}
            and self.gpu_model in {None, offer.gpu_model}
        )


async def list_budgets_handler(request: web.Request) -> web.Response:
    """Show each spend budget: limit, spent, reserved and left."""
    query, model = read_query(request, BudgetsQuery), request.app[READ_MODEL]
    state, as_of = model.view.state, model.clock.now()
    spend = spend_snapshot_of(state, node_views(state, as_of), pods_by_node(state), model.policy, as_of)
    wanted = (cap for cap in spend.caps if query.owner in {None, cap.owner} and query.period in {None, cap.period})
    caps, next_cursor = page(wanted, lambda cap: f"{cap.owner}/{cap.period}", query)
    items = []
    for cap in caps:
        spent, reserved, unknown = spend.spent[cap], spend.reserved[cap], spend.unknown_reason(cap)
        items.append(
            Budget(
                owner=cap.owner,
                period=cap.period,
                limit_micro_usd=cap.micro_usd_max,
                spent_micro_usd=spent,
                reserved_micro_usd=reserved,
                left_micro_usd=cap.micro_usd_max - spent - reserved,
                is_hard=cap.is_hard,
                until=spend.end(cap),
                unknown_reason="" if unknown is None else unknown.sentence(),
            )
        )
    return answer(request, BudgetList(as_of=as_of, items=tuple(items), next_cursor=next_cursor))


async def list_offers_handler(request: web.Request) -> web.Response:
    """List offers with prices and availability."""
    query, model = read_query(request, OffersQuery), request.app[READ_MODEL]
    state, as_of = model.view.state, model.clock.now()
    unavailable, sample = active_unavailability(state, as_of), state.offers

    def is_wanted(offer: Offer) -> bool:
        is_available = unavailable.keys().isdisjoint(scopes_of(offer))
        return query.wants(offer) and query.is_available in {None, is_available}

    wanted = filter(is_wanted, () if sample is None else sample.offers)
    offers, next_cursor = page(wanted, lambda offer: offer.key, query)
    items = []
    for offer in offers:
        backoffs = [unavailable[scope] for scope in scopes_of(offer) if scope in unavailable]
        last = max(backoffs, key=lambda refusal: refusal.until, default=None)
        items.append(
            OfferStatus(
                name=offer.key,
                instance_type=offer.instance_type,
                zone=offer.zone,
                capacity_type=offer.capacity_type,
                gpu_count=offer.resources.gpu_count,
                gpu_model=offer.gpu_model,
                price_micro_usd_per_hour=offer.price_micro_usd_per_hour,
                price_source=offer.price_source,
                priced_at=None if sample is None else priced_at(offer, sample),
                is_price_stale=sample is not None and is_stale(offer, sample, model.policy, as_of),
                unavailable_until=None if last is None else last.until,
                unavailable_reason=""
                if last is None
                else f"{last.code} for {last.scope} {last.name}, {last.tries_count} refusals in a row: {last.message}",
            )
        )
    sampled_at = None if sample is None else sample.sampled_at
    return answer(request, OfferList(as_of=as_of, sampled_at=sampled_at, items=tuple(items), next_cursor=next_cursor))


ROUTES = (
    Route(
        "GET", "/api/v1/budget", list_budgets_handler, "spend", BudgetList, (READ_COSTS,), INVALID, query=BudgetsQuery
    ),
    Route(
        "GET",
        "/api/v1/offers",
        list_offers_handler,
        "decisions",
        OfferList,
        (READ_CLUSTER,),
        INVALID,
        query=OffersQuery,
    ),
)
