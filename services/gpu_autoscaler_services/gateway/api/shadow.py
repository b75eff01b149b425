"""Differences between the shadow policy and the active one over REST."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec.structs import replace

from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.model.decisions import Side
from gpu_autoscaler_services.api_rights import READ_SETTINGS
from gpu_autoscaler_services.gateway import schema
from gpu_autoscaler_services.gateway.paging import LIMIT_MAX, PageQuery, instant_key, page
from gpu_autoscaler_services.gateway.read_model import READ_MODEL
from gpu_autoscaler_services.gateway.recent_facts import RING_COUNT_MAX, Entry
from gpu_autoscaler_services.gateway.routes import INVALID, Route, answer, read_query
from gpu_autoscaler_services.gateway.subjects import SubjectFilter

_SHADOW = SubjectFilter([ShadowPlanMade.subject_root()])
_REAL = SubjectFilter([ScalingPlanMade.subject_root()])


class ShadowQuery(PageQuery, frozen=True, kw_only=True):
    """Query of the differences."""

    limit: Annotated[
        int, msgspec.Meta(ge=1, le=LIMIT_MAX, description="Maximum number of past differences of a page.")
    ] = 10


async def compare_shadow_handler(request: web.Request) -> web.Response:
    """Show where the shadow policy decides differently from the active one."""
    query, model = read_query(request, ShadowQuery), request.app[READ_MODEL]
    facts = [
        fact
        for entry in reversed(model.tail.recent(_SHADOW, RING_COUNT_MAX))
        if isinstance(fact := entry.recorded.fact, ShadowPlanMade)
    ]
    latest = facts[-1] if facts else None
    current, past = _differences(facts)
    earlier, next_cursor = page(past, _key, query, is_descending=True)
    return answer(
        request,
        schema.Shadow(
            as_of=model.clock.now(),
            changed_at=None if latest is None else latest.plan.as_of,
            policy_digest=None if latest is None else latest.policy_digest,
            real_policy_digest=None if latest is None else latest.real_policy_digest,
            is_compared_with_scaler=None if latest is None else _is_active_policy(latest, model.tail.recent(_REAL, 1)),
            now=tuple(current),
            earlier=earlier,
            next_cursor=next_cursor,
        ),
    )


def _differences(
    facts: Sequence[ShadowPlanMade],
) -> tuple[list[schema.ShadowDifference], list[schema.ShadowDifference]]:
    """Return current differences, and past ones newest first, each once with its first and last occurrence."""
    current: dict[tuple[str, str], schema.ShadowDifference] = {}
    past: list[schema.ShadowDifference] = []
    for fact in facts:
        by_key = {(difference.subject, difference.kind): difference for difference in fact.differences}
        past += [replace(current.pop(key), until_at=fact.plan.as_of) for key in tuple(current) if key not in by_key]
        for key, difference in by_key.items():
            since_at = current[key].since_at if key in current else fact.plan.as_of
            current[key] = schema.ShadowDifference(
                subject=difference.subject,
                name=difference.name,
                since_at=since_at,
                until_at=None,
                real=_side(difference.made),
                shadow=_side(difference.other),
            )
    return list(current.values()), past[::-1]


def _is_active_policy(latest: ShadowPlanMade, real: Sequence[Entry]) -> bool | None:
    for entry in real:
        if isinstance(entry.recorded.fact, ScalingPlanMade):
            return entry.recorded.fact.policy_digest == latest.real_policy_digest
    return None


def _key(difference: schema.ShadowDifference) -> str:
    """Return the key of a past difference: its end, then what it is about."""
    assert difference.until_at is not None, "it is past"  # noqa: S101 - a bug of ours
    return instant_key(difference.until_at, f"{difference.subject}/{difference.real.outcome}/{difference.since_at}")


def _side(side: Side) -> schema.ShadowSide:
    return schema.ShadowSide(outcome=side.what, reason=side.reason, sentence=side.sentence)


ROUTES = (
    Route(
        "GET",
        "/api/v1/shadow",
        compare_shadow_handler,
        "decisions",
        schema.Shadow,
        (READ_SETTINGS,),
        INVALID,
        query=ShadowQuery,
    ),
)
