"""Keeps the store from growing: once a UTC day, a few small steps a tick, after the charges of the tick."""

from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.state.ledger import PERIODS_KEPT, period_start
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.store.protocol import Expiry, Store

log = structlog.get_logger()

# At 1,000 nodes a day takes 1,000 steps, one an instance, which are four minutes of ticks. On a busy machine a step
# took 0.08 s in the median and 1.5 s at most: these ticks may end seconds late, and publish what they charged then.
STEPS_PER_TICK = 20


class Housekeeping:
    """Merges old spans, then deletes what is past its retention, then returns the space."""

    def __init__(self, store: Store, *, span_days: int, ledger_days: int, plan_days: int, job_days: int) -> None:
        self._store = store
        self._span_age = timedelta(days=span_days)
        self._ledger_age = timedelta(days=ledger_days)
        self._plan_age = timedelta(days=plan_days)
        self._job_age = timedelta(days=job_days)
        self._after: str | None = ""  # the last instance whose spans are merged; None: all are
        self._begun_for: datetime | None = None  # spans before this instant are being merged
        self._is_done = False

    async def step(self, now: datetime) -> None:
        """Do a few steps of today's work. What fails is done later: a charge never depends on it."""
        before = period_start("day", now - self._span_age)
        if before != self._begun_for:
            self._begun_for, self._after, self._is_done = before, "", False
        try:
            for _ in range(0 if self._is_done else STEPS_PER_TICK):
                if self._after is not None:
                    self._after = await self._store.roll_up(before=before, after=self._after)
                elif not await self._store.delete_expired(self._expiry(now)):
                    await self._store.reclaim_space(now, before)
                    self._is_done = True
                    log.info("store rolled up", before=before.isoformat())
                    return
        except TransientError as exc:
            log.warning("store not rolled up, retried at the next tick", error=str(exc))

    def _expiry(self, now: datetime) -> Expiry:
        return Expiry(
            ledger_before=now - self._ledger_age,
            silent_before=now - PERIODS_KEPT,
            jobs_before=now - self._job_age,
            plan_age=self._plan_age,
        )
