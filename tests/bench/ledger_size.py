"""Size of the ledger at 1,000 nodes: `python -m tests.bench.ledger_size [URL] [MINUTES]`.

Writes the spans of that many minutes of one day through the store, confirms them, and merges the day. Prints bytes
before and after, and the longest charge and merge. In PostgreSQL it vacuums when the partition's own settings would.
URL: a database that may be filled; default: a new SQLite file.
"""

import asyncio
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpu_autoscaler.core.state.ledger import period_start
from gpu_autoscaler.events.cost import CostAccrued, CostShare
from gpu_autoscaler.model.ids import JobId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.store.opening import open_store
from gpu_autoscaler.store.operations import execute
from gpu_autoscaler.store.postgres import PostgresStore
from gpu_autoscaler.store.sqlite import SqliteStore

NODES_COUNT = 1000
JOB_MINUTES = 72  # twenty jobs a day on each node, each on eight nodes
CONFIRMED_MINUTES = 20
MIB = 2**20


def span(node: int, minute: int, day: datetime) -> CostAccrued:
    """Return one minute of one node, with the fields that a cluster on AWS has."""
    total = 546_210 + (node + minute) % 3
    job_id = JobId(f"train-{node // 8 * 100 + minute // JOB_MINUTES:08d}")
    share = CostShare(
        allocated_micro_usd=total - total // 8,
        used_micro_usd=total // 2,
        job_id=job_id,
        project_id="research",
        namespace="training",
    )
    return CostAccrued(
        provider_id=ProviderId(f"aws:///us-east-1a/i-0{node:016x}"),
        node_name=f"ip-10-0-{node // 256}-{node % 256}.ec2.internal",
        instance_type="p4d.24xlarge",
        capacity_type=CapacityType.SPOT,
        from_at=day + timedelta(minutes=minute, microseconds=node),
        to_at=day + timedelta(minutes=minute + 1, microseconds=node),
        total_micro_usd=total,
        idle_micro_usd=total // 8,
        shares=(share,),
        price_micro_usd_per_hour=32_772_600,
        price_source="node.instance_observed.v1",
        price_at=day,
        pool="default",
        zone="us-east-1a",
        bought_for="research",
    )


async def confirm(store: SqliteStore | PostgresStore, day: datetime, rows_count: int, dead_count: int) -> int:
    """Confirm all spans in one statement; return the number of dead row versions afterwards."""
    await store._write(execute("UPDATE ledger SET is_confirmed = 1 WHERE is_confirmed = 0"))
    if isinstance(store, SqliteStore) or dead_count <= 10_000 + 0.02 * rows_count:
        return dead_count
    async with store._pool.acquire() as connection:
        await connection.execute(f"VACUUM ledger_{day:%Y%m%d}", timeout=300)
    return 0


async def mebibytes(store: SqliteStore | PostgresStore) -> float:
    """Return what the ledger and its merged days take up."""
    if isinstance(store, SqliteStore):
        store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (store._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return float((pages - free) * size / MIB)
    ((size,),) = await store._rows(
        "SELECT (SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits "
        "WHERE inhparent = 'ledger'::regclass)::bigint + pg_total_relation_size('ledger_days')"
    )
    return float(str(size)) / MIB


def report(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def measure(url: str, minutes_count: int) -> None:
    """Write, merge, and print."""
    store = await open_store(url)
    assert isinstance(store, SqliteStore | PostgresStore)
    day = period_start("day", datetime.now(UTC)) + timedelta(days=1)
    await store.reclaim_space(day - timedelta(days=1), day - timedelta(days=1))
    longest, dead_count = 0.0, 0
    for minute in range(minutes_count):
        spans = [span(node, minute, day) for node in range(NODES_COUNT)]
        began = time.monotonic()
        await store.charge(spans)
        longest = max(longest, time.monotonic() - began)
        if minute % CONFIRMED_MINUTES == CONFIRMED_MINUTES - 1:
            dead_count += NODES_COUNT * CONFIRMED_MINUTES
            dead_count = await confirm(store, day, NODES_COUNT * minute, dead_count)
    before = await mebibytes(store)
    report(f"{NODES_COUNT * minutes_count} spans: {before:.1f} MiB; longest charge of {NODES_COUNT}: {longest:.2f} s")
    longest, steps_count, began_at = 0.0, 0, time.monotonic()
    after: str | None = ""
    while after is not None:
        began = time.monotonic()
        after = await store.roll_up(before=day + timedelta(days=1), after=after)
        longest, steps_count = max(longest, time.monotonic() - began), steps_count + 1
    await store.reclaim_space(day + timedelta(days=2), day + timedelta(days=2))
    seconds = time.monotonic() - began_at
    report(
        f"merged in {steps_count} steps and {seconds:.0f} s, longest {longest:.2f} s: {await mebibytes(store):.1f} MiB"
    )
    await store.close()


def main() -> None:
    """Read the arguments."""
    url, minutes = (*sys.argv[1:], *("", "1440")[len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(url or f"sqlite:///{Path(folder).absolute()}/ledger.db", int(minutes)))


if __name__ == "__main__":
    main()
