"""Pages of jobs. Jobs that have not ended come from memory, all others from the store."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec

from gpu_autoscaler.core.policy.queue_settings import QueuePolicy, queue_of
from gpu_autoscaler.core.state.queries import job_states
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.jobs import FINAL_STATES, JobSpec, JobState, Violation
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.store.protocol import JobFilter
from gpu_autoscaler_services.api_rights import READ_JOBS
from gpu_autoscaler_services.gateway import estimates, schema
from gpu_autoscaler_services.gateway.access import Access
from gpu_autoscaler_services.gateway.paging import PageQuery, bad_cursor, cursor_of, instant_key, page, read_cursor
from gpu_autoscaler_services.gateway.problems import rule_violated
from gpu_autoscaler_services.gateway.read_model import ReadModel

ACCEPTANCE_MAX = timedelta(days=1)  # from a job's creation to its row
_LATEST = datetime.max.replace(tzinfo=UTC) - ACCEPTANCE_MAX
PAGES_READ_MAX = 10  # of the store per answer; a rare state may need further requests


class JobsQuery(PageQuery, frozen=True, kw_only=True):
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
    queue: Annotated[
        str | None, msgspec.Meta(description="Only jobs of this queue: of the projects that the policy has in it now.")
    ] = None
    submitted_by: Annotated[str | None, msgspec.Meta(description="Only jobs that this user submitted.")] = None
    mine: Annotated[bool, msgspec.Meta(description="Only jobs that the caller submitted.")] = False

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
        before = None if self.created_before is None else min(self.created_before, _LATEST)
        return JobFilter(
            project_id=self.project_id,
            job_name=self.job_name,
            submitted_by=self.submitted_by,
            outcomes=tuple(map(str, self.state)) if FINAL_STATES.issuperset(self.state) else (),  # type: ignore[arg-type]  # outcomes are the final states
            accepted_from=self.created_after,
            accepted_before=None if before is None else before + ACCEPTANCE_MAX,
        )


class _Selection:
    """The jobs of a query that the caller may read."""

    def __init__(self, query: JobsQuery, access: Access, queues: tuple[QueuePolicy, ...], *, reads_all: bool) -> None:
        self.query = query
        self._queues = queues
        self._access = access
        self._reads_all = reads_all
        self._readable: dict[str, bool] = {}  # by project

    @classmethod
    async def of(cls, query: JobsQuery, access: Access, queues: tuple[QueuePolicy, ...]) -> "_Selection":
        """Return the selection. Raises a 403 for a project that the caller may not read, a 422 for no name or queue."""
        names = sorted({queue_of(queues, "").name, *(queue.name for queue in queues)})
        if query.queue is not None and query.queue not in names:
            reason = f"{query.queue!r} is no queue of the policy; known: {', '.join(names)}"
            raise rule_violated("unknown queue", Violation("queue", reason))
        if query.mine:
            if not access.name:
                reason = "the gateway does not authenticate its callers, so it knows no name of yours; use submitted_by"
                raise rule_violated("`mine` cannot be answered", Violation("mine", reason))
            query = msgspec.structs.replace(query, submitted_by=access.name)
        if query.project_id is not None:
            await access.require(READ_JOBS, query.project_id)
        reads_all = query.project_id is not None or await access.allows_everywhere(READ_JOBS)
        return cls(query, access, queues, reads_all=reads_all)

    async def has(self, spec: JobSpec, status: JobState) -> bool:
        """Return whether the job is selected."""
        if not self.query.wants(spec, status):
            return False
        if self.query.queue not in {None, queue_of(self._queues, spec.project_id).name}:
            return False
        if self._reads_all:
            return True
        if spec.project_id not in self._readable:
            self._readable[spec.project_id] = await self._access.allows(READ_JOBS, spec.project_id)
        return self._readable[spec.project_id]


async def job_page(query: JobsQuery, model: ReadModel, access: Access) -> schema.JobPage:
    """Return the page for the query."""
    selection = await _Selection.of(query, access, model.policy.queues)
    scene = estimates.Scene.of(model.view.state, model.policy, model.clock.now())
    if not query.state or FINAL_STATES.intersection(query.state):
        specs, cursor = await _stored(selection, model, scene.state)
    else:
        specs, cursor = await _active(selection, scene.state)
    status_view = model.status_view()
    items = tuple(estimates.job(spec, status, scene, status_view) for spec, status in specs)
    return schema.JobPage(items=items, next_cursor=cursor)


Jobs = tuple[tuple[tuple[JobSpec, JobState], ...], str | None]


async def _active(selection: _Selection, state: ClusterState) -> Jobs:
    """Return jobs from memory, which holds every job that has not ended. The cursor names the last one shown."""
    states = job_states(state)
    active = [
        (record.queued.spec, states[job_id])
        for job_id, record in state.jobs.items()
        if record.queued is not None and job_id in states and await selection.has(record.queued.spec, states[job_id])
    ]
    return page(
        active, lambda item: instant_key(item[0].requested_at, item[0].job_id), selection.query, is_descending=True
    )


async def _stored(selection: _Selection, model: ReadModel, state: ClusterState) -> Jobs:
    items: list[tuple[JobSpec, JobState]] = []
    states, query = job_states(state), selection.query
    cursor = None if query.cursor is None else read_cursor(query.cursor)
    for _ in range(PAGES_READ_MAX):
        try:
            stored = await model.store.jobs(query.of_store(), cursor=cursor, count_max=query.limit - len(items))
        except ValueError as error:
            raise bad_cursor() from error
        for row in stored.rows:
            ended = None if row.outcome is None else JobState(row.outcome)
            status = ended or states.get(row.spec.job_id, JobState.PENDING)
            if await selection.has(row.spec, status):
                items.append((row.spec, status))
        cursor = stored.next_cursor
        if cursor is None or len(items) >= query.limit:
            break
    return tuple(items), None if cursor is None else cursor_of(cursor)
