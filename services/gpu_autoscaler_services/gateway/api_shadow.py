"""What a policy in shadow would decide otherwise, as the shadow says it."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec.structs import replace

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
    """How much of what is over."""

    limit: Annotated[
        int,
        msgspec.Meta(ge=0, le=RING_COUNT_MAX, description="How many of the differences that are over, newest first."),
    ] = LIMIT_DEFAULT


async def shadow_handler(request: web.Request) -> web.Response:
    """Where the policy in shadow differs now, and where it did before."""
    query, model = read_query(request, ShadowQuery), request.app[READ_MODEL]
    said = [
        fact
        for entry in reversed(model.tail.recent(_SHADOW, RING_COUNT_MAX))
        if isinstance(fact := entry.recorded.fact, ShadowPlanMade)
    ]
    latest = said[-1] if said else None
    standing, over = _told(said)
    return answer(
        request,
        wire.Shadow(
            as_of=model.clock.now(),
            said_at=None if latest is None else latest.plan.as_of,
            policy_digest=None if latest is None else latest.policy_digest,
            real_policy_digest=None if latest is None else latest.real_policy_digest,
            is_compared_with_scaler=None if latest is None else _is_in_force(latest, model.tail.recent(_REAL, 1)),
            now=tuple(standing),
            earlier=tuple(over[: query.limit]),
        ),
    )


def _told(said: Sequence[ShadowPlanMade]) -> tuple[list[wire.ShadowDifference], list[wire.ShadowDifference]]:
    """What stands, and what is over with the newest first: each difference once, from its first word to its last."""
    standing: dict[tuple[str, str], wire.ShadowDifference] = {}
    over: list[wire.ShadowDifference] = []
    for fact in said:
        named = {(one.subject, one.kind): one for one in fact.differences}
        over += [replace(standing.pop(key), until_at=fact.plan.as_of) for key in tuple(standing) if key not in named]
        for key, one in named.items():
            since_at = standing[key].since_at if key in standing else fact.plan.as_of
            standing[key] = wire.ShadowDifference(
                subject=one.subject,
                name=one.name,
                since_at=since_at,
                until_at=None,
                real=_side(one.made),
                shadow=_side(one.other),
            )
    return list(standing.values()), over[::-1]


def _is_in_force(latest: ShadowPlanMade, real: Sequence[Entry]) -> bool | None:
    for entry in real:
        if isinstance(entry.recorded.fact, ScalingPlanMade):
            return entry.recorded.fact.policy_digest == latest.real_policy_digest
    return None


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
