"""Views over REST: status, nodes, plans, facts, cost, why."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.core.deferred_groups import EXAMPLES_COUNT
from gpu_autoscaler.core.explain import story
from gpu_autoscaler.core.explain.names import Namer, names_in_state, reason_sentence
from gpu_autoscaler.core.explain.status import StatusView, job_line, node_line, pod_line, request_line
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobListed
from gpu_autoscaler.events.node import NodeInstanceListed, NodeListed, NodeWatched
from gpu_autoscaler.events.pod import PodBudgetListed, PodListed, PodProvisioningListed, PodWatched
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model import decisions
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.format import subject_kind
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.lease import holder_of
from gpu_autoscaler_services.api_rights import READ_CLUSTER, READ_COSTS, READ_FACTS, READ_JOBS, READ_PROJECT_COSTS
from gpu_autoscaler_services.gateway import schema, status_views
from gpu_autoscaler_services.gateway.access import ACCESS, Access
from gpu_autoscaler_services.gateway.api.directives import active_directives
from gpu_autoscaler_services.gateway.env_values import encoded_event, require_env_values
from gpu_autoscaler_services.gateway.ledger import DAYS_COUNT_MAX
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.read_model import PLANS, READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.recent_facts import RING_COUNT_MAX, Entry
from gpu_autoscaler_services.gateway.routes import INVALID, MISSING, Route, answer, read_query
from gpu_autoscaler_services.gateway.subjects import SubjectFilter

LIMIT_DEFAULT = 50
ACTIVE_SECONDS_MAX = 0.5  # wall time that the status waits for the broker's lease record
HOUR_SECONDS = 3600
ADDING_RETRY_SECONDS = 2.0  # reading a month of charges takes seconds to a minute

Limit = Annotated[int, msgspec.Meta(ge=1, le=RING_COUNT_MAX, description="Maximum number, newest first.")]


class PlansQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query of plans."""

    limit: Limit = LIMIT_DEFAULT


class FactsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query of facts."""

    subject: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="Subject filter with NATS wildcards, e.g. scaling.>; repeatable. Default: all."),
    ] = ()
    limit: Limit = LIMIT_DEFAULT
    env: Annotated[
        bool,
        msgspec.Meta(
            description="Show the values of environment variables: with the right, where the settings allow it."
        ),
    ] = False


class CostQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query of costs."""

    span_seconds: Annotated[
        int,
        msgspec.Meta(ge=60, le=30 * 24 * HOUR_SECONDS, multiple_of=60, description="Seconds of cluster time per span."),
    ] = HOUR_SECONDS
    before: Annotated[
        date | None, msgspec.Meta(description="Show the days before this day of UTC; unset: until now.")
    ] = None
    days: Annotated[int, msgspec.Meta(ge=1, le=DAYS_COUNT_MAX, description="Maximum number of days.")] = DAYS_COUNT_MAX
    project_id: Annotated[
        str | None, msgspec.Meta(description="Only the spend of this project, in spans of UTC days.")
    ] = None


async def status_handler(request: web.Request) -> web.Response:
    """Show the cluster in numbers."""
    model = request.app[READ_MODEL]
    return answer(
        request,
        status_views.status(
            model.view.state,
            model.view.cut,
            model.clock.now(),
            clock_factor=model.clock.factor,
            is_broker_connected=model.bus.is_connected,
            active_scaler=await _active_scaler(model),
            directives=active_directives(model),
        ),
    )


async def _active_scaler(model: ReadModel) -> str | None:
    """Return the holder of the scaler's lease; None if unknown, which does not fail the status."""
    try:
        async with asyncio.timeout(ACTIVE_SECONDS_MAX):
            return await holder_of(model.bus, "scaler")
    except (TransientError, PermanentError, TimeoutError):
        return None


async def nodes_handler(request: web.Request) -> web.Response:
    """List nodes, from order to termination."""
    model = request.app[READ_MODEL]
    as_of = model.clock.now()
    age_seconds_max = model.policy.utilization.telemetry_age_seconds_max
    items = status_views.nodes(model.view.state, as_of, age_seconds_max)
    return answer(request, schema.NodeList(as_of=as_of, items=items))


async def plans_handler(request: web.Request) -> web.Response:
    """List the newest plans: decisions and deferred actions, with reasons."""
    query = read_query(request, PlansQuery)
    model = request.app[READ_MODEL]
    names = names_in_state(model.view.state)
    plans = tuple(_plan(entry, names) for entry in model.tail.recent(PLANS, query.limit))
    return answer(request, schema.PlanList(items=plans))


