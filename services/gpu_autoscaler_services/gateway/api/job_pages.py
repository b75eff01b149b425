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
from gpu_autoscaler_services.api_rights import READ_JOBS
from gpu_autoscaler_services.gateway import estimates, schema
from gpu_autoscaler_services.gateway.access import Access
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
    submitted_by: Annotated[str | None, msgspec.Meta(description="Only jobs that this user submitted.")] = None
    mine: Annotated[bool, msgspec.Meta(description="Only jobs that the caller submitted.")] = False
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
            and self.submitted_by in {None, spec.submitted_by}
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


class _Selection:
    """The jobs of a query that the caller may read."""

    def __init__(self, query: JobsQuery, access: Access, *, reads_all: bool) -> None:
        self.query = query
        self._access = access
        self._reads_all = reads_all
        self._readable: dict[str, bool] = {}  # by project

    @classmethod
    async def of(cls, query: JobsQuery, access: Access) -> "_Selection":
        """Return the selection. Raises a 403 for a project that the caller may not read, a 422 for no name."""
        if query.mine:
            if not access.name:
                reason = "the gateway does not authenticate its callers, so it knows no name of yours; use submitted_by"
                raise invalid("invalid query: correct the parameters listed in violations", Violation("mine", reason))
            query = msgspec.structs.replace(query, submitted_by=access.name)
        if query.project_id is not None:
            await access.require(READ_JOBS, query.project_id)
        reads_all = query.project_id is not None or await access.allows_everywhere(READ_JOBS)
        return cls(query, access, reads_all=reads_all)

    async def has(self, spec: JobSpec, status: JobState) -> bool:
        """Return whether the job is selected."""
        if not self.query.wants(spec, status):
            return False
        if self._reads_all:
            return True
        if spec.project_id not in self._readable:
            self._readable[spec.project_id] = await self._access.allows(READ_JOBS, spec.project_id)
        return self._readable[spec.project_id]


async def job_page(query: JobsQuery, model: ReadModel, access: Access) -> schema.JobPage:
    """Return the page for the query."""
    selection = await _Selection.of(query, access)
    scene = estimates.Scene.of(model.view.state, model.policy, model.clock.now())
    if not query.state or FINAL_STATES.intersection(query.state):
        specs, cursor = await _stored(selection, model, scene.state)
    else:
        specs, cursor = await _active(selection, scene.state)
    status_view = model.status_view()
    items = tuple(estimates.job(spec, status, scene, status_view) for spec, status in specs)
    return schema.JobPage(items=items, next_cursor=cursor)


Page = tuple[list[tuple[JobSpec, JobState]], str | None]


async def _active(selection: _Selection, state: ClusterState) -> Page:
    """Return jobs from memory, which holds every job that has not ended. The cursor names the last one shown."""
    states, query = job_states(state), selection.query
    active = [
        (record.queued.spec, states[job_id])
        for job_id, record in state.jobs.items()
        if record.queued is not None and job_id in states and await selection.has(record.queued.spec, states[job_id])
    ]
    active.sort(key=lambda item: (item[0].requested_at, item[0].job_id), reverse=True)
    if query.cursor is not None:
        after = _read_cursor(query.cursor)
        active = [item for item in active if _mark(item[0]) < after]
    page = active[: query.limit]
    has_more = len(active) > len(page)
    return page, _cursor(_mark(page[-1][0])) if has_more else None


async def _stored(selection: _Selection, model: ReadModel, state: ClusterState) -> Page:
    items: list[tuple[JobSpec, JobState]] = []
    states, query = job_states(state), selection.query
    cursor = None if query.cursor is None else _read_cursor(query.cursor)
    for _ in range(PAGES_READ_MAX):
        try:
            page = await model.store.jobs(query.of_store(), cursor=cursor, count_max=query.limit - len(items))
        except ValueError as error:
            raise _bad_cursor() from error
        for row in page.rows:
            ended = None if row.outcome is None else JobState(row.outcome)
            status = ended or states.get(row.spec.job_id, JobState.PENDING)
            if await selection.has(row.spec, status):
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
