"""Restores accepted jobs from the store that a new stream, or one that lost acknowledged facts, does not have; and rows
from the stream that a store from a backup does not have."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime

import structlog

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.core.state.queries import is_preempted
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState, JobRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobQueued
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.digests import request_digest
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.store.protocol import JobRow, Store
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.missing_jobs import was_created

SAID_COUNT_MAX = 500  # jobs per tick
StoredEnds = Callable[[], Awaitable[Mapping[JobId, JobFinished]]]  # of jobs, as far as the stream has them

log = structlog.get_logger()


async def no_ends() -> Mapping[JobId, JobFinished]:
    """Of a new stream."""
    return {}


async def ends_of(bus: Bus, clock: Clock) -> Mapping[JobId, JobFinished]:
    """Return the first end of each job in the stream. Raises TransientError."""
    ends: dict[JobId, JobFinished] = {}
    async for batch in History(bus, clock).read(JobFinished.stream(), [JobFinished]):
        for stored in batch:
            if isinstance(stored.recorded.fact, JobFinished):
                ends.setdefault(stored.recorded.fact.job_id, stored.recorded.fact)
    return ends


class JobRecovery:
    """Publishes accepted jobs again: the store has the jobs, the seed their last attempts.

    `ends`: the ends of all jobs that the stream has; the state forgets a job hours after its end.
    """

    def __init__(self, store: Store, binder: Binder, seed: ClusterState, ends: StoredEnds) -> None:
        self._store = store
        self._binder = binder
        self._seed = seed
        self._ends = ends
        self._is_store_compared = False
        self._is_complete = False

    async def jobs(self, state: ClusterState, now: datetime) -> list[Fact]:
        """Return the facts of unfinished accepted jobs that the stream lacks; once none is missing, always nothing.

        A request that is being admitted may be among them: both publish the same fact by id. Raises TransientError
        while store or Kubernetes are unreachable: until all jobs are known, nothing is placed.
        """
        if self._is_complete:
            return []
        rows = await self._store.unfinished_jobs()
        if not self._is_store_compared:
            rows = await self._compared(rows, state)
            self._is_store_compared = True
        missing = [row for row in rows if _is_missing(row, state)]
        if not missing:
            self._is_complete, self._seed = True, EMPTY_STATE
            return []
        log.warning("accepted jobs restored from the store", jobs_count=len(missing))
        return [fact for row in missing[:SAID_COUNT_MAX] for fact in await self._restored(row, state, now)]

    async def _compared(self, rows: Sequence[JobRow], state: ClusterState) -> Sequence[JobRow]:
        """Commit rows and ends that the stream has and the store lacks, as a backup does; return the unfinished rows.

        A row is committed before the job is published, so a store that has the last accepted job has all of them.
        """
        unfinished = {row.spec.job_id for row in rows}
        accepted = {job_id: job.queued for job_id, job in state.jobs.items() if job.queued is not None}
        last = max(accepted.values(), key=lambda queued: queued.queued_at, default=None)
        if last is not None and last.job_id not in unfinished and await self._store.job(last.job_id) is None:
            lacking = [job_id for job_id in accepted if job_id not in unfinished]
            added_count = 0
            for job_id in lacking:
                added_count += await self._added(state.jobs[job_id], accepted[job_id])
            log.warning("rows of jobs restored from the stream", jobs_count=added_count)
        ends = {job_id: job.finished for job_id, job in state.jobs.items() if job.finished is not None}
        if any(job_id not in state.jobs for job_id in unfinished):
            ends = {**await self._ends(), **ends}
        if over := [end for job_id, end in ends.items() if job_id in unfinished]:
            for end in over:
                await self._finish(end)
            return await self._store.unfinished_jobs()
        return rows

    async def _added(self, job: JobRecord, queued: JobQueued) -> bool:
        """Commit the row of a job as it was accepted, and its end; False if the store has it."""
        digest = "" if job.requested is None else request_digest(job.requested)
        is_new = (
            await self._store.accept_job(queued.spec, request_digest=digest, accepted_at=queued.queued_at) == "accepted"
        )
        if is_new and job.finished is not None:
            await self._finish(job.finished)
        return is_new

    async def _finish(self, end: JobFinished) -> None:
        await self._store.finish_job(end.job_id, outcome=end.outcome, finished_at=end.finished_at)

    async def _restored(self, row: JobRow, state: ClusterState, now: datetime) -> list[Fact]:
        """Return the job as it was accepted, with its last attempt, so that attempts count on."""
        job_id = row.spec.job_id
        queued = JobQueued(job_id=job_id, spec=row.spec, queued_at=row.accepted_at)
        known, before = state.jobs.get(job_id) or JobRecord(), self._seed.jobs.get(job_id) or JobRecord()
        has_run = was_created(self._seed, before) or was_created(state, known)
        if (
            known.finished is None
            and has_run
            and not await self._binder.has(job_id, row.spec.runtime, row.spec.namespace)
        ):
            # Its end comes first in the stream, so that nothing is created for it again.
            message = "its Kubernetes Job was deleted while the streams were lost; how it ended is unknown"
            return [JobFinished(job_id=job_id, outcome="cancelled", finished_at=now, message=message), queued]
        attempts = [before.placed, before.preempted if is_preempted(before) else None]
        return [queued, *(fact for fact in attempts if fact is not None and known.placed is None)]


def _is_missing(row: JobRow, state: ClusterState) -> bool:
    known = state.jobs.get(row.spec.job_id)
    return known is None or (known.queued is None and known.rejected is None)
