"""Plans over REST: the newest ones from memory, older ones from the store."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.core.deferred_groups import EXAMPLES_COUNT
from gpu_autoscaler.core.explain.names import Namer, names_in_state, reason_sentence
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model import decisions
from gpu_autoscaler.model.format import subject_kind
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.store.protocol import PlanRow
from gpu_autoscaler_services.api_rights import READ_CLUSTER
from gpu_autoscaler_services.gateway import schema
from gpu_autoscaler_services.gateway.paging import PageQuery, cursor_of, instant_key, instant_of, read_cursor
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.read_model import PLANS, READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.recent_facts import RING_COUNT_MAX
from gpu_autoscaler_services.gateway.routes import INVALID, MISSING, Route, answer, read_query

PLANS_COUNT_MAX = 500  # of a page: plans of large clusters are long
_ONE_MICROSECOND = timedelta(microseconds=1)


class PlansQuery(PageQuery, frozen=True, kw_only=True):
    """Query of plans."""

    after: Annotated[Instant | None, msgspec.Meta(description="Only plans made at this instant or later.")] = None
    before: Annotated[Instant | None, msgspec.Meta(description="Only plans made before this instant.")] = None
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=PLANS_COUNT_MAX, description="Maximum page size; a page may hold fewer.")
    ] = 50


async def list_plans_handler(request: web.Request) -> web.Response:
    """List plans, newest first: decisions and deferred actions, with reasons."""
    query = read_query(request, PlansQuery)
    model = request.app[READ_MODEL]
    sequences, rows = _remembered(model)
    found = await _wanted(query, model, rows)
    names = names_in_state(model.view.state)
    plans = tuple(_shown(row, names, sequences.get(row.fact.plan_id)) for row in found[: query.limit])
    next_cursor = cursor_of(_key(found[query.limit - 1])) if len(found) > query.limit else None
    return answer(request, schema.PlanList(items=plans, next_cursor=next_cursor))


async def show_plan_handler(request: web.Request) -> web.Response:
    """Show a plan."""
    plan_id = PlanId(request.match_info["plan_id"])
    model = request.app[READ_MODEL]
    sequences, rows = _remembered(model)
    row = next((row for row in rows if row.fact.plan_id == plan_id), None) or await model.store.plan(plan_id)
    if row is None:
        detail = f"plan {plan_id!r} is neither recent nor in the store; list plans with `GET /api/v1/plans`"
        raise Problem(HTTPStatus.NOT_FOUND, detail)
    return answer(request, _shown(row, names_in_state(model.view.state), sequences.get(plan_id)))


def _remembered(model: ReadModel) -> tuple[Mapping[str, int], list[PlanRow]]:
    """Return the sequences of the plans in memory, and these plans, newest first."""
    sequences: dict[str, int] = {}
    rows = []
    for entry in model.tail.recent(PLANS, RING_COUNT_MAX):
        if isinstance(fact := entry.recorded.fact, ScalingPlanMade):
            sequences[fact.plan_id] = entry.recorded.sequence
            rows.append(PlanRow(fact=fact, made_at=entry.recorded.envelope.time))
    return sequences, sorted(rows, key=_key, reverse=True)


async def _wanted(query: PlansQuery, model: ReadModel, remembered: list[PlanRow]) -> list[PlanRow]:
    """Return the page and, if there are more, one plan of the next page: of the store what memory does not hold."""
    cursor = None if query.cursor is None else read_cursor(query.cursor)

    def is_wanted(row: PlanRow) -> bool:
        return (
            (cursor is None or _key(row) < cursor)
            and (query.before is None or row.made_at < query.before)
            and (query.after is None or row.made_at >= query.after)
        )

    found = [row for row in remembered if is_wanted(row)]
    if len(found) > query.limit:
        return found
    # Plans of one microsecond differ by their ids, which the store does not sort by.
    ends = [row.made_at + _ONE_MICROSECOND for row in remembered[-1:]]
    ends += [] if query.before is None else [query.before]
    ends += [] if cursor is None else [instant_of(cursor) + _ONE_MICROSECOND]
    known = {row.fact.plan_id for row in remembered}
    count_max = query.limit + 3 - len(found)  # with a row of the next page, and the ones at both ends that are known
    page = await model.store.plans(made_before=min(ends, default=None), count_max=count_max)
    older = [row for row in page.rows if is_wanted(row) and row.fact.plan_id not in known]
    return [*found, *sorted(older, key=_key, reverse=True)]


def _key(row: PlanRow) -> str:
    return instant_key(row.made_at, row.fact.plan_id)


def _shown(row: PlanRow, names: Namer, sequence: int | None) -> schema.Plan:
    fact = row.fact
    groups = (*fact.plan.deferred_groups, *map(_upkeep_group, fact.plan.upkeep_deferred))
    return schema.Plan(
        plan_id=fact.plan_id,
        sequence=sequence,
        made_at=row.made_at,
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
        case (
            decisions.AnnounceIdleJob()
            | decisions.CancelIdleJob()
            | decisions.RequestJobCheckpoint()
            | decisions.RequestPreemptionCheckpoint()
            | decisions.RequeueJob()
        ):
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


ROUTES = (
    Route(
        "GET",
        "/api/v1/plans",
        list_plans_handler,
        "decisions",
        schema.PlanList,
        (READ_CLUSTER,),
        INVALID,
        query=PlansQuery,
    ),
    Route("GET", "/api/v1/plans/{plan_id}", show_plan_handler, "decisions", schema.Plan, (READ_CLUSTER,), MISSING),
)
