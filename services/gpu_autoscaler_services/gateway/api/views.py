"""Views over REST: status, nodes, facts, cost, why."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.core.explain import story
from gpu_autoscaler.core.explain.status import StatusView, job_line, node_line, pod_line, request_line
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobListed
from gpu_autoscaler.events.node import NodeInstanceListed, NodeListed, NodeWatched
from gpu_autoscaler.events.pod import PodBudgetListed, PodListed, PodProvisioningListed, PodWatched
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.lease import holder_of
from gpu_autoscaler_services.api_rights import READ_CLUSTER, READ_COSTS, READ_FACTS, READ_JOBS, READ_PROJECT_COSTS
from gpu_autoscaler_services.gateway import schema, status_views
from gpu_autoscaler_services.gateway.access import ACCESS, Access
from gpu_autoscaler_services.gateway.api.directives import active_directives
from gpu_autoscaler_services.gateway.cost_history import page_end
from gpu_autoscaler_services.gateway.env_values import encoded_event, require_env_values
from gpu_autoscaler_services.gateway.ledger import DAYS_COUNT_MAX
from gpu_autoscaler_services.gateway.paging import PageQuery, instant_key, page
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.read_model import READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.routes import INVALID, MISSING, Route, answer, read_query
from gpu_autoscaler_services.gateway.subjects import SubjectFilter

ACTIVE_SECONDS_MAX = 0.5  # wall time that the status waits for the broker's lease record
HOUR_SECONDS = 3600
ADDING_RETRY_SECONDS = 2.0  # reading a month of charges takes seconds to a minute


class NodesQuery(PageQuery, frozen=True, kw_only=True):
    """Query of nodes."""

    phase: Annotated[tuple[NodePhase, ...], msgspec.Meta(description="Only nodes in this phase; repeatable.")] = ()
    pool: Annotated[str | None, msgspec.Meta(description="Only nodes of this pool.")] = None
    zone: Annotated[str | None, msgspec.Meta(description="Only nodes in this zone.")] = None
    instance_type: Annotated[str | None, msgspec.Meta(description="Only nodes of this instance type.")] = None
    capacity_type: Annotated[CapacityType | None, msgspec.Meta(description="Only nodes of this capacity type.")] = None
    gpu_model: Annotated[str | None, msgspec.Meta(description="Only nodes with this GPU model.")] = None

    def wants(self, view: NodeView) -> bool:
        """Return whether the node is wanted."""
        return (
            (not self.phase or view.phase in self.phase)
            and self.pool in {None, view.pool}
            and self.zone in {None, view.zone}
            and self.instance_type in {None, view.instance_type}
            and self.capacity_type in {None, view.capacity_type}
            and self.gpu_model in {None, view.gpu_model}
        )


class FactsQuery(PageQuery, frozen=True, kw_only=True):
    """Query of facts."""

    subject: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="Subject filter with NATS wildcards, e.g. scaling.>; repeatable. Default: all."),
    ] = ()
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
    days: Annotated[int, msgspec.Meta(ge=1, le=DAYS_COUNT_MAX, description="Maximum number of days of a page.")] = (
        DAYS_COUNT_MAX
    )
    cursor: Annotated[str | None, msgspec.Meta(description="`next_cursor` of the previous page.")] = None
    project_id: Annotated[
        str | None, msgspec.Meta(description="Only the spend of this project, in spans of UTC days.")
    ] = None


async def show_status_handler(request: web.Request) -> web.Response:
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


async def list_nodes_handler(request: web.Request) -> web.Response:
    """List nodes, from order to termination."""
    query, model = read_query(request, NodesQuery), request.app[READ_MODEL]
    as_of = model.clock.now()
    age_seconds_max = model.policy.utilization.telemetry_age_seconds_max
    wanted = filter(query.wants, node_views(model.view.state, as_of))
    views, next_cursor = page(wanted, lambda view: f"{view.name}/{view.action_id or view.provider_id}", query)
    items = status_views.nodes(views, model.view.state, as_of, age_seconds_max)
    return answer(request, schema.NodeList(as_of=as_of, items=items, next_cursor=next_cursor))


async def list_facts_handler(request: web.Request) -> web.Response:
    """List recent facts, newest first: of each stream the last 500, as far as memory holds them."""
    query = read_query(request, FactsQuery)
    model = request.app[READ_MODEL]
    recent = model.tail.recent(SubjectFilter(query.subject))
    entries, next_cursor = page(
        recent,
        lambda entry: instant_key(entry.stored_at, f"{entry.recorded.stream}/{entry.recorded.sequence:020d}"),
        query,
        is_descending=True,
    )
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
            ),
            next_cursor=next_cursor,
        ),
    )


async def show_cost_handler(request: web.Request) -> web.Response:
    """Show spend by time and by project."""
    query, model = read_query(request, CostQuery), request.app[READ_MODEL]
    await _require_costs(request[ACCESS], query.project_id)
    if not model.tail.has_read(CostAccrued.stream()):
        detail = "charges are still being read and the sum would be incomplete; retry in a few seconds"
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after_seconds=ADDING_RETRY_SECONDS)
    before = query.before if query.cursor is None else page_end(query.cursor)
    async with model.cost_turn:
        cost = await model.cost_history.cost(
            query.span_seconds, before=before, days_count=query.days, project_id=query.project_id
        )
    return answer(request, cost)


async def _require_costs(access: Access, project_id: str | None) -> None:
    """Raise a 403 unless the caller may read all spend, or that of the project."""
    if project_id is None:
        await access.require(READ_COSTS)
    elif not await access.allows(READ_COSTS):
        await access.require(READ_PROJECT_COSTS, project_id)


async def explain_handler(request: web.Request) -> web.Response:
    """Explain a node, pod or job back to its first cause."""
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
            HTTPStatus.NOT_FOUND,
            f"no {kind} with name or id {name!r} in the recorded facts, which may have expired; list them with: "
            f"{_LISTS[kind]}",
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
_LISTS = {
    "node": "gpu-autoscaler nodes",
    "pod": "kubectl get pods -A, and name one as NAMESPACE/NAME",
    "job": "gpu-autoscaler jobs list",
    "request": "kubectl get provisioningrequests -A, and name one as NAMESPACE/NAME",
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
    Route("GET", "/api/v1/status", show_status_handler, "cluster", schema.Status, (READ_CLUSTER,)),
    Route(
        "GET",
        "/api/v1/nodes",
        list_nodes_handler,
        "cluster",
        schema.NodeList,
        (READ_CLUSTER,),
        INVALID,
        query=NodesQuery,
    ),
    Route(
        "GET", "/api/v1/facts", list_facts_handler, "facts", schema.FactList, (READ_FACTS,), INVALID, query=FactsQuery
    ),
    Route(
        "GET",
        "/api/v1/cost",
        show_cost_handler,
        "spend",
        schema.Cost,
        (READ_COSTS, READ_PROJECT_COSTS),
        INVALID,
        query=CostQuery,
    ),
    Route(
        "GET", "/api/v1/why/{kind}/{name}", explain_handler, "decisions", schema.Why, (READ_JOBS, READ_CLUSTER), MISSING
    ),
)
