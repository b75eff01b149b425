"""What the gateway shows: nodes, plans, facts, money, the cluster in numbers, and why things are as they are."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.core import explain
from gpu_autoscaler.core.headline import Sight, job_line, node_line, pod_line
from gpu_autoscaler.events import envelope as envelopes
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobListed
from gpu_autoscaler.events.node import NodeInstanceListed, NodeListed, NodeWatched
from gpu_autoscaler.events.pod import PodBudgetListed, PodListed, PodWatched
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model import decisions
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.lease import holder_of
from gpu_autoscaler.tools.history import History
from gpu_autoscaler_services.gateway import screens, wire
from gpu_autoscaler_services.gateway.api_directives import in_force_now
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.reading import PLANS, READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.routes import Route, answer, read_query
from gpu_autoscaler_services.gateway.subjects import SubjectFilter
from gpu_autoscaler_services.gateway.tail import RING_COUNT_MAX, Entry

LIMIT_DEFAULT = 50
ACTIVE_SECONDS_MAX = 0.5  # wall time that the status waits for the broker's word on who is active
HOUR_SECONDS = 3600
ADDING_RETRY_SECONDS = 2.0  # a month of charges is read in seconds to a minute

Limit = Annotated[int, msgspec.Meta(ge=1, le=RING_COUNT_MAX, description="How many at most, newest first.")]


class PlansQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which plans."""

    limit: Limit = LIMIT_DEFAULT


class FactsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which facts."""

    subject: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="Subject filter with NATS wildcards, e.g. scaling.>; may be repeated. Default: all."),
    ] = ()
    limit: Limit = LIMIT_DEFAULT


class CostQuery(msgspec.Struct, frozen=True, kw_only=True):
    """How to add money up."""

    span_seconds: Annotated[
        int,
        msgspec.Meta(ge=60, le=30 * 24 * HOUR_SECONDS, multiple_of=60, description="Width of a span; cluster time."),
    ] = HOUR_SECONDS


async def status_handler(request: web.Request) -> web.Response:
    """The cluster in numbers."""
    model = request.app[READ_MODEL]
    return answer(
        request,
        screens.status(
            model.view.state,
            model.view.cut,
            model.clock.now(),
            clock_factor=model.clock.factor,
            is_broker_connected=model.bus.is_connected,
            active_scaler=await _active_scaler(model),
            directives=in_force_now(model),
        ),
    )


async def _active_scaler(model: ReadModel) -> str | None:
    """Who plans now, as the broker has it; the cluster can be told of without."""
    try:
        async with asyncio.timeout(ACTIVE_SECONDS_MAX):
            return await holder_of(model.bus, "scaler")
    except (TransientError, PermanentError, TimeoutError):
        return None


async def nodes_handler(request: web.Request) -> web.Response:
    """Every node that is not gone."""
    model = request.app[READ_MODEL]
    as_of = model.clock.now()
    return answer(request, wire.NodeList(as_of=as_of, items=screens.nodes(model.view.state, as_of)))


async def plans_handler(request: web.Request) -> web.Response:
    """The newest plans."""
    query = read_query(request, PlansQuery)
    entries = request.app[READ_MODEL].tail.recent(PLANS, query.limit)
    return answer(request, wire.PlanList(items=tuple(_plan(entry) for entry in entries)))


async def plan_handler(request: web.Request) -> web.Response:
    """One plan by its id."""
    plan_id = request.match_info["plan_id"]
    for entry in request.app[READ_MODEL].tail.recent(PLANS, RING_COUNT_MAX):
        plan = _plan(entry)
        if plan.plan_id == plan_id:
            return answer(request, plan)
    raise Problem(HTTPStatus.NOT_FOUND, f"no plan {plan_id!r} among the newest; older ones are in the stream SCALING")


def _plan(entry: Entry) -> wire.Plan:
    fact = entry.recorded.fact
    assert isinstance(fact, ScalingPlanMade), f"{entry.place} is on the subject of plans"  # noqa: S101 - a bug of ours
    return wire.Plan(
        plan_id=fact.plan_id,
        sequence=entry.recorded.sequence,
        as_of=fact.plan.as_of,
        decisions=tuple(
            wire.Decision(
                decision=str(decision.__struct_config__.tag),
                action_id=decision.action_id,
                subject=_about(decision),
                reason=decision.reason.tag(),
                sentence=explain.sentence(decision.reason),
            )
            for decision in fact.plan.decisions
        ),
        deferred=tuple(
            wire.Deferred(
                step=held.step,
                subject=held.subject,
                reason=held.reason.tag(),
                sentence=explain.sentence(held.reason),
            )
            for held in fact.plan.deferred
        ),
        cut=dict(fact.cut.last_sequences),
        policy_digest=fact.policy_digest,
        core_digest=fact.core_digest,
    )


def _about(decision: decisions.AnyDecision) -> str:
    match decision:
        case decisions.BuyNode():
            return decision.offer.key
        case decisions.DrainNode() | decisions.CancelDrain():
            return decision.node_name
        case decisions.ReleaseInstance():
            return decision.provider_id or f"order {decision.order_action_id}"


async def facts_handler(request: web.Request) -> web.Response:
    """The newest facts that match."""
    query = read_query(request, FactsQuery)
    entries = request.app[READ_MODEL].tail.recent(SubjectFilter(query.subject), query.limit)
    return answer(
        request,
        wire.FactList(
            items=tuple(
                wire.RecordedFact(
                    place=entry.place,
                    subject=entry.subject,
                    event=msgspec.json.decode(envelopes.encode(entry.recorded.envelope)),
                )
                for entry in entries
            )
        ),
    )


async def cost_handler(request: web.Request) -> web.Response:
    """Money by time and by project."""
    query, model = read_query(request, CostQuery), request.app[READ_MODEL]
    if not model.tail.has_read(CostAccrued.stream()):
        detail = "charges are still being added up; a part of them would be a wrong sum"
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after_seconds=ADDING_RETRY_SECONDS)
    return answer(request, model.ledger.cost(query.span_seconds))


async def why_handler(request: web.Request) -> web.Response:
    """The story of a node, pod or job back to its first cause, told from everything that the streams still hold."""
    kind, name = request.match_info["kind"], request.match_info["name"]
    tell = _TELL.get(kind)
    if tell is None:
        raise Problem(HTTPStatus.NOT_FOUND, f"no stories are told about a {kind!r}; there are {', '.join(_TELL)}")
    model = request.app[READ_MODEL]
    history = History(model.bus, model.clock)
    async with model.one_story_at_a_time:
        told: list[Recorded] = []
        for stream in sorted({fact.stream() for fact in _TOLD}):
            facts = [fact for fact in _TOLD if fact.stream() == stream]
            async for batch in history.read(stream, facts):
                told += batch
        sentences = await asyncio.to_thread(tell, told, name)
    if not sentences:
        raise Problem(HTTPStatus.NOT_FOUND, f"no {kind} {name!r} is known, by name or by id")
    now = await asyncio.to_thread(_LINE[kind], name, model.sight())
    return answer(request, wire.Why(kind=kind, name=name, now=now, sentences=sentences))


_LINE: Mapping[str, Callable[[str, Sight], str]] = {"node": node_line, "pod": pod_line, "job": job_line}
_TELL: Mapping[str, Callable[[Sequence[Recorded], str], tuple[str, ...]]] = {
    "node": explain.why_node,
    "pod": explain.why_pod,
    "job": explain.why_job,
}
# Telemetry, money and signs of life cause nothing that a story tells of, and are by far the most.
_TOLD = tuple(
    fact
    for fact in FACTS
    if fact.domain() in {"job", "pod", "node", "spot", "demand", "scaling"}
    and fact not in {JobListed, PodListed, PodWatched, PodBudgetListed, NodeListed, NodeWatched, NodeInstanceListed}
)
_UNREADABLE = (HTTPStatus.UNPROCESSABLE_ENTITY,)

ROUTES = (
    Route(
        method="GET",
        path="/api/v1/status",
        handler=status_handler,
        summary="The cluster in numbers",
        tag="cluster",
        answers={HTTPStatus.OK: wire.Status},
    ),
    Route(
        method="GET",
        path="/api/v1/nodes",
        handler=nodes_handler,
        summary="Every node from its order to its end",
        tag="cluster",
        answers={HTTPStatus.OK: wire.NodeList},
    ),
    Route(
        method="GET",
        path="/api/v1/plans",
        handler=plans_handler,
        summary="The newest plans: decisions and what was held back, with reasons",
        tag="decisions",
        answers={HTTPStatus.OK: wire.PlanList},
        problems=_UNREADABLE,
        query=PlansQuery,
    ),
    Route(
        method="GET",
        path="/api/v1/plans/{plan_id}",
        handler=plan_handler,
        summary="One plan",
        tag="decisions",
        answers={HTTPStatus.OK: wire.Plan},
        problems=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method="GET",
        path="/api/v1/facts",
        handler=facts_handler,
        summary="The newest facts",
        tag="facts",
        answers={HTTPStatus.OK: wire.FactList},
        problems=_UNREADABLE,
        query=FactsQuery,
    ),
    Route(
        method="GET",
        path="/api/v1/cost",
        handler=cost_handler,
        summary="Money by time and by project",
        tag="money",
        answers={HTTPStatus.OK: wire.Cost},
        problems=(*_UNREADABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        query=CostQuery,
    ),
    Route(
        method="GET",
        path="/api/v1/why/{kind}/{name}",
        handler=why_handler,
        summary="The story of a node, pod or job back to its first cause",
        tag="decisions",
        answers={HTTPStatus.OK: wire.Why},
        problems=(HTTPStatus.NOT_FOUND,),
    ),
)
