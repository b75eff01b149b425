"""GPU time of jobs by UTC month and owner. Folded from JOB only, when an attempt ends; bounded by OWNERS_COUNT_MAX.

An attempt counts from its placement to its end with all GPUs of the job. Time of a running attempt is added by readers.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.policy.quota_settings import gpus_of, project_owner, user_owner
from gpu_autoscaler.core.state.ledger import PERIODS_KEPT, period_end, period_name
from gpu_autoscaler.core.state.retention import is_past_retention
from gpu_autoscaler.core.state.state import JobRecord
from gpu_autoscaler.core.state.tables import Batch
from gpu_autoscaler.events.job import JobFinished, JobPreempted

OWNERS_COUNT_MAX = 10_000  # of one month
# What owners beyond that used together. It counts for each owner without an entry: at most too much, never too little.
OTHERS = "others"
_MICROSECOND = timedelta(microseconds=1)


def fold_attempt_end(batch: Batch, before: JobRecord, fact: JobPreempted | JobFinished) -> None:
    """Add the GPU time of the attempt that this fact ends; nothing for a repeat, and for what has ended already."""
    placed, preempted = before.placed, before.preempted
    if placed is None or before.queued is None or before.finished is not None:
        return
    if preempted is not None and preempted.attempt >= placed.attempt:
        return  # ended by its preemption
    if isinstance(fact, JobPreempted) and fact.attempt != placed.attempt:
        return
    ended_at = fact.preempted_at if isinstance(fact, JobPreempted) else fact.finished_at
    newest = batch.newest.get("job")
    if newest is None or is_past_retention(ended_at, newest):
        return  # the record may have been pruned and be folded again
    spec = before.queued.spec
    for month, seconds in months_between(placed.placed_at, ended_at):
        known = batch.gpu_seconds.get(month) or {}
        added = dict(known)
        for owner in (project_owner(spec.project_id), user_owner(spec.submitted_by)):
            entry = owner if owner in known or len(added) < OWNERS_COUNT_MAX else OTHERS
            added[entry] = added.get(entry, 0.0) + gpus_of(spec) * seconds
        batch.gpu_seconds.set(month, added)
    oldest = period_name("month", newest - PERIODS_KEPT)
    for month in [month for month in batch.gpu_seconds.now if month < oldest]:
        batch.gpu_seconds.remove(month)


def months_between(start: datetime, end: datetime) -> Iterator[tuple[str, float]]:
    """Yield each UTC month of the span, with the seconds in it; none for an empty span."""
    at = start
    while at < end:
        until = min(period_end("month", at), end)
        yield period_name("month", at), (until - at) / _MICROSECOND / 1e6
        at = until