async def plan_handler(request: web.Request) -> web.Response:
    """Show a plan."""
    plan_id = request.match_info["plan_id"]
    model = request.app[READ_MODEL]
    names = names_in_state(model.view.state)
    for entry in model.tail.recent(PLANS, RING_COUNT_MAX):
        plan = _plan(entry, names)
        if plan.plan_id == plan_id:
            return answer(request, plan)
    raise Problem(
        HTTPStatus.NOT_FOUND,
        f"plan {plan_id!r} is not among the newest in memory; older ones are in the stream SCALING",
    )


def _plan(entry: Entry, names: Namer) -> schema.Plan:
    fact = entry.recorded.fact
    assert isinstance(fact, ScalingPlanMade), f"{entry.position} is on the subject of plans"  # noqa: S101 - a bug of ours
    groups = (*fact.plan.deferred_groups, *map(_upkeep_group, fact.plan.upkeep_deferred))
    return schema.Plan(
        plan_id=fact.plan_id,
        sequence=entry.recorded.sequence,
        as_of=fact.plan.as_of,
        decisions=tuple(_decision(decision, names) for decision in fact.plan.decisions),
        upkeep=tuple(_decision(decision, names) for decision in fact.plan.upkeep_decisions),
        deferred=tuple(
            schema.Deferred(
                step=action.step,
                subject=action.subject,
                reason=action.reason.tag(),
                sentence=reason_sentence(action.reason, names),
            )
            for action in (*fact.plan.deferred, *_examples(groups))
        ),
        deferred_groups=tuple(
            schema.DeferredGroup(
                step=group.step,
                kind=group.kind,
                reason=group.reason.tag(),
                sentence=reason_sentence(group.reason, names),
                objects_count=group.objects_count,
                gpu_count=group.gpu_count,
                shape=group.shape,
                subjects=group.subjects,
                reasons_count=group.reasons_count,
            )
            for group in groups
        ),
        deferred_unlisted=dict(fact.plan.deferred_unlisted),
        cut=dict(fact.cut.last_sequences),
        policy_digest=fact.policy_digest,
        core_digest=fact.core_digest,
    )


def _decision(decision: decisions.AnyDecision | decisions.AnyUpkeep, names: Namer) -> schema.Decision:
    return schema.Decision(
        decision=str(decision.__struct_config__.tag),
        action_id=decision.action_id,
        subject=_subject(decision),
        reason=decision.reason.tag(),
        sentence=reason_sentence(decision.reason, names),
    )


def _upkeep_group(deferred: decisions.DeferredUpkeep) -> decisions.DeferredGroup:
    return decisions.DeferredGroup(
        step=deferred.decision,
        kind=subject_kind(deferred.subjects[0]),
        reason=deferred.reason,
        objects_count=deferred.objects_count,
        subjects=deferred.subjects[:EXAMPLES_COUNT],
    )


def _examples(groups: Iterable[decisions.DeferredGroup]) -> Iterator[decisions.Deferred]:
    """Yield what the plan defers for the objects that its groups name."""
    for group in groups:
        for subject in group.subjects:
            yield decisions.Deferred(step=group.step, subject=subject, reason=group.reason)


def _subject(decision: decisions.AnyDecision | decisions.AnyUpkeep) -> str:
    match decision:
        case decisions.CancelIdleJob() | decisions.RequestJobCheckpoint():
            return decision.job_id
        case decisions.AnnounceIdleWorkload() | decisions.EndIdleWorkload():
            return f"{decision.namespace}/{decision.pods[0].name}"
        case decisions.AnnounceReservationEnd():
            return decision.provider_id
        case decisions.AnswerProvisioningRequest():
            return f"{decision.namespace}/{decision.name}"
        case decisions.BuyNode():
            return decision.offer.key
        case decisions.ReleaseInstance():
            return decision.provider_id or f"order {decision.order_action_id}"
        case _:
            return decision.node_name


async def facts_handler(request: web.Request) -> web.Response:
    """List the newest facts."""
    query = read_query(request, FactsQuery)
    model = request.app[READ_MODEL]
    entries = model.tail.recent(SubjectFilter(query.subject), query.limit)
    if query.env:
        await require_env_values(request[ACCESS], is_setting_on=model.are_env_values_shown)
    return answer(
        request,
        schema.FactList(
            items=tuple(
                schema.RecordedFact(
                    position=entry.position,
                    subject=entry.subject,
                    event=msgspec.json.decode(encoded_event(entry.recorded.envelope, is_env_shown=query.env)),
                )
                for entry in entries
            )
        ),
    )


