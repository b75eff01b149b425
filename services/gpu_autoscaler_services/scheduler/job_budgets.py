"""Job budgets: a job is asked to save a checkpoint when its budget is nearly spent, and cancelled when it is.

Time on an offer without a price cannot be charged; that is logged once per job and offer.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.next_change import note_always, plain
from gpu_autoscaler.core.queueing.job_budgets import CHECKPOINT_SECONDS, JobSpend, job_spends
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.format import money
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.scheduler.binder import Binder

log = structlog.get_logger()


class JobBudgets:
    """Checked on every tick. Each attempt is notified once; after a restart once more."""

    def __init__(self, store: Store, binder: Binder) -> None:
        self._store = store
        self._binder = binder
        self._notified: dict[JobId, int] = {}  # the attempt that was notified last
        self._unpriced: set[tuple[JobId, str]] = set()

    async def ends(self, state: ClusterState, now: datetime, is_ending: Callable[[JobId], bool]) -> list[JobFinished]:
        """Return the end of each job whose budget is spent; ask jobs with little left to save a checkpoint.

        Notes that the next call does so again where the store is asked, or a request has failed.
        """
        ended: list[JobFinished] = []
        at = plain(now)
        spending = job_spends(state, at)
        limited = {spend.spec.job_id for spend in spending}
        self._notified = {job_id: attempt for job_id, attempt in self._notified.items() if job_id in limited}
        self._unpriced = {(job_id, offer) for job_id, offer in self._unpriced if job_id in limited}
        for spend in spending:
            job_id = spend.spec.job_id
            if is_ending(job_id):
                continue
            self._warn_of_unpriced(spend)
            if spend.is_spent:
                note_always(now)
                if await self._is_to_end(spend.spec):
                    ended.append(_end(spend, at))
            elif spend.is_nearly_spent and self._notified.get(job_id) != _attempt(state, job_id):
                await self._notify(spend, _attempt(state, job_id), at)
                if self._notified.get(job_id) != _attempt(state, job_id):
                    note_always(now)
        return ended

    async def _is_to_end(self, spec: JobSpec) -> bool:
        """Return False for a job that has ended: the state may not show it yet, and counts its time until now."""
        row = await self._store.job(spec.job_id)
        if row is None or row.outcome is not None:
            return False
        try:
            return not await self._binder.is_ending(spec.job_id, spec.runtime, spec.namespace)
        except TransientError as exc:
            # Its Job could not be deleted either.
            log.warning("job lookup for a spent budget failed, retried", job_id=spec.job_id, error=str(exc))
            return False

    def _warn_of_unpriced(self, spend: JobSpend) -> None:
        for offer in spend.unpriced:
            if (spend.spec.job_id, offer) not in self._unpriced:
                self._unpriced.add((spend.spec.job_id, offer))
                log.warning("job budget not charged until the price is known", job_id=spend.spec.job_id, offer=offer)

    async def _notify(self, spend: JobSpend, attempt: int, now: datetime) -> None:
        deadline_at = now + timedelta(seconds=CHECKPOINT_SECONDS)
        try:
            await self._binder.request_checkpoints(spend.spec.job_id, spend.node_names, now, deadline_at)
        except TransientError as exc:
            log.warning("checkpoint request failed, retried", job_id=spend.spec.job_id, error=str(exc))
            return
        self._notified[spend.spec.job_id] = attempt


def _attempt(state: ClusterState, job_id: JobId) -> int:
    """Return the current attempt; 0 before the first."""
    job = state.jobs.get(job_id)
    return 0 if job is None or job.placed is None else job.placed.attempt


def _end(spend: JobSpend, now: datetime) -> JobFinished:
    limit, spent = money(spend.limit_micro_usd), money(spend.spent_micro_usd)
    message = f"job budget of {limit} is spent ({spent} including uncharged time); submit it with a larger budget"
    return JobFinished(job_id=spend.spec.job_id, outcome="cancelled", finished_at=now, message=message)
