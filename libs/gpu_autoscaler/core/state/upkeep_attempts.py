"""Attempts of acts of upkeep: decided again with an exponential back-off until facts show the effect.

The memory rides on the plans, so that a replay has it. An act that was not decided again for FORGOTTEN_SECONDS after
its back-off had an effect meanwhile, or was no longer due: the next one is a first attempt.
"""

from datetime import datetime, timedelta

from gpu_autoscaler.core.next_change import has_lasted_longer
from gpu_autoscaler.core.state.state import ClusterState, UpkeepRecord
from gpu_autoscaler.core.state.tables import Batch
from gpu_autoscaler.model.decisions import Plan

# Source of the figures: our own. A failing act makes six plans in an hour.
BACKOFF_SECONDS_MAX = 600.0
FORGOTTEN_SECONDS = 600.0
RECORDS_COUNT_MAX = 4096


def next_attempt(
    state: ClusterState,
    key: str,
    first_backoff_seconds: float,
    as_of: datetime,
    backoff_seconds_max: float = BACKOFF_SECONDS_MAX,
) -> tuple[int, datetime] | None:
    """Return the number of the attempt that is due now, and when another one would be; None: not due yet."""
    known = state.upkeep.get(key)
    if known is not None and as_of < known.retry_at:
        return None
    is_first = known is None or has_lasted_longer(known.retry_at, FORGOTTEN_SECONDS, as_of)
    attempts_count = 1 if is_first or known is None else known.attempts_count + 1
    seconds = min(first_backoff_seconds * 2.0 ** min(attempts_count - 1, 16), backoff_seconds_max)
    return attempts_count, as_of + timedelta(seconds=seconds)


def fold_upkeep(batch: Batch, plan: Plan) -> None:
    """Keep the last attempt of each act; above RECORDS_COUNT_MAX those whose next attempt comes first are removed."""
    records = batch.upkeep
    newest_at = plan.as_of if batch.last_plan_at is None else max(batch.last_plan_at, plan.as_of)
    forgotten_before = newest_at - timedelta(seconds=FORGOTTEN_SECONDS)
    for key in [key for key, known in records.now.items() if known.retry_at < forgotten_before]:
        records.remove(key)
    for decision in plan.upkeep_decisions:
        known = records.get(decision.key)
        is_repeated = known is not None and known.retry_at >= decision.retry_at  # the plan is delivered again
        if not is_repeated and decision.retry_at >= forgotten_before:
            decided_at = plan.as_of if known is None or decision.attempts_count == 1 else known.decided_at
            record = UpkeepRecord(
                attempts_count=decision.attempts_count, retry_at=decision.retry_at, decided_at=decided_at
            )
            records.set(decision.key, record)
    if (excess := len(records.now) - RECORDS_COUNT_MAX) > 0:
        first = sorted(records.now, key=lambda key: (records.now[key].retry_at, key))
        for key in first[:excess]:
            records.remove(key)
