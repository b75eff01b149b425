"""Spend by UTC day and month and by budget owner, and up to when each instance is charged. Folded from COST only.

A span across midnight is split by its microseconds on either side, to the micro-dollar.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal, assert_never

from msgspec.structs import replace

from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.state import Charge, JobSpent
from gpu_autoscaler.core.state.tables import Batch
from gpu_autoscaler.events.cost import CostAccrued, CostBudgetCrossed, CostLedgerReported
from gpu_autoscaler.model.money import split_micro_usd

Period = Literal["day", "month"]
CLUSTER = "cluster"
# The current and the previous month, for displays and late spans.
PERIODS_KEPT = timedelta(days=62)
# Longer than a job waits between two attempts; its budget covers all of them.
JOBS_KEPT = timedelta(days=35)
_MICROSECOND = timedelta(microseconds=1)
_BEFORE_ALL = datetime.min.replace(tzinfo=UTC)


def period_name(period: Period, at: datetime) -> str:
    """Return the name of the UTC day (`2026-11-21`) or month (`2026-11`) of the instant."""
    day = at.astimezone(UTC).date().isoformat()
    return day if period == "day" else day[:7]


def period_start(period: Period, at: datetime) -> datetime:
    """Return the start of the UTC day or month of the instant."""
    midnight = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight if period == "day" else midnight.replace(day=1)


def period_end(period: Period, at: datetime) -> datetime:
    """Return the start of the next UTC day or month."""
    start = period_start(period, at)
    return start + timedelta(days=1) if period == "day" else (start + timedelta(days=32)).replace(day=1)


@lru_cache(maxsize=4096)  # called for each offer and node of every plan
def owners_of(pool: str | None, zone: str | None, project: str | None) -> tuple[str, ...]:
    """Return the owners of all limits that a node counts against, the cluster first."""
    parts = (("pool", pool), ("zone", zone), ("project", project))
    return (CLUSTER, *(f"{kind}/{name}" for kind, name in parts if name is not None))


def spent_in(span: CostAccrued) -> Iterator[tuple[str, str, int]]:
    """Yield what the span adds: name of the period, owner, micro-dollars; negative for a refund."""
    owners = owners_of(span.pool, span.zone, span.bought_for)
    for day, amount in _by_day(span):
        for period in (period_name("day", day), period_name("month", day)):
            for owner in owners:
                yield period, owner, amount


def _by_day(span: CostAccrued) -> Iterable[tuple[datetime, int]]:
    start, end = sorted((span.from_at, span.to_at))
    if period_end("day", start) >= end:
        return ((start, span.total_micro_usd),)
    days, parts, at = [], [], start
    while True:
        until = min(period_end("day", at), end)
        days.append(at)
        parts.append((until - at) // _MICROSECOND)
        if until >= end:
            break
        at = until
    return zip(days, split_micro_usd(span.total_micro_usd, parts), strict=True)


def fold_cost(batch: Batch, fact: CostAccrued | CostLedgerReported | CostBudgetCrossed, at: datetime) -> None:
    """Count each span once, in any order of arrival; import the sums of the store once."""
    match fact:
        case CostAccrued():
            _accrued(batch, fact, at)
        case CostLedgerReported():
            _import_ledger(batch, fact)
        case CostBudgetCrossed():
            pass  # derived from spans that are folded already
        case _:
            assert_never(fact)


def _accrued(batch: Batch, fact: CostAccrued, at: datetime) -> None:
    after = _charged(batch.charges.get(fact.provider_id), fact, at)
    if after is None:
        return
    batch.charges.set(fact.provider_id, after)
    spent: dict[str, dict[str, int]] = {}  # of the periods of the span
    for period, owner, amount in spent_in(fact):
        if period not in spent:
            spent[period] = dict(batch.spent.get(period) or {})
        spent[period][owner] = spent[period].get(owner, 0) + amount
    batch.spent.update(spent)
    for share in fact.shares:
        if share.job_id is not None:
            job = batch.spent_by_job.get(share.job_id)
            micro_usd = share.allocated_micro_usd + (0 if job is None else job.micro_usd)
            batch.spent_by_job.set(share.job_id, JobSpent(micro_usd, max(at, at if job is None else job.last_at)))


def _charged(before: Charge | None, span: CostAccrued, at: datetime) -> Charge | None:
    """Return the charge after this span; None: the span is counted already.

    Spans of an instance are contiguous, but a retrying publisher may send a later one first: gaps are kept until they
    are filled. The first span leaves everything before it open.
    """
    if before is None:
        before = Charge(until_at=span.from_at, gaps=((_BEFORE_ALL, span.from_at),), reported_at=at)
    if before.is_corrected:
        return None
    is_refund = span.to_at < span.from_at  # the last span of the instance
    is_final = before.is_final or span.is_final or is_refund
    after = replace(before, reported_at=max(at, before.reported_at), is_final=is_final)
    if is_refund:
        return replace(after, is_corrected=True)
    if span.from_at >= before.until_at:
        gap = () if span.from_at == before.until_at else ((before.until_at, span.from_at),)
        return replace(after, until_at=span.to_at, gaps=(*before.gaps, *gap))
    for gap_from, gap_to in before.gaps:
        if gap_from <= span.from_at and span.to_at <= gap_to:
            rest = ((gap_from, span.from_at), (span.to_at, gap_to))
            other_gaps = tuple(gap for gap in before.gaps if gap != (gap_from, gap_to))
            return replace(after, gaps=(*other_gaps, *(gap for gap in rest if gap[0] < gap[1])))
    return None


def _import_ledger(batch: Batch, fact: CostLedgerReported) -> None:
    """Import the sums of the store, which replace spans that the stream no longer has."""
    if batch.ledger_reported_at is not None:
        return
    batch.ledger_reported_at = fact.reported_at
    for period in tuple(batch.spent.now):
        batch.spent.remove(period)
    for entry in fact.spent:
        batch.spent.set(entry.period, {**(batch.spent.get(entry.period) or {}), entry.owner: entry.micro_usd})
    for charge in fact.charged:
        after = Charge(until_at=charge.until_at, reported_at=fact.reported_at, is_final=charge.is_final)
        batch.charges.set(charge.provider_id, after)
    for job in fact.jobs:
        batch.spent_by_job.set(job.job_id, JobSpent(job.micro_usd, fact.reported_at))


def prune_costs(batch: Batch, newest: datetime, is_old: Callable[[datetime], bool]) -> None:
    """Prune past periods, jobs without recent cost, and charges of instances that ended long ago.

    The charge of an instance that has not ended is kept for as long as the sums of its spans. If the instance lives on
    without a span, its time counts from its launch again then, and no sum of the current day or month has any of it.
    """
    oldest = period_name("day", newest - PERIODS_KEPT)
    for period in tuple(batch.spent.now):
        if period < oldest[: len(period)]:
            batch.spent.remove(period)
    open_since = hour(newest - PERIODS_KEPT)
    batch.charges.forget(
        lambda charge: is_old(charge.reported_at) if charge.is_final else hour(charge.reported_at) < open_since
    )
    batch.spent_by_job.forget(lambda job: newest - job.last_at > JOBS_KEPT)
