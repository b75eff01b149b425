"""Directives over REST: freeze, pause a pool, override limits, and end a directive early.

A directive is accepted (202) when the stream has acknowledged it. It replaces the previous one of its key, so repeating
it is harmless and needs no Idempotency-Key.
"""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from gpu_autoscaler.core.intake.directives import active_facts, violations_of
from gpu_autoscaler.core.state.forced_removals import tripped_brake
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.model.directives import BRAKE, PERMANENT, AnyDirective, Freeze, Override, PausePool
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped
from gpu_autoscaler_services.api_rights import FREEZE, OVERRIDE, PAUSE, READ_DIRECTIVES, RESUME, ApiRight
from gpu_autoscaler_services.gateway import schema
from gpu_autoscaler_services.gateway.access import ACCESS
from gpu_autoscaler_services.gateway.api.jobs import BODY_PROBLEMS, read_body
from gpu_autoscaler_services.gateway.audit import ACT, Act
from gpu_autoscaler_services.gateway.paging import PageQuery, page
from gpu_autoscaler_services.gateway.problems import Problem, rule_violated
from gpu_autoscaler_services.gateway.read_model import READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.routes import EXAMPLE_END, INVALID, MISSING, Route, answer, read_query

LOCAL_USER = "a user on the gateway's machine"  # without tokens the gateway listens on loopback only
_DIRECTIVES = "/api/v1/directives"
_ONE = f"{_DIRECTIVES}/{{key}}"
_RIGHTS: Mapping[type, ApiRight] = {Freeze: FREEZE, PausePool: PAUSE, Override: OVERRIDE}


class DirectiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A directive with its reason and end."""

    directive: AnyDirective
    reason: str
    until: Instant
    given_by: str = ""  # shown to people; an authenticated caller's name replaces it


class LiftQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Why the directive ends, and who ends it."""

    reason: str = ""
    lifted_by: str = ""


async def give_directive_handler(request: web.Request) -> web.Response:
    """Override the policy temporarily: freeze, pause a pool, or set a minimum or maximum of nodes or GPUs."""
    model = request.app[READ_MODEL]
    body = await read_body(request, DirectiveRequest)
    tag, key = str(body.directive.__struct_config__.tag), body.directive.key
    request[ACT] = Act(verb=tag, object=f"directive/{key}", claimed_who=body.given_by)
    await request[ACCESS].require(_RIGHTS[type(body.directive)])
    given = PolicyDirectiveGiven(
        directive=body.directive,
        reason=body.reason.strip(),
        given_by=request[ACCESS].name or body.given_by.strip() or LOCAL_USER,
        given_at=model.clock.now(),
        until=body.until,
    )
    if violations := violations_of(given, [pool.name for pool in model.policy.pools]):
        raise rule_violated("invalid directive: correct the fields listed in violations", *violations)
    await model.publish(given, request[ACCESS])
    return answer(request, directive_of(given), status=HTTPStatus.ACCEPTED)


async def list_directives_handler(request: web.Request) -> web.Response:
    """List active directives: who set each, why, and until when; also the brake, while it holds forced removals."""
    query, model = read_query(request, PageQuery), request.app[READ_MODEL]
    items, next_cursor = page(active_directives(model), lambda directive: directive.key, query)
    return answer(request, schema.DirectiveList(as_of=model.clock.now(), items=items, next_cursor=next_cursor))


async def lift_directive_handler(request: web.Request) -> web.Response:
    """End a directive early. The key `brake` resumes forced removals after the brake has tripped."""
    model, query = request.app[READ_MODEL], read_query(request, LiftQuery)
    key = request.match_info["key"]
    directives = {directive.key: directive for directive in active_directives(model)}
    if key not in directives:
        active = f"active: {', '.join(directives)}" if directives else "there are none"
        raise Problem(HTTPStatus.NOT_FOUND, f"no active directive {key!r}; {active}")
    lifted_by = request[ACCESS].name or query.lifted_by.strip() or LOCAL_USER
    fact = PolicyDirectiveLifted(
        key=key,
        lifted_by=lifted_by,
        lifted_at=model.clock.now(),
        reason=query.reason,
        tripped_at=directives[key].given_at if key == BRAKE else None,
    )
    await model.publish(fact, request[ACCESS])
    return answer(request, directives[key], status=HTTPStatus.ACCEPTED)


def active_directives(model: ReadModel) -> tuple[schema.Directive, ...]:
    """Return the trip of the brake, then active directives, ordered by key."""
    state = model.view.state
    given = tuple(directive_of(fact) for fact in active_facts(state.directives.values(), model.clock.now()))
    brake = tripped_brake(state)
    return given if brake is None else (_brake(brake), *given)


def _brake(trip: BrakeTripped) -> schema.Directive:
    return schema.Directive(
        key=BRAKE,
        directive={"directive": BRAKE},
        reason=f"{trip.sentence()} {trip.remedy()}",
        given_by="the scaler",
        given_at=trip.tripped_at,
        until=PERMANENT,
    )


def directive_of(given: PolicyDirectiveGiven) -> schema.Directive:
    """Return a directive as it is shown."""
    return schema.Directive(
        key=given.directive.key,
        directive=msgspec.to_builtins(given.directive),
        reason=given.reason,
        given_by=given.given_by,
        given_at=given.given_at,
        until=given.until,
    )


ROUTES = (
    Route(
        "POST",
        _DIRECTIVES,
        give_directive_handler,
        "directives",
        schema.Directive,
        tuple(_RIGHTS.values()),
        BODY_PROBLEMS,
        body=DirectiveRequest,
        example={"directive": {"directive": "freeze"}, "reason": "maintenance", "until": EXAMPLE_END},
    ),
    Route(
        "GET",
        _DIRECTIVES,
        list_directives_handler,
        "directives",
        schema.DirectiveList,
        (READ_DIRECTIVES,),
        INVALID,
        query=PageQuery,
    ),
    Route(
        "DELETE",
        _ONE,
        lift_directive_handler,
        "directives",
        schema.Directive,
        (RESUME,),
        (*MISSING, *INVALID),
        query=LiftQuery,
    ),
)
