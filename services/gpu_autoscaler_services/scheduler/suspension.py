"""Jobs that must leave their capacity, spot or taken by another job: each is suspended before its next placement.

A Job whose pods are still terminating is polled with exponential back-off, a suspended one only when it is placed.
"""

from collections.abc import Collection
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.next_change import note, plain
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.spot_waits import must_leave_spot
from gpu_autoscaler.core.state.queries import is_ended_whole, queue
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler_services.scheduler.binder import Binder

ASKED_COUNT_MAX = 32  # Jobs per tick
AGAIN_SECONDS = 2.0  # after the first poll, then twice as long each time
AGAIN_SECONDS_MAX = 16.0  # half of the default termination grace period

log = structlog.get_logger()


def must_leave(job: JobRecord, policy: ScalingPolicy, now: datetime) -> bool:
    """Return True for a queued job whose Job is suspended before it is placed again."""
    return must_leave_spot(job, policy, now) or is_ended_whole(job)


class Suspension:
    """Remembers which Jobs are suspended, and when to poll the others."""

    def __init__(self, binder: Binder) -> None:
        self._binder = binder
        self._suspended: set[JobId] = set()
        self._polls: dict[JobId, tuple[datetime, float]] = {}  # the next poll, and seconds until the one after it

    async def not_suspended(
        self, state: ClusterState, policy: ScalingPolicy, now: datetime, placed: Collection[JobId]
    ) -> set[JobId]:
        """Return the jobs that must leave and cannot be placed yet: some of their pods still exist.

        Notes when the next one is polled.
        """
        waiting = (job for job in queue(state) if must_leave(job, policy, now))
        leaving = {job.queued.job_id: job.queued.spec for job in waiting if job.queued is not None}
        self._suspended &= leaving.keys()
        self._polls = {job_id: poll for job_id, poll in self._polls.items() if job_id in leaving}
        unsuspended = leaving.keys() - self._suspended
        due = [job_id for job_id in leaving if self._is_due(job_id, now, placed)]
        for job_id in sorted(due, key=lambda job_id: self._polls.get(job_id, (plain(now), 0.0))[0])[:ASKED_COUNT_MAX]:
            if await self._suspend(leaving[job_id]):
                self._suspended.add(job_id)
                self._polls.pop(job_id, None)
                unsuspended -= {job_id}
            else:
                self._suspended.discard(job_id)
                wait_seconds = self._polls[job_id][1] if job_id in self._polls else AGAIN_SECONDS
                next_at = now + timedelta(seconds=wait_seconds)
                self._polls[job_id] = (next_at, min(2 * wait_seconds, AGAIN_SECONDS_MAX))
                note(now, next_at)
                unsuspended |= {job_id}
        return unsuspended

    def note_released(self, job_id: JobId) -> None:
        """Poll the Job at once if its job must leave: the end of the placement may become known later."""
        self._suspended.discard(job_id)
        self._polls.pop(job_id, None)

    def _is_due(self, job_id: JobId, now: datetime, placed: Collection[JobId]) -> bool:
        if job_id in self._suspended:
            return job_id in placed  # somebody may have resumed it
        return job_id not in self._polls or self._polls[job_id][0] <= now

    async def _suspend(self, spec: JobSpec) -> bool:
        try:
            return await self._binder.suspend(spec.job_id, spec.runtime, spec.namespace)
        except (TransientError, PermanentError) as exc:
            log.warning("job suspension failed, retried", job_id=spec.job_id, error=str(exc))
            return False
