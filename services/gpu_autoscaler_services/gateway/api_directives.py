"""What people overrule for a while, over REST: a freeze, a pause of one pool, an override; and taking it back.

A word is accepted (202) when the stream has acknowledged it. Of one key the last word counts, so saying it again is
harmless and needs no key.
"""

from http import HTTPStatus

import msgspec
from aiohttp import web

from gpu_autoscaler.core.directives import mistakes_of, active_facts
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.model.directives import AnyDirective
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler_services.gateway import wire
from gpu_autoscaler_services.gateway.api_jobs import BODY_PROBLEMS, read_body
from gpu_autoscaler_services.gateway.auth import CALLER
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.reading import READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.routes import Route, answer, read_query

NOBODY = "somebody on the gateway's machine"  # who is asked for no token can only be there
_DIRECTIVES = "/api/v1/directives"
_ONE = f"{_DIRECTIVES}/{{key}}"


class DirectiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to hold, why, and until when."""

    directive: AnyDirective
    reason: str
    until: Instant
    given_by: str = ""  # a name for people; where callers are asked who they are, that is taken instead


class LiftQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Why, and by whom."""

    reason: str = ""
    lifted_by: str = ""


async def give_directive_handler(request: web.Request) -> web.Response:
    """Overrule the policy for a while."""
    model = request.app[READ_MODEL]
    asked = await read_body(request, DirectiveRequest)
    given = PolicyDirectiveGiven(
        directive=asked.directive,
        reason=asked.reason.strip(),
        given_by=request.get(CALLER) or asked.given_by.strip() or NOBODY,
        given_at=model.clock.now(),
        until=asked.until,
    )
    if mistakes := mistakes_of(given, [pool.name for pool in model.policy.pools]):
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the directive cannot be meant", mistakes=mistakes)
    await model.publish(given)
    return answer(request, told(given), status=HTTPStatus.ACCEPTED)


async def list_directives_handler(request: web.Request) -> web.Response:
    """Everything that is in force now, by key."""
    model = request.app[READ_MODEL]
    return answer(request, wire.DirectiveList(as_of=model.clock.now(), items=in_force_now(model)))


async def lift_directive_handler(request: web.Request) -> web.Response:
    """Take a word back. The freeze ends, the pool goes on, the policy's own bounds hold again."""
    model, query = request.app[READ_MODEL], read_query(request, LiftQuery)
    key = request.match_info["key"]
    found = {each.key: each for each in in_force_now(model)}
    if key not in found:
        there = f"there are: {', '.join(found)}" if found else "there are none"
        raise Problem(HTTPStatus.NOT_FOUND, f"no directive {key!r} is in force; {there}")
    lifted_by = request.get(CALLER) or query.lifted_by.strip() or NOBODY
    fact = PolicyDirectiveLifted(key=key, lifted_by=lifted_by, lifted_at=model.clock.now(), reason=query.reason)
    await model.publish(fact)
    return answer(request, found[key], status=HTTPStatus.ACCEPTED)


def in_force_now(model: ReadModel) -> tuple[wire.Directive, ...]:
    """What overrules the policy now, by key."""
    return tuple(told(each) for each in active_facts(model.view.state.directives.values(), model.clock.now()))


def told(given: PolicyDirectiveGiven) -> wire.Directive:
    """A word as people see it."""
    return wire.Directive(
        key=given.directive.key,
        directive=msgspec.to_builtins(given.directive),
        reason=given.reason,
        given_by=given.given_by,
        given_at=given.given_at,
        until=given.until,
    )


ROUTES = (
    Route(
        method="POST",
        path=_DIRECTIVES,
        handler=give_directive_handler,
        summary="Overrule the policy for a while: freeze, pause a pool, at least or at most so many nodes or GPUs",
        tag="directives",
        answers={HTTPStatus.ACCEPTED: wire.Directive},
        problems=(*BODY_PROBLEMS, HTTPStatus.SERVICE_UNAVAILABLE),
        body=DirectiveRequest,
    ),
    Route(
        method="GET",
        path=_DIRECTIVES,
        handler=list_directives_handler,
        summary="What overrules the policy now, who said so, and until when",
        tag="directives",
        answers={HTTPStatus.OK: wire.DirectiveList},
    ),
    Route(
        method="DELETE",
        path=_ONE,
        handler=lift_directive_handler,
        summary="Take a directive back before its time is over",
        tag="directives",
        answers={HTTPStatus.ACCEPTED: wire.Directive},
        problems=(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
        query=LiftQuery,
    ),
)
