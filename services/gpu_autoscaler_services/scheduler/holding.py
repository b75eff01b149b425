"""Jobs that are to leave spot: each is held before it is placed anew. Asks Kubernetes no more than there is to learn.

A Job whose pods take long to go is asked after ever more seldom, and one that is held again only when it is placed.
"""

from collections.abc import Collection
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.buying.sparing import is_to_leave_spot
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.views import queue
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler_services.scheduler.binder import Binder

ASKED_COUNT_MAX = 32  # Jobs a tick; the others with the next ones
AGAIN_SECONDS = 2.0  # after the first look, then twice as long each time
AGAIN_SECONDS_MAX = 16.0  # half of the grace that pods have, if they say nothing else

log = structlog.get_logger()


class Holding:
    """Remembers whose Job is held, and when to look at the others again."""

    def __init__(self, binder: Binder) -> None:
        self._binder = binder
        self._held: set[JobId] = set()
        self._looks: dict[JobId, tuple[datetime, float]] = {}  # when next, and seconds until the one after that

    async def unheld(
        self, state: ClusterState, policy: ScalingPolicy, now: datetime, placed: Collection[JobId]
    ) -> set[JobId]:
        """Return the jobs that are to leave spot and may not be placed yet: their pods are not all gone."""
        waiting = (job for job in queue(state) if is_to_leave_spot(job, policy, now))
        leaving = {job.queued.job_id: job.queued.spec for job in waiting if job.queued is not None}
        self._held &= leaving.keys()
        self._looks = {job_id: look for job_id, look in self._looks.items() if job_id in leaving}
        unheld = leaving.keys() - self._held
        due = [job_id for job_id in leaving if self._is_due(job_id, now, placed)]
        for job_id in sorted(due, key=lambda one: self._looks.get(one, (now, 0.0))[0])[:ASKED_COUNT_MAX]:
            if await self._hold(leaving[job_id]):
                self._held.add(job_id)
                self._looks.pop(job_id, None)
                unheld -= {job_id}
            else:
                self._held.discard(job_id)
                wait_seconds = self._looks[job_id][1] if job_id in self._looks else AGAIN_SECONDS
                next_at = now + timedelta(seconds=wait_seconds)
                self._looks[job_id] = (next_at, min(2 * wait_seconds, AGAIN_SECONDS_MAX))
                unheld |= {job_id}
        return unheld

    def _is_due(self, job_id: JobId, now: datetime, placed: Collection[JobId]) -> bool:
        if job_id in self._held:
            return job_id in placed  # somebody may have let it go meanwhile
        return job_id not in self._looks or self._looks[job_id][0] <= now

    async def _hold(self, spec: JobSpec) -> bool:
        try:
            return await self._binder.hold(spec.job_id, spec.runtime)
        except (TransientError, PermanentError) as exc:
            log.warning("cannot hold a job that is to leave spot; tried again", job_id=spec.job_id, error=str(exc))
            return False