async def cost_handler(request: web.Request) -> web.Response:
    """Show spend by time and by project."""
    query, model = read_query(request, CostQuery), request.app[READ_MODEL]
    await _require_costs(request[ACCESS], query.project_id)
    if not model.tail.has_read(CostAccrued.stream()):
        detail = "charges are still being read and the sum would be incomplete; retry in a few seconds"
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after_seconds=ADDING_RETRY_SECONDS)
    async with model.cost_turn:
        cost = await model.cost_history.cost(
            query.span_seconds, before=query.before, days_count=query.days, project_id=query.project_id
        )
    return answer(request, cost)


async def _require_costs(access: Access, project_id: str | None) -> None:
    """Raise a 403 unless the caller may read all spend, or that of the project."""
    if project_id is None:
        await access.require(READ_COSTS)
    elif not await access.allows(READ_COSTS):
        await access.require(READ_PROJECT_COSTS, project_id)


async def why_handler(request: web.Request) -> web.Response:
    """Explain a node, pod, job or ProvisioningRequest back to its first cause."""
    kind, name = request.match_info["kind"], request.match_info["name"]
    explain_kind = _EXPLAIN.get(kind)
    if explain_kind is None:
        raise Problem(HTTPStatus.NOT_FOUND, f"unknown kind {kind!r}; use one of {', '.join(_EXPLAIN)}")
    model = request.app[READ_MODEL]
    await _require_explanation(request[ACCESS], kind, name, model)
    history = History(model.bus, model.clock)
    async with model.explanation_turn:
        recorded: list[Recorded] = []
        for stream in sorted({fact.stream() for fact in _EXPLANATORY}):
            facts = [fact for fact in _EXPLANATORY if fact.stream() == stream]
            async for batch in history.read(stream, facts):
                recorded += [stored.recorded for stored in batch]
        sentences = await asyncio.to_thread(explain_kind, recorded, name)
    if not sentences:
        raise Problem(
            HTTPStatus.NOT_FOUND, f"no {kind} with name or id {name!r} in the recorded facts; they may have expired"
        )
    now = await asyncio.to_thread(_LINE[kind], name, model.status_view())
    return answer(request, schema.Why(kind=kind, name=name, now=now, sentences=sentences))


async def _require_explanation(access: Access, kind: str, name: str, model: ReadModel) -> None:
    """Raise a 403 unless the caller may read the object. Names of jobs are those of any project, ids of one."""
    if await access.allows(READ_CLUSTER):
        return
    row = await model.store.job(JobId(name)) if kind == "job" else None
    if row is None:
        raise access.refusal(READ_CLUSTER)
    await access.require(READ_JOBS, row.spec.project_id)


_LINE: Mapping[str, Callable[[str, StatusView], str]] = {
    "node": node_line,
    "pod": pod_line,
    "job": job_line,
    "request": request_line,
}
_EXPLAIN: Mapping[str, Callable[[Sequence[Recorded], str], tuple[str, ...]]] = {
    "node": story.why_node,
    "pod": story.why_pod,
    "job": story.why_job,
    "request": story.why_request,
}
# Without telemetry, charges and heartbeats, which are most facts and explain nothing.
_HEARTBEATS = {
    JobListed, PodListed, PodWatched, PodBudgetListed, PodProvisioningListed, NodeListed, NodeWatched,
    NodeInstanceListed
}  # fmt: skip
_EXPLANATORY = tuple(
    fact
    for fact in FACTS
    if fact.domain() in {"job", "pod", "node", "spot", "demand", "scaling"} and fact not in _HEARTBEATS
)

ROUTES = (
    Route("GET", "/api/v1/status", status_handler, "cluster", schema.Status, (READ_CLUSTER,)),
    Route("GET", "/api/v1/nodes", nodes_handler, "cluster", schema.NodeList, (READ_CLUSTER,)),
    Route(
        "GET", "/api/v1/plans", plans_handler, "decisions", schema.PlanList, (READ_CLUSTER,), INVALID, query=PlansQuery
    ),
    Route("GET", "/api/v1/plans/{plan_id}", plan_handler, "decisions", schema.Plan, (READ_CLUSTER,), MISSING),
    Route("GET", "/api/v1/facts", facts_handler, "facts", schema.FactList, (READ_FACTS,), INVALID, query=FactsQuery),
    Route(
        "GET",
        "/api/v1/cost",
        cost_handler,
        "spend",
        schema.Cost,
        (READ_COSTS, READ_PROJECT_COSTS),
        INVALID,
        query=CostQuery,
    ),
    Route("GET", "/api/v1/why/{kind}/{name}", why_handler, "decisions", schema.Why, (READ_JOBS, READ_CLUSTER), MISSING),
)
