"""Spend budgets and available offers over REST."""

import msgspec
from aiohttp import web

from gpu_autoscaler.core.limits.spend import spend_snapshot_of
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.provisioning.price_age import is_stale, priced_at
from gpu_autoscaler.core.provisioning.unavailable_offers import active_unavailability, scopes_of
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler_services.api_rights import READ_CLUSTER, READ_COSTS
from gpu_autoscaler_services.gateway.read_model import READ_MODEL
from gpu_autoscaler_services.gateway.routes import Route, answer


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A spend budget and how much of it is used."""

    owner: str  # cluster, pool/<name>, zone/<name> or project/<name>
    period: str  # day or month, of UTC
    limit_micro_usd: int
    spent_micro_usd: int  # charged, and elapsed time not charged yet
    reserved_micro_usd: int  # committed to running and ordered instances
    left_micro_usd: int  # negative: more is committed than the limit
    is_hard: bool  # nodes are removed before the limit is exceeded
    until: Instant  # end of the period
    unknown_reason: str  # why the figures are unknown; empty: they are known


class BudgetList(msgspec.Struct, frozen=True, kw_only=True):
    """Every spend budget of the policy, by day and month."""

    as_of: Instant
    items: tuple[Budget, ...]


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
    """All offers, by name."""

    as_of: Instant
    sampled_at: Instant | None  # None: not sampled yet
    items: tuple[OfferStatus, ...]


async def budget_handler(request: web.Request) -> web.Response:
    """Show each spend budget: limit, spent, reserved and left."""
    model = request.app[READ_MODEL]
    state, as_of = model.view.state, model.clock.now()
    spend = spend_snapshot_of(state, node_views(state, as_of), pods_by_node(state), model.policy, as_of)
    items = []
    for cap in spend.caps:
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
    return answer(request, BudgetList(as_of=as_of, items=tuple(items)))


async def offers_handler(request: web.Request) -> web.Response:
    """List offers with prices and availability."""
    model = request.app[READ_MODEL]
    state, as_of = model.view.state, model.clock.now()
    unavailable, sample = active_unavailability(state, as_of), state.offers
    items = []
    for offer in sorted(() if sample is None else sample.offers, key=lambda offer: offer.key):
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
    return answer(request, OfferList(as_of=as_of, sampled_at=sampled_at, items=tuple(items)))


ROUTES = (
    Route("GET", "/api/v1/budget", budget_handler, "spend", BudgetList, (READ_COSTS,)),
    Route("GET", "/api/v1/offers", offers_handler, "decisions", OfferList, (READ_CLUSTER,)),
)
