"""Keeps the store from growing: old spans become one row an instance and UTC day, and what is past its retention is
deleted. Each operation is small, so that it delays no charge.

The last span of each instance stays in the ledger: it says up to when the instance is charged, and releases before the
roll-up find it where they look.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from gpu_autoscaler.core.state.ledger import period_name, period_start
from gpu_autoscaler.events.cost import CostAccrued, CostShare
from gpu_autoscaler.store import rows
from gpu_autoscaler.store.operations import Operation
from gpu_autoscaler.store.protocol import Expiry
from gpu_autoscaler.store.rows import document, instant, number_of

PASSED_COUNT_MAX = 50  # instances that have ended keep their last span
_OLD_SPANS = (
    "provider_id = ? AND from_at < ? AND is_confirmed = 1 AND number <> "
    "(SELECT last_number FROM charged_instances AS charged WHERE charged.provider_id = ledger.provider_id)"
)
_OLDEST = f"SELECT min(from_at) FROM ledger WHERE {_OLD_SPANS}"  # noqa: S608 - constants
_TAKE_DAY = f"DELETE FROM ledger WHERE {_OLD_SPANS} AND from_at >= ? RETURNING number, fact"  # noqa: S608 - constants
_ADD_DAY = """
INSERT INTO ledger_days (provider_id, day, number, fact) VALUES (?, ?, ?, ?)
ON CONFLICT (provider_id, day) DO UPDATE SET number = excluded.number, fact = excluded.fact
"""
_DELETE_INSTANCES = """
DELETE FROM charged_instances WHERE provider_id IN (
    SELECT charged.provider_id FROM charged_instances AS charged JOIN ledger ON ledger.number = charged.last_number
    WHERE charged.is_open = 0 AND ledger.is_confirmed = 1 AND ledger.to_at < ? LIMIT ?
) RETURNING last_number
"""
_CLOSE_SILENT = """
UPDATE charged_instances SET is_open = 0
WHERE is_open = 1 AND (SELECT to_at FROM ledger WHERE number = last_number) < ?
"""
_DELETE_DAYS = """
DELETE FROM ledger_days WHERE number IN (SELECT number FROM ledger_days WHERE day < ? ORDER BY day LIMIT ?)
RETURNING 1
"""
_DELETE_PLANS = """
DELETE FROM plans WHERE made_at < ? AND number IN (SELECT number FROM plans ORDER BY number LIMIT ?) RETURNING 1
"""

_DELETE_JOBS = """
DELETE FROM jobs WHERE number IN (SELECT number FROM jobs WHERE finished_at < ? ORDER BY finished_at LIMIT ?)
RETURNING job_id
"""


def roll_up(after: str, before: datetime) -> Operation[str | None]:
    """Merge the oldest day of the next instance that has one before this; return where to continue, None at the end.

    `after`: the last instance that is done. `before`: the start of a UTC day. At most the spans of one day are read,
    and PASSED_COUNT_MAX instances that have only spans to keep are passed over.
    """
    for _ in range(PASSED_COUNT_MAX):
        found = yield "SELECT provider_id FROM ledger WHERE provider_id > ? ORDER BY provider_id LIMIT 1", (after,)
        if not found:
            return None
        provider_id = str(found[0][0])
        ((oldest,),) = yield _OLDEST, (provider_id, number_of(before))
        if oldest is not None:
            yield from _merge_day(provider_id, instant(oldest), before)
            return after
        after = provider_id
    return after


def _merge_day(provider_id: str, oldest: datetime, before: datetime) -> Operation[None]:
    start = period_start("day", oldest)
    end = number_of(min(before, start + timedelta(days=1)))
    taken = yield _TAKE_DAY, (provider_id, end, number_of(start))
    if not taken:
        return  # another process was faster
    key = (provider_id, period_name("day", start))
    known = yield "SELECT number, fact FROM ledger_days WHERE provider_id = ? AND day = ?", key
    spans = sorted((*known, *taken), key=lambda row: rows.integer(row[0]))
    merged = merge([rows.span(row) for row in spans])
    yield _ADD_DAY, (*key, rows.integer(spans[-1][0]), document(merged))
    yield (
        "UPDATE charged_instances SET rolled_until = ? WHERE provider_id = ? AND coalesce(rolled_until, 0) < ?",
        (number_of(merged.to_at), provider_id, number_of(merged.to_at)),
    )


def merge(spans: Sequence[CostAccrued]) -> CostAccrued:
    """Return one span with the sums of these spans of one instance, in order. Unknown use stays apart from known."""
    shares: dict[tuple[object, ...], CostShare] = {}
    for share in (share for span in spans for share in span.shares):
        key = (share.job_id, share.project_id, share.namespace, share.used_micro_usd is None)
        known = shares.get(key)
        shares[key] = share if known is None else _sum(known, share)
    return replace(
        spans[-1],
        from_at=min(span.from_at for span in spans),
        total_micro_usd=sum(span.total_micro_usd for span in spans),
        idle_micro_usd=sum(span.idle_micro_usd for span in spans),
        shares=tuple(shares.values()),
    )


def _sum(known: CostShare, share: CostShare) -> CostShare:
    used = None if share.used_micro_usd is None else (known.used_micro_usd or 0) + share.used_micro_usd
    allocated = known.allocated_micro_usd + share.allocated_micro_usd
    return replace(known, allocated_micro_usd=allocated, used_micro_usd=used)


def delete_expired(expiry: Expiry, count_max: int) -> Operation[int]:
    """Delete at most `count_max` rows of each table; return the largest number of deleted ones, 0 when all are.

    The age of plans is counted back from the last one, as recovery from a lost stream does. A job goes with its spend.
    """
    yield _CLOSE_SILENT, (number_of(expiry.silent_before),)
    instances = yield _DELETE_INSTANCES, (number_of(expiry.ledger_before), count_max)
    for (number,) in instances:
        yield "DELETE FROM ledger WHERE number = ?", (number,)
    jobs = yield _DELETE_JOBS, (number_of(expiry.jobs_before), count_max)
    for (job_id,) in jobs:
        yield "DELETE FROM charged_jobs WHERE job_id = ?", (job_id,)
    days = yield _DELETE_DAYS, (period_name("day", expiry.ledger_before), count_max)
    newest = yield "SELECT made_at FROM plans ORDER BY number DESC LIMIT 1", ()
    plans: Sequence[rows.Row] = ()
    if newest:
        plans = yield _DELETE_PLANS, (number_of(instant(newest[0][0]) - expiry.plan_age), count_max)
    return max(len(instances), len(jobs), len(days), len(plans))
