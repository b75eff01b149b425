"""Jobs with a budget of their own: told to save when it is nearly spent, ended when it is.

Where a price is not known the budget cannot be held; that is told, once for each job and offer.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.queueing.job_budgets import CHECKPOINT_SECONDS, JobSpend, job_spends
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.words.wording import money
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.scheduler.binder import Binder

log = structlog.get_logger()


class Budgets:
    """Looks at every tick. Each attempt is told once, as the pods of the next know nothing; after a start once more."""

    def __init__(self, store: Store, binder: Binder) -> None:
        self._store = store
        self._binder = binder
        self._told: dict[JobId, int] = {}  # the attempt that was told last
        self._uncounted: set[tuple[JobId, str]] = set()

    async def ends(self, state: ClusterState, now: datetime, is_ending: Callable[[JobId], bool]) -> list[JobFinished]:
        """Return the end of each job whose budget is spent; others are told to save where little is left."""
        ended: list[JobFinished] = []
        found = job_spends(state, now)
        limited = {outlay.spec.job_id for outlay in found}
        self._told = {job_id: attempt for job_id, attempt in self._told.items() if job_id in limited}
        self._uncounted = {each for each in self._uncounted if each[0] in limited}
        for outlay in found:
            job_id = outlay.spec.job_id
            if is_ending(job_id):
                continue
            self._tell_of_the_uncounted(outlay)
            if outlay.is_spent:
                row = await self._store.job(job_id)
                if row is not None and row.outcome is None:
                    ended.append(_end(outlay, now))
            elif outlay.is_nearly_spent and self._told.get(job_id) != _attempt(state, job_id):
                await self._tell(outlay, _attempt(state, job_id), now)
        return ended

    def _tell_of_the_uncounted(self, outlay: JobSpend) -> None:
        for offer in outlay.unpriced:
            if (outlay.spec.job_id, offer) not in self._uncounted:
                self._uncounted.add((outlay.spec.job_id, offer))
                log.warning(
                    "a job with a budget runs where the price is unknown; its time there is counted once that is told",
                    job_id=outlay.spec.job_id,
                    offer=offer,
                )

    async def _tell(self, outlay: JobSpend, attempt: int, now: datetime) -> None:
        deadline_at = now + timedelta(seconds=CHECKPOINT_SECONDS)
        try:
            await self._binder.ask_to_save(outlay.spec.job_id, outlay.node_names, deadline_at)
        except TransientError as exc:
            log.warning("cannot tell a job to save before its budget is spent; told with the next look", error=str(exc))
            return
        self._told[outlay.spec.job_id] = attempt


def _attempt(state: ClusterState, job_id: JobId) -> int:
    """The attempt that runs now; 0 before the first."""
    job = state.jobs.get(job_id)
    return 0 if job is None or job.placed is None else job.placed.attempt


def _end(outlay: JobSpend, now: datetime) -> JobFinished:
    limit, spent = money(outlay.limit_micro_usd), money(outlay.spent_micro_usd)
    message = f"its budget of {limit} is spent ({spent} with the time that is not charged yet); ask with a larger one"
    return JobFinished(job_id=outlay.spec.job_id, outcome="cancelled", finished_at=now, message=message)
