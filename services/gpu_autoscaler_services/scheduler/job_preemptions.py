"""Jobs that are preempted for others: each is asked to save a checkpoint, then its attempt ends.

The end is published first; the Job is suspended because of it (`suspension.py`), so a restart in between loses nothing.
"""

from collections.abc import Collection
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.disruption.protection import can_save, has_answered
from gpu_autoscaler.core.next_change import note, plain
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.quota_settings import lenders_of
from gpu_autoscaler.core.queueing.preemption import Preemption, barred_jobs, may_need_priority, preemptions
from gpu_autoscaler.core.queueing.schedule import Schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler_services.scheduler.binder import Binder

log = structlog.get_logger()


def may_preempt(policy: ScalingPolicy) -> bool:
    """Return True if the policy allows a preemption at all."""
    quotas = policy.quotas
    return quotas.is_priority_preemption_on or (quotas.is_reclaim_on and bool(lenders_of(quotas)))


class Preemptions:
    """Checked on every tick. Each attempt is asked to save once; after a restart once more."""

    def __init__(self, binder: Binder) -> None:
        self._binder = binder
        self._asked: dict[tuple[JobId, int], datetime] = {}  # by job and attempt: when it was asked to save

    async def ends(
        self,
        state: ClusterState,
        policy: ScalingPolicy,
        as_of: datetime,
        scheduled: Schedule,
        ending: Collection[JobId],
    ) -> list[JobPreempted]:
        """Return the end of each attempt that is preempted and has saved, or had the time to; ask the others to save.

        `ending`: jobs whose attempt ends in this tick anyway.
        """
        if not may_preempt(policy):
            return []
        is_barred_known = may_need_priority(state, policy, scheduled.deferred)
        barred = barred_jobs(plan(state, policy, as_of).deferred) if is_barred_known else {}
        asked = {job_id for job_id, _ in self._asked}
        chosen = preemptions(state, policy, as_of, scheduled=scheduled, barred=barred, asked=asked)
        current = {(victim.job_id, victim.attempt) for victim in chosen}
        self._asked = {key: at for key, at in self._asked.items() if key in current}
        leaving = [victim for victim in chosen if victim.job_id not in ending]
        return [_end(victim, plain(as_of)) for victim in leaving if await self._is_saved(victim, policy, as_of)]

    async def _is_saved(self, victim: Preemption, policy: ScalingPolicy, as_of: datetime) -> bool:
        """Return True once every pod that saves on request has saved since, or the time for it is over."""
        saving = [pod for pod in victim.pods if pod.node_name is not None and can_save(dict(pod.annotations))]
        if not saving:
            return True
        wait, key = timedelta(seconds=policy.quotas.checkpoint_seconds_max), (victim.job_id, victim.attempt)
        asked_at = self._asked.get(key)
        if asked_at is not None:
            is_saved = all(has_answered(dict(pod.annotations), asked_at) for pod in saving)
            return is_saved or as_of >= asked_at + wait
        now = plain(as_of)
        try:
            node_names = sorted({pod.node_name for pod in saving if pod.node_name is not None})
            await self._binder.request_checkpoints(victim.job_id, node_names, now, now + wait)
        except TransientError as exc:
            log.warning("checkpoint request failed, retried", job_id=victim.job_id, error=str(exc))
            note(as_of, now)
            return False
        self._asked[key] = now
        note(as_of, now + wait)
        return False


def _end(victim: Preemption, now: datetime) -> JobPreempted:
    return JobPreempted(
        job_id=victim.job_id,
        attempt=victim.attempt,
        cause=f"preempted for job {victim.reason.for_job}: {victim.reason.tag()}",
        preempted_at=now,
        preemption=victim.reason,
        is_own_choice=True,
        retries_used_count=victim.retries_used_count,
    )
