"""Restores accepted jobs from the store that a new stream, or one that lost acknowledged facts, does not have."""

from datetime import datetime

import structlog

from gpu_autoscaler.core.state.queries import is_preempted
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState, JobRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobQueued
from gpu_autoscaler.store.protocol import JobRow, Store
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.missing_jobs import was_created

SAID_COUNT_MAX = 500  # jobs per tick

log = structlog.get_logger()


class JobRecovery:
    """Publishes accepted jobs again: the store has the jobs, the seed their last attempts."""

    def __init__(self, store: Store, binder: Binder, seed: ClusterState) -> None:
        self._store = store
        self._binder = binder
        self._seed = seed
        self._is_complete = False

    async def jobs(self, state: ClusterState, now: datetime) -> list[Fact]:
        """Return the facts of unfinished accepted jobs that the stream lacks; once none is missing, always nothing.

        A request that is being admitted may be among them: both publish the same fact by id. Raises TransientError
        while store or Kubernetes are unreachable: until all jobs are known, nothing is placed.
        """
        if self._is_complete:
            return []
        missing = [row for row in await self._store.unfinished_jobs() if _is_missing(row, state)]
        if not missing:
            self._is_complete, self._seed = True, EMPTY_STATE
            return []
        log.warning("accepted jobs restored from the store", jobs_count=len(missing))
        return [fact for row in missing[:SAID_COUNT_MAX] for fact in await self._restored(row, state, now)]

    async def _restored(self, row: JobRow, state: ClusterState, now: datetime) -> list[Fact]:
        """Return the job as it was accepted, with its last attempt, so that attempts count on."""
        job_id = row.spec.job_id
        queued = JobQueued(job_id=job_id, spec=row.spec, queued_at=row.accepted_at)
        known, before = state.jobs.get(job_id) or JobRecord(), self._seed.jobs.get(job_id) or JobRecord()
        has_run = was_created(self._seed, before) or was_created(state, known)
        if known.finished is None and has_run and not await self._binder.has(job_id, row.spec.runtime):
            # Its end comes first in the stream, so that nothing is created for it again.
            message = "its Kubernetes Job was deleted while the streams were lost; how it ended is unknown"
            return [JobFinished(job_id=job_id, outcome="cancelled", finished_at=now, message=message), queued]
        attempts = [before.placed, before.preempted if is_preempted(before) else None]
        return [queued, *(fact for fact in attempts if fact is not None and known.placed is None)]


def _is_missing(row: JobRow, state: ClusterState) -> bool:
    known = state.jobs.get(row.spec.job_id)
    return known is None or (known.queued is None and known.rejected is None)
