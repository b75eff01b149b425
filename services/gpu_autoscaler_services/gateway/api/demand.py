"""Reported demand over REST: report it, and list active reports.

A report is accepted (202) when the stream has acknowledged it. A report replaces the previous one of its source, so
repeating it is harmless and needs no Idempotency-Key.
"""

from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.core.intake.reported_demand import violations_of
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler_services.api_rights import READ_DEMAND, REPORT_DEMAND
from gpu_autoscaler_services.gateway import schema
from gpu_autoscaler_services.gateway.access import ACCESS
from gpu_autoscaler_services.gateway.api.jobs import BODY_PROBLEMS, read_body
from gpu_autoscaler_services.gateway.audit import ACT, Act
from gpu_autoscaler_services.gateway.paging import PageQuery, page
from gpu_autoscaler_services.gateway.problems import rule_violated
from gpu_autoscaler_services.gateway.read_model import READ_MODEL
from gpu_autoscaler_services.gateway.routes import EXAMPLE_END, INVALID, Route, answer, read_query

_DEMAND = "/api/v1/demand"


class DemandQuery(PageQuery, frozen=True, kw_only=True):
    """Query of demand reports."""

    source: Annotated[str | None, msgspec.Meta(description="Only the report of this source.")] = None


async def report_demand_handler(request: web.Request) -> web.Response:
    """Report demand, so that capacity is free for work that is about to arrive."""
    model = request.app[READ_MODEL]
    report = await read_body(request, DemandReported)
    request[ACT] = Act(verb="report", object=f"demand/{report.source}")
    if violations := violations_of(report, model.clock.now()):
        raise rule_violated("invalid demand report: correct the fields listed in violations", *violations)
    await model.publish(report, request[ACCESS])
    return answer(request, _demand(report, ""), status=HTTPStatus.ACCEPTED)


async def list_demand_handler(request: web.Request) -> web.Response:
    """List active demand reports."""
    query, model = read_query(request, DemandQuery), request.app[READ_MODEL]
    as_of, planned = model.clock.now(), model.status_view().planned
    active = (
        record.reported
        for source, record in model.view.state.reported_demand.items()
        if as_of < record.reported.until and query.source in {None, source}
    )
    reports, next_cursor = page(active, lambda report: report.source, query)
    items = []
    for report in reports:
        reasons = [planned[key] for key in planned if key.startswith(f"demand/{report.source}/")]
        items.append(_demand(report, reasons[0].sentence() if reasons else ""))
    return answer(request, schema.DemandList(as_of=as_of, items=tuple(items), next_cursor=next_cursor))


def _demand(report: DemandReported, message: str) -> schema.Demand:
    return schema.Demand(
        source=report.source,
        shape=msgspec.to_builtins(report.shape),
        count=report.count,
        until=report.until,
        priority=report.priority,
        preemptible=report.preemptible,
        note=report.note,
        message=message,
    )


ROUTES = (
    Route(
        "POST",
        _DEMAND,
        report_demand_handler,
        "demand",
        schema.Demand,
        (REPORT_DEMAND,),
        BODY_PROBLEMS,
        body=DemandReported,
        example={"source": "kafka-lag", "shape": {"gpu_count": 1}, "count": 3, "until": EXAMPLE_END},
    ),
    Route("GET", _DEMAND, list_demand_handler, "demand", schema.DemandList, (READ_DEMAND,), INVALID, query=DemandQuery),
)
