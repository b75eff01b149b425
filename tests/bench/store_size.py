"""STORE: what the store takes after 30 days of 1,000 nodes: spend, plans, jobs and snapshots.

`python -m tests.bench.store_size [URL] [PLAN_HOURS]`; URL is a database that may be filled, default a new SQLite file.

Writes the spans of a whole day and merges them, plans of some hours at every tick of the scaler, the jobs of a day, and
snapshots of a state with 10,000 pods. Each part is measured by what the database has grown by, and multiplied by how
much of it the default retention keeps within 30 days.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from tests.bench.line import Line
from tests.bench.stream_load import (
    DAY_SECONDS,
    GPUS_COUNT,
    JOB_GPUS_COUNT,
    JOBS_PER_DAY,
    LOSSES_PER_DAY,
    NODES_COUNT,
    PODS_COUNT,
    TICK_SECONDS,
    USED_RATIO,
    cost_span,
    numbered,
    offers_sampled,
    plan_fact,
    planned,
    pods_per_day,
    telemetry_of,
)
from tests.bench.stream_objects import CLOUDS, node_object, pod_object
from tests.support.timed_facts import T0, TimedFact, record

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.ledger import JOBS_KEPT, period_start
from gpu_autoscaler.core.state.retention import TOMBSTONE_HOURS
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.examples import EPOCH
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobQueued, JobRequested, JobStarted
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.events.scaling import ScalingNodeLaunched, ScalingNodeOrdered
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.runtime.config import StoreSettings
from gpu_autoscaler.runtime.snapshot_codec import Label, encode_snapshot
from gpu_autoscaler.store.opening import open_store
from gpu_autoscaler.store.operations import execute
from gpu_autoscaler.store.postgres import PostgresStore
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.cost_tracker.service import span_seconds

GIB_MAX = 5.0
DAYS_COUNT = 30
PLAN_HOURS = 2.0
SNAPSHOTS_COUNT = 4
MIB = 2**20
CLOUD = CLOUDS[0]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a part of the load adds to the database, and how many times 30 days keep it."""

    name: str
    mebibytes: float
    times: float
    note: str

    @property
    def kept_mebibytes(self) -> float:
        """What it takes after 30 days."""
        return self.mebibytes * self.times


class StoreLoad:
    """A store that is being filled."""

    def __init__(self, store: SqliteStore | PostgresStore) -> None:
        self.store = store
        self.day = period_start("day", datetime.now(UTC)) + timedelta(days=1)
        self._size = 0.0

    async def begin(self) -> None:
        """Make the partitions of the day, as housekeeping does."""
        await self.store.reclaim_space(self.day - timedelta(days=1), self.day - timedelta(days=1))
        self._size = await mebibytes(self.store)

    async def grown(self) -> float:
        """Return by how many MiB the database has grown since the last call."""
        before, self._size = self._size, await mebibytes(self.store)
        return self._size - before

    async def spans(self) -> Part:
        """Charge a day, confirm it as the stream returns it, vacuum as its settings would."""
        seconds, longest = span_seconds(NODES_COUNT), 0.0
        for turn in range(int(DAY_SECONDS / seconds)):
            from_at = self.day + timedelta(seconds=turn * seconds)
            spans = [
                cost_span(CLOUD, number, from_at, from_at + timedelta(seconds=seconds)) for number in range(NODES_COUNT)
            ]
            began = time.monotonic()
            await self.store.charge(spans)
            longest = max(longest, time.monotonic() - began)
            await self.store._write(execute("UPDATE ledger SET is_confirmed = 1 WHERE is_confirmed = 0"))
        if isinstance(self.store, PostgresStore):
            async with self.store._pool.acquire() as connection:
                await connection.execute(f"VACUUM ledger_{self.day:%Y%m%d}", timeout=300)
        days = StoreSettings().span_days + 1
        return Part(name="spans", mebibytes=await self.grown(), times=days, note=f"longest charge {longest:.2f} s")

    async def merged(self, spans: Part) -> Part:
        """Merge the day; return what stays of it. A lost node is replaced, so a day has more instances than nodes."""
        longest, steps_count = 0.0, 0
        after: str | None = ""
        while after is not None:
            began = time.monotonic()
            after = await self.store.roll_up(before=self.day + timedelta(days=1), after=after)
            longest, steps_count = max(longest, time.monotonic() - began), steps_count + 1
        await self.store.reclaim_space(self.day + timedelta(days=2), self.day + timedelta(days=2))
        note = f"{steps_count} steps, longest {longest:.2f} s"
        kept = spans.mebibytes + await self.grown()
        return Part(
            name="merged days", mebibytes=kept, times=DAYS_COUNT * (1 + LOSSES_PER_DAY / NODES_COUNT), note=note
        )

    async def plans(self, hours: float) -> Part:
        """Record a plan a tick."""
        waiting, *_ = planned()
        count = int(hours * 3600 / TICK_SECONDS)
        for number in range(count):
            at = self.day + timedelta(seconds=number * TICK_SECONDS)
            await self.store.record_plan(plan_fact(msgspec.structs.replace(waiting, as_of=at), number), made_at=at)
        times = StoreSettings().plan_days * 24 / hours
        return Part(name="plans", mebibytes=await self.grown(), times=times, note=f"{count:,} plans in {hours:g} h")

    async def jobs(self) -> Part:
        """Accept and finish the jobs of a day."""
        for number in range(int(JOBS_PER_DAY)):
            queued = numbered(JobQueued, CLOUD, number)
            assert isinstance(queued, JobQueued)
            await self.store.accept_job(queued.spec, request_digest=f"{number:032x}", accepted_at=self.day)
            await self.store.finish_job(queued.job_id, outcome="completed", finished_at=self.day)
        return Part(name="jobs", mebibytes=await self.grown(), times=DAYS_COUNT, note=f"{JOBS_PER_DAY:,.0f} a day")

    async def snapshots(self) -> Part:
        """Save some; kept are those of the last hour, one of each earlier hour, and three of the cost tracker."""
        state = fold(EMPTY_STATE, record(TimedFact(fact, at) for fact, at in folded()))
        label = Label(core_digest="c" * 32, fact_types=(), marks=())
        encoded, body = encode_snapshot(label, state)
        for number in range(SNAPSHOTS_COUNT):
            at = self.day + timedelta(minutes=number)
            await self.store.save_snapshot(label=encoded, body=body, saved_at=at)
        settings = StoreSettings()
        count = 3600 / settings.snapshot_seconds + 24 * settings.snapshot_days + 3
        note = f"{count:.0f} of {len(body) / MIB:.1f} MiB"
        return Part(name="snapshots", mebibytes=await self.grown() / SNAPSHOTS_COUNT, times=count, note=note)


