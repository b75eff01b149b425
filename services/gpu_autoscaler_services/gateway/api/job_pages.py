"""Pages of jobs. Jobs that have not ended come from memory, all others from the store."""

import base64
from datetime import timedelta
from typing import Annotated

import msgspec

from gpu_autoscaler.core.state.queries import job_states
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.jobs import FINAL_STATES, JobSpec, JobState, Violation
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.store.protocol import JobFilter
from gpu_autoscaler_services.gateway import estimates, schema
from gpu_autoscaler_services.gateway.problems import Problem, invalid
from gpu_autoscaler_services.gateway.read_model import ReadModel

PAGE_COUNT_DEFAULT = 100
PAGE_COUNT_MAX = 500
ACCEPTANCE_MAX = timedelta(days=1)  # from a job's creation to its row
PAGES_READ_MAX = 10  # of the store per answer; a rare state may need further requests


class JobsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query of the job list."""

    state: Annotated[
        tuple[JobState, ...], msgspec.Meta(description="Only jobs in this state; repeatable. Default: all.")
    ] = ()
    project_id: Annotated[str | None, msgspec.Meta(description="Only jobs of this project.")] = None
    job_name: Annotated[str | None, msgspec.Meta(description="Only jobs of this name.")] = None
    created_after: Annotated[
        Instant | None, msgspec.Meta(description="Only jobs created at this instant or later.")
    ] = None
    created_before: Annotated[Instant | None, msgspec.Meta(description="Only jobs created before this instant.")] = None
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=PAGE_COUNT_MAX, description="Maximum page size; a page may hold fewer.")
    ] = PAGE_COUNT_DEFAULT
    cursor: Annotated[str | None, msgspec.Meta(description="`next_cursor` of the previous page.")] = None

    def wants(self, spec: JobSpec, status: JobState) -> bool:
        """Return whether a job is wanted."""
        return (
            (not self.state or status in self.state)
            and self.project_id in {None, spec.project_id}
            and self.job_name in {None, spec.job_name}
            and (self.created_after is None or spec.requested_at >= self.created_after)
            and (self.created_before is None or spec.requested_at < self.created_before)
        )

    def of_store(self) -> JobFilter:
        """Return what the store can leave out: it does not know the states before the final one, and a job may be
        accepted some time after it was created."""
        before = self.created_before
        return JobFilter(
            project_id=self.project_id,
            job_name=self.job_name,
            outcomes=tuple(map(str, self.state)) if FINAL_STATES.issuperset(self.state) else (),  # type: ignore[arg-type]  # outcomes are the final states
            accepted_from=self.created_after,
            accepted_before=None if before is None else before + ACCEPTANCE_MAX,
        )


async def job_page(query: JobsQuery, model: ReadModel) -> schema.JobPage:
    """Return the page for the query."""
    scene = estimates.Scene.of(model.view.state, model.policy, model.clock.now())
    if not query.state or FINAL_STATES.intersection(query.state):
        specs, cursor = await _stored(query, model, scene.state)
    else:
        specs, cursor = _active(query, scene.state)
    status_view = model.status_view()
    items = tuple(estimates.job(spec, status, scene, status_view) for spec, status in specs)
    return schema.JobPage(items=items, next_cursor=cursor)


Page = tuple[list[tuple[JobSpec, JobState]], str | None]


def _active(query: JobsQuery, state: ClusterState) -> Page:
    """Return jobs from memory, which holds every job that has not ended. The cursor names the last one shown."""
    states = job_states(state)
    active = [
        (record.queued.spec, states[job_id])
        for job_id, record in state.jobs.items()
        if record.queued is not None and job_id in states and query.wants(record.queued.spec, states[job_id])
    ]
    active.sort(key=lambda item: (item[0].requested_at, item[0].job_id), reverse=True)
    if query.cursor is not None:
        after = _read_cursor(query.cursor)
        active = [item for item in active if _mark(item[0]) < after]
    page = active[: query.limit]
    has_more = len(active) > len(page)
    return page, _cursor(_mark(page[-1][0])) if has_more else None


async def _stored(query: JobsQuery, model: ReadModel, state: ClusterState) -> Page:
    items: list[tuple[JobSpec, JobState]] = []
    states = job_states(state)
    cursor = None if query.cursor is None else _read_cursor(query.cursor)
    for _ in range(PAGES_READ_MAX):
        try:
            page = await model.store.jobs(query.of_store(), cursor=cursor, count_max=query.limit - len(items))
        except ValueError as error:
            raise _bad_cursor() from error
        for row in page.rows:
            ended = None if row.outcome is None else JobState(row.outcome)
            status = ended or states.get(row.spec.job_id, JobState.PENDING)
            if query.wants(row.spec, status):
                items.append((row.spec, status))
        cursor = page.next_cursor
        if cursor is None or len(items) >= query.limit:
            break
    return items, None if cursor is None else _cursor(cursor)


def _mark(spec: JobSpec) -> str:
    """Return a sort key of the job list: instant of the request, then id."""
    return f"{int(spec.requested_at.timestamp() * 1_000_000):020d}/{spec.job_id}"


def _cursor(mark: str) -> str:
    return base64.urlsafe_b64encode(mark.encode()).decode().rstrip("=")


def _read_cursor(cursor: str) -> str:
    try:
        return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except ValueError as error:
        raise _bad_cursor() from error


def _bad_cursor() -> Problem:
    return invalid("invalid cursor", Violation("cursor", "is not a cursor of this gateway; start again without one"))
