"""Jobs that were accepted and that the stream does not have: it began anew, or lost what it had acknowledged."""

from datetime import datetime

import structlog

from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState, JobRecord
from gpu_autoscaler.core.views import is_preempted
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobQueued
from gpu_autoscaler.store.protocol import JobRow, Store
from gpu_autoscaler_services.scheduler.absent import was_made
from gpu_autoscaler_services.scheduler.binder import Binder

SAID_COUNT_MAX = 500  # jobs said in one tick

log = structlog.get_logger()


class Past:
    """Says accepted jobs again. The store has the jobs, the seed how far they had come."""

    def __init__(self, store: Store, binder: Binder, seed: ClusterState) -> None:
        self._store = store
        self._binder = binder
        self._seed = seed
        self._is_told = False

    async def jobs(self, state: ClusterState, now: datetime) -> list[Fact]:
        """Return what the stream lacks about accepted jobs that have not ended; asked until nothing is lacking.

        A request that is being answered may be among them: both answers are one fact by id. Raises TransientError
        while store or Kubernetes are away: until all are known, nothing is placed.
        """
        if self._is_told:
            return []
        lacking = [row for row in await self._store.unfinished_jobs() if _is_lacking(row, state)]
        if not lacking:
            self._is_told, self._seed = True, EMPTY_STATE
            return []
        log.warning("accepted jobs are not in the stream, said again from the store", jobs_count=len(lacking))
        return [fact for row in lacking[:SAID_COUNT_MAX] for fact in await self._again(row, state, now)]

    async def _again(self, row: JobRow, state: ClusterState, now: datetime) -> list[Fact]:
        """The job as it was accepted, with its last attempt: attempts are counted on, not anew."""
        job_id = row.spec.job_id
        queued = JobQueued(job_id=job_id, spec=row.spec, queued_at=row.accepted_at)
        known, before = state.jobs.get(job_id) or JobRecord(), self._seed.jobs.get(job_id) or JobRecord()
        is_made = was_made(self._seed, before) or was_made(state, known)
        if known.finished is None and is_made and not await self._binder.has(job_id, row.spec.runtime):
            # Its end comes first in the stream, so that nothing is made for it again.
            message = "its Kubernetes Job went while the record was lost, and nobody saw how it ended"
            return [JobFinished(job_id=job_id, outcome="cancelled", finished_at=now, message=message), queued]
        attempts = [before.placed, before.preempted if is_preempted(before) else None]
        return [queued, *(said for said in attempts if said is not None and known.placed is None)]


def _is_lacking(row: JobRow, state: ClusterState) -> bool:
    known = state.jobs.get(row.spec.job_id)
    return known is None or (known.queued is None and known.rejected is None)
