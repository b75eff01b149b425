"""One span of an instance's cost in the SQLite store: the ledger and all its sums, in the caller's transaction."""

import sqlite3
from datetime import UTC, datetime, timedelta

import msgspec

from gpu_autoscaler.core.ledger import spent_in
from gpu_autoscaler.events.cost import CostAccrued

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_encode = msgspec.json.Encoder().encode


def charge(connection: sqlite3.Connection, span: CostAccrued) -> int:
    """Add the span to the ledger and its sums; 1 when it is new, else 0."""
    from_at, to_at = ((at - _EPOCH) // _MICROSECOND for at in (span.from_at, span.to_at))
    added = connection.execute(
        "INSERT INTO ledger (provider_id, from_at, to_at, total_micro_usd, idle_micro_usd, fact) "
        "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        (span.provider_id, from_at, to_at, span.total_micro_usd, span.idle_micro_usd, _encode(span).decode()),
    )
    if not added.rowcount:
        return 0
    connection.execute(
        "INSERT INTO charged_instances (provider_id, from_at, last_number, total_micro_usd) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (provider_id) DO UPDATE SET last_number = excluded.last_number, "
        "total_micro_usd = total_micro_usd + excluded.total_micro_usd",
        (span.provider_id, from_at, added.lastrowid, span.total_micro_usd),
    )
    connection.executemany(
        "INSERT INTO charged_jobs (job_id, allocated_micro_usd) VALUES (?, ?) ON CONFLICT (job_id) "
        "DO UPDATE SET allocated_micro_usd = allocated_micro_usd + excluded.allocated_micro_usd",
        [(share.job_id, share.allocated_micro_usd) for share in span.shares if share.job_id is not None],
    )
    connection.executemany(
        "INSERT INTO charged_periods (period, owner, micro_usd) VALUES (?, ?, ?) ON CONFLICT (period, owner) "
        "DO UPDATE SET micro_usd = micro_usd + excluded.micro_usd",
        list(spent_in(span)),
    )
    return 1
