"""What a policy in shadow would decide otherwise, as the shadow says it."""

from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.model.decisions import Side
from gpu_autoscaler_services.gateway import wire
from gpu_autoscaler_services.gateway.reading import READ_MODEL
from gpu_autoscaler_services.gateway.routes import Route, answer, read_query
from gpu_autoscaler_services.gateway.subjects import SubjectFilter
from gpu_autoscaler_services.gateway.tail import RING_COUNT_MAX, Entry

LIMIT_DEFAULT = 10
_SHADOW = SubjectFilter([ShadowPlanMade.subject_root()])
_REAL = SubjectFilter([ScalingPlanMade.subject_root()])


class ShadowQuery(msgspec.Struct, frozen=True, kw_only=True):
    """How much of its past."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=RING_COUNT_MAX, description="How many at most, newest first.")] = (
        LIMIT_DEFAULT
    )


async def shadow_handler(request: web.Request) -> web.Response:
    """Where the policy in shadow differs now, and where it did before."""
    query, model = read_query(request, ShadowQuery), request.app[READ_MODEL]
    said = [(entry, _fact(entry)) for entry in model.tail.recent(_SHADOW, query.limit)]
    latest = said[0][1] if said else None
    return answer(
        request,
        wire.Shadow(
            as_of=model.clock.now(),
            policy_digest=None if latest is None else latest.policy_digest,
            real_policy_digest=None if latest is None else latest.real_policy_digest,
            is_compared_with_scaler=None if latest is None else _is_in_force(latest, model.tail.recent(_REAL, 1)),
            items=tuple(_plan(entry, fact) for entry, fact in said),
        ),
    )


def _fact(entry: Entry) -> ShadowPlanMade:
    fact = entry.recorded.fact
    assert isinstance(fact, ShadowPlanMade), f"{entry.place} is on the subject of shadow plans"  # noqa: S101 - our bug
    return fact


def _is_in_force(latest: ShadowPlanMade, real: list[Entry]) -> bool | None:
    for entry in real:
        if isinstance(entry.recorded.fact, ScalingPlanMade):
            return entry.recorded.fact.policy_digest == latest.real_policy_digest
    return None


def _plan(entry: Entry, fact: ShadowPlanMade) -> wire.ShadowPlan:
    return wire.ShadowPlan(
        plan_id=fact.plan_id,
        sequence=entry.recorded.sequence,
        as_of=fact.plan.as_of,
        differences=tuple(
            wire.ShadowDifference(subject=one.subject, name=one.name, real=_side(one.made), shadow=_side(one.other))
            for one in fact.differences
        ),
    )


def _side(side: Side) -> wire.ShadowSide:
    return wire.ShadowSide(what=side.what, reason=side.reason, sentence=side.sentence)


ROUTES = (
    Route(
        method="GET",
        path="/api/v1/shadow",
        handler=shadow_handler,
        summary="Where a policy in shadow decides otherwise than the one in force",
        tag="decisions",
        answers={HTTPStatus.OK: wire.Shadow},
        problems=(HTTPStatus.UNPROCESSABLE_ENTITY,),
        query=ShadowQuery,
    ),
)
