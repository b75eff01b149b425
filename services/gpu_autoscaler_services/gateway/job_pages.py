"""Lists of jobs, page by page. Jobs that live come from memory, all others from the store of record."""

import base64
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated

import msgspec

from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.views import job_states
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import FINAL_STATES, JobSpec, JobState, Mistake
from gpu_autoscaler.store.protocol import JobRow
from gpu_autoscaler_services.gateway import outlook, wire
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.reading import ReadModel

PAGE_COUNT_DEFAULT = 100
PAGE_COUNT_MAX = 500
PAGES_READ_MAX = 10  # of the store for one answer: a rare state may need a second request


class JobsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs, and how many."""

    state: Annotated[
        tuple[JobState, ...], msgspec.Meta(description="Only jobs in this state; may be repeated. Default: all.")
    ] = ()
    project_id: Annotated[str | None, msgspec.Meta(description="Only jobs of this project.")] = None
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=PAGE_COUNT_MAX, description="How many at most; a page may hold fewer.")
    ] = PAGE_COUNT_DEFAULT
    cursor: Annotated[str | None, msgspec.Meta(description="`next_cursor` of the page before.")] = None


async def job_page(query: JobsQuery, model: ReadModel) -> wire.JobPage:
    """The page that the query asks for."""
    scene = outlook.Scene.of(model.view.state, model.policy, model.clock.now())
    if not query.state or FINAL_STATES.intersection(query.state):
        specs, cursor = await _stored(query, model, scene.state)
    else:
        specs, cursor = _living(query, scene.state)
    sight = model.sight()
    items = tuple(outlook.job(spec, status, scene, sight) for spec, status in specs)
    return wire.JobPage(items=items, next_cursor=cursor)


Found = tuple[list[tuple[JobSpec, JobState]], str | None]


def _living(query: JobsQuery, state: ClusterState) -> Found:
    """From memory: every job that has not ended is there. The cursor names the last one that was shown."""
    states = job_states(state)
    living = [
        (record.queued.spec, states[job_id])
        for job_id, record in state.jobs.items()
        if record.queued is not None
        and states.get(job_id) in query.state
        and query.project_id in {None, record.queued.spec.project_id}
    ]
    living.sort(key=lambda found: (found[0].requested_at, found[0].job_id), reverse=True)
    if query.cursor is not None:
        after = _read_cursor(query.cursor)
        living = [found for found in living if _mark(found[0]) < after]
    page = living[: query.limit]
    has_more = len(living) > len(page)
    return page, _cursor(_mark(page[-1][0])) if has_more else None


async def _stored(query: JobsQuery, model: ReadModel, state: ClusterState) -> Found:
    found: list[tuple[JobSpec, JobState]] = []
    states = job_states(state)
    cursor = None if query.cursor is None else _read_cursor(query.cursor)
    for _ in range(PAGES_READ_MAX):
        try:
            page = await model.store.jobs(
                project_id=query.project_id, cursor=cursor, count_max=query.limit - len(found)
            )
        except ValueError as error:
            raise _bad_cursor() from error
        for row in page.rows:
            status = _status(row, states)
            if not query.state or status in query.state:
                found.append((row.spec, status))
        cursor = page.next_cursor
        if cursor is None or len(found) >= query.limit:
            break
    return found, None if cursor is None else _cursor(cursor)


def _status(row: JobRow, states: Mapping[JobId, JobState]) -> JobState:
    if row.outcome is not None:
        return JobState(row.outcome)
    return states.get(row.spec.job_id, JobState.PENDING)


def _mark(spec: JobSpec) -> str:
    """Sorts as jobs do: by the instant of the request, then by id."""
    return f"{int(spec.requested_at.timestamp() * 1_000_000):020d}/{spec.job_id}"


def _cursor(mark: str) -> str:
    return base64.urlsafe_b64encode(mark.encode()).decode().rstrip("=")


def _read_cursor(cursor: str) -> str:
    try:
        return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except ValueError as error:
        raise _bad_cursor() from error


def _bad_cursor() -> Problem:
    mistake = Mistake("cursor", "is none that was given out here; start again without one")
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the page cannot be found", mistakes=(mistake,))
