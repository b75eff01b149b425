"""What the ledger says was spent, by day and month (UTC) and by whose limit it counts against; and up to when each
instance is charged. Folded from the stream COST alone; used by `core/fold.py`, the store and whoever shows it.

A span that runs over midnight is split by the microseconds on either side, to the micro-dollar.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal, assert_never

from msgspec.structs import replace

from gpu_autoscaler.core.folding.batch import Batch
from gpu_autoscaler.core.state import Charge, JobSpent
from gpu_autoscaler.events.cost import CostAccrued, CostBudgetCrossed, CostLedgerTold
from gpu_autoscaler.model.money import split_micro_usd

Period = Literal["day", "month"]
CLUSTER = "cluster"
# The longest month and the month before it: what a screen shows, and what a late span may still be for.
PERIODS_KEPT = timedelta(days=62)
# Longer than a job waits between two attempts; its budget is for all of them.
JOBS_KEPT = timedelta(days=35)
_MICROSECOND = timedelta(microseconds=1)
_BEFORE_ALL = datetime.min.replace(tzinfo=UTC)
_NAMES = {"day": "%Y-%m-%d", "month": "%Y-%m"}


def period_name(period: Period, at: datetime) -> str:
    """The name of the day (`2026-11-21`) or month (`2026-11`) of UTC that the instant is in."""
    return at.astimezone(UTC).strftime(_NAMES[period])


def period_start(period: Period, at: datetime) -> datetime:
    """When the day or month of this instant began."""
    midnight = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight if period == "day" else midnight.replace(day=1)


def period_end(period: Period, at: datetime) -> datetime:
    """When the next one begins."""
    start = period_start(period, at)
    return start + timedelta(days=1) if period == "day" else (start + timedelta(days=32)).replace(day=1)


@lru_cache(maxsize=4096)  # asked for each sale and node of every plan
def owners_of(pool: str | None, zone: str | None, project: str | None) -> tuple[str, ...]:
    """Everything whose limits a node counts against, the whole cluster first."""
    parts = (("pool", pool), ("zone", zone), ("project", project))
    return (CLUSTER, *(f"{kind}/{name}" for kind, name in parts if name is not None))


def spent_in(span: CostAccrued) -> Iterator[tuple[str, str, int]]:
    """Yield what the span adds: period's name, owner, micro-dollars. Negative where too much was charged before."""
    owners = owners_of(span.pool, span.zone, span.bought_for)
    for day, amount in _by_day(span):
        for period in (period_name("day", day), period_name("month", day)):
            for owner in owners:
                yield period, owner, amount


def _by_day(span: CostAccrued) -> Iterable[tuple[datetime, int]]:
    start, end = sorted((span.from_at, span.to_at))
    days, parts, at = [], [], start
    while True:
        until = min(period_end("day", at), end)
        days.append(at)
        parts.append((until - at) // _MICROSECOND)
        if until >= end:
            break
        at = until
    if len(days) == 1:
        return ((days[0], span.total_micro_usd),)
    return zip(days, split_micro_usd(span.total_micro_usd, parts), strict=True)


def fold_cost(batch: Batch, fact: CostAccrued | CostLedgerTold | CostBudgetCrossed, at: datetime) -> None:
    """Count a span once, in whichever order spans of an instance come; take over the ledger's own sums once."""
    match fact:
        case CostAccrued():
            _accrued(batch, fact, at)
        case CostLedgerTold():
            _told(batch, fact)
        case CostBudgetCrossed():
            pass  # a mark is a figure of the ledger, which is known
        case _:
            assert_never(fact)


def _accrued(batch: Batch, fact: CostAccrued, at: datetime) -> None:
    before = batch.charges.get(fact.provider_id)
    after = _charged(before, fact, at)
    if after is None:
        return
    batch.charges.set(fact.provider_id, after)
    for period, owner, amount in spent_in(fact):
        _add(batch, period, owner, amount)
    for share in fact.shares:
        if share.job_id is not None:
            job = batch.spent_by_job.get(share.job_id)
            micro_usd = share.allocated_micro_usd + (0 if job is None else job.micro_usd)
            batch.spent_by_job.set(share.job_id, JobSpent(micro_usd, max(at, at if job is None else job.last_at)))


def _add(batch: Batch, period: str, owner: str, amount: int) -> None:
    owners = batch.spent.get(period) or {}
    batch.spent.set(period, {**owners, owner: owners.get(owner, 0) + amount})


def _charged(before: Charge | None, span: CostAccrued, at: datetime) -> Charge | None:
    """How far the instance is charged with this span; None: it is counted already.

    Spans follow each other without a gap, but a publisher that tries again may send a later one first: what misses is
    remembered until it comes. The first that is heard of leaves all before it open.
    """
    if before is None:
        before = Charge(until_at=span.from_at, gaps=((_BEFORE_ALL, span.from_at),), reported_at=at)
    if before.is_corrected:
        return None
    after = replace(before, reported_at=max(at, before.reported_at))
    if span.to_at < span.from_at:  # billing had ended before what was thought: the last word about the instance
        return replace(after, is_corrected=True)
    if span.from_at >= before.until_at:
        gap = () if span.from_at == before.until_at else ((before.until_at, span.from_at),)
        return replace(after, until_at=span.to_at, gaps=(*before.gaps, *gap))
    for gap_from, gap_to in before.gaps:
        if gap_from <= span.from_at and span.to_at <= gap_to:
            rest = ((gap_from, span.from_at), (span.to_at, gap_to))
            others = tuple(gap for gap in before.gaps if gap != (gap_from, gap_to))
            return replace(after, gaps=(*others, *(gap for gap in rest if gap[0] < gap[1])))
    return None


def _told(batch: Batch, fact: CostLedgerTold) -> None:
    """The store's sums are all that was ever charged: they stand for spans that the stream does not have any more."""
    if batch.ledger_reported_at is not None:
        return
    batch.ledger_reported_at = fact.told_at
    for period in tuple(batch.spent.now):
        batch.spent.remove(period)
    for entry in fact.spent:
        batch.spent.set(entry.period, {**(batch.spent.get(entry.period) or {}), entry.owner: entry.micro_usd})
    for one in fact.charged:
        batch.charges.set(one.provider_id, Charge(until_at=one.until_at, reported_at=fact.told_at))
    for job in fact.jobs:
        batch.spent_by_job.set(job.job_id, JobSpent(job.micro_usd, fact.told_at))


def prune_costs(batch: Batch, newest: datetime, is_old: Callable[[datetime], bool]) -> None:
    """Forget periods that are long over, jobs that cost nothing for long, and instances that no span comes of."""
    oldest = period_name("day", newest - PERIODS_KEPT)
    for period in tuple(batch.spent.now):
        if period < oldest[: len(period)]:
            batch.spent.remove(period)
    batch.charges.forget(lambda charge: is_old(charge.reported_at))
    batch.spent_by_job.forget(lambda job: newest - job.last_at > JOBS_KEPT)
