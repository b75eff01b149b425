"""Wishes for room over REST (S53): say one, and see what stands.

A wish is accepted (202) when the stream has acknowledged it. Of one source the last word counts, so saying it again is
harmless and needs no key.
"""

from http import HTTPStatus

import msgspec
from aiohttp import web

from gpu_autoscaler.core.reports import mistakes_of
from gpu_autoscaler.core.words.sentences import sentence
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler_services.gateway import wire
from gpu_autoscaler_services.gateway.api_jobs import BODY_PROBLEMS, read_body
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.reading import READ_MODEL
from gpu_autoscaler_services.gateway.routes import Route, answer

_DEMAND = "/api/v1/demand"


async def report_demand_handler(request: web.Request) -> web.Response:
    """Take a wish in."""
    model = request.app[READ_MODEL]
    wish = await read_body(request, DemandReported)
    if mistakes := mistakes_of(wish, model.clock.now()):
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the wish cannot be meant", mistakes=mistakes)
    await model.publish(wish)
    return answer(request, _told(wish, ""), status=HTTPStatus.ACCEPTED)


async def list_demand_handler(request: web.Request) -> web.Response:
    """Every wish that stands, by source."""
    model = request.app[READ_MODEL]
    as_of, planned = model.clock.now(), model.sight().planned
    items = []
    for source, record in sorted(model.view.state.reported_demand.items()):
        if as_of < record.reported.until:
            held = [planned[key] for key in planned if key.startswith(f"demand/{source}/")]
            items.append(_told(record.reported, sentence(held[0]) if held else ""))
    return answer(request, wire.DemandList(as_of=as_of, items=tuple(items)))


def _told(wish: DemandReported, message: str) -> wire.Demand:
    return wire.Demand(
        source=wish.source,
        shape=msgspec.to_builtins(wish.shape),
        count=wish.count,
        until=wish.until,
        priority=wish.priority,
        preemptible=wish.preemptible,
        note=wish.note,
        message=message,
    )


ROUTES = (
    Route(
        method="POST",
        path=_DEMAND,
        handler=report_demand_handler,
        summary="Say how much room is to be free for work to come",
        tag="demand",
        answers={HTTPStatus.ACCEPTED: wire.Demand},
        problems=(*BODY_PROBLEMS, HTTPStatus.SERVICE_UNAVAILABLE),
        body=DemandReported,
    ),
    Route(
        method="GET",
        path=_DEMAND,
        handler=list_demand_handler,
        summary="Wishes for room that stand",
        tag="demand",
        answers={HTTPStatus.OK: wire.DemandList},
    ),
)