def folded() -> Iterator[tuple[Fact, datetime]]:
    """Yield the facts of the state: what lives, what ended within the retention, and a month of spend by job."""
    pods_gone = int(pods_per_day() * TOMBSTONE_HOURS / 24)
    jobs_running = int(USED_RATIO / 2 * NODES_COUNT * GPUS_COUNT / JOB_GPUS_COUNT)
    jobs_ended = int(JOBS_PER_DAY * TOMBSTONE_HOURS / 24)
    for number in range(NODES_COUNT):
        yield node_observed(NODES.decode(node_object(CLOUD, number), "read"), epoch=EPOCH), T0
        for kind in (ScalingNodeOrdered, ScalingNodeLaunched, NodeInstanceObserved):
            yield numbered(kind, CLOUD, number), T0
    for number in range(PODS_COUNT + pods_gone):
        document = pod_object(CLOUD, number, "running", node=number % NODES_COUNT)
        yield pod_observed(PODS.decode(document, "read"), epoch=EPOCH), T0
        if number >= PODS_COUNT:
            yield numbered(PodGone, CLOUD, number), T0
    for number in range(jobs_running + jobs_ended):
        for job_kind in (JobRequested, JobQueued, JobPlaced, JobStarted):
            yield numbered(job_kind, CLOUD, number), T0
        if number >= jobs_running:
            yield numbered(JobFinished, CLOUD, number), T0
    for minute in range(3):
        for number in range(NODES_COUNT):
            yield telemetry_of(CLOUD, number, T0 + timedelta(minutes=minute)), T0 + timedelta(minutes=minute + 1)
    yield from ((item.fact, T0) for item in offers_sampled())
    jobs_count, turn = int(JOBS_PER_DAY * JOBS_KEPT.days), timedelta(hours=5)
    for number in range(jobs_count // 3):
        at = T0 - JOBS_KEPT + turn * (number // NODES_COUNT)
        yield cost_span(CLOUD, number % NODES_COUNT, at, at + timedelta(minutes=10)), at


async def mebibytes(store: SqliteStore | PostgresStore) -> float:
    """Return what all tables take."""
    if isinstance(store, SqliteStore):
        store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (store._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return float((pages - free) * size / MIB)
    ((size,),) = await store._rows(
        "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class "
        "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
    )
    return float(str(size)) / MIB


async def parts(url: str, plan_hours: float) -> list[Part]:
    """Fill the database; return what each part of the load takes."""
    store: Store = await open_store(url)
    assert isinstance(store, SqliteStore | PostgresStore)
    load = StoreLoad(store)
    await load.begin()
    spans = await load.spans()
    found = [spans, await load.merged(spans), await load.plans(plan_hours), await load.jobs(), await load.snapshots()]
    await store.close()
    return found


def lines(found: list[Part], kind: str) -> list[Line]:
    """Return a line for each part, and one for all of them."""
    total = sum(part.kept_mebibytes for part in found) / 1024
    against = f"{DAYS_COUNT} days of {NODES_COUNT:,} nodes in {kind}"
    return [
        *(
            Line(case=f"STORE {part.name}", value=part.kept_mebibytes, unit="MiB", against=f"{against}; {part.note}")
            for part in found
        ),
        Line(case="STORE", value=total, unit="GiB", against=against, target=f"<= {GIB_MAX:g}", met=total <= GIB_MAX),
    ]


def measure() -> list[Line]:
    """Fill a new SQLite file."""
    with tempfile.TemporaryDirectory() as folder:
        return lines(asyncio.run(parts(f"sqlite:///{Path(folder).absolute()}/store.db", PLAN_HOURS)), "SQLite")


def main() -> None:
    """Read the arguments, measure, print."""
    url, hours = (*sys.argv[1:], *("", str(PLAN_HOURS))[len(sys.argv) - 1 :])[:2]
    found = measure() if not url else lines(asyncio.run(parts(url, float(hours))), url.split(":")[0])
    for line in found:
        sys.stdout.write(f"{line.case}: {line.value:.2f} {line.unit} ({line.against})\n")


if __name__ == "__main__":
    main()
