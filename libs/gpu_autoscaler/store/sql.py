"""The store of record in SQL. SqliteStore and PostgresStore only run its statements and transactions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import ClassVar, TypeVar

import msgspec

from gpu_autoscaler.core.state.ledger import period_name
from gpu_autoscaler.events.cost import CostAccrued, Spent
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.audit import EVERY_ENTRY, AuditEntry, AuditFilter, instant_text
from gpu_autoscaler.model.ids import JobId, PlanId, ProviderId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.store import operations, retention, rows, trail
from gpu_autoscaler.store.operations import Operation, execute
from gpu_autoscaler.store.protocol import (
    EVERY_JOB,
    PAGE_COUNT_MAX,
    Acceptance,
    Expiry,
    JobFilter,
    JobOutcome,
    JobRow,
    LastCharge,
    Page,
    PlanRow,
    RequestRow,
    SnapshotRow,
    StreamPosition,
    Trail,
    parse_cursor,
)
from gpu_autoscaler.store.rows import JOB_COLUMNS, PLAN_COLUMNS, SNAPSHOT_COLUMNS, SPAN_COLUMNS, Row, number_of

T = TypeVar("T")

_JOBS = f"SELECT {JOB_COLUMNS} FROM jobs"  # noqa: S608 - constants
_PLANS = f"SELECT {PLAN_COLUMNS} FROM plans"  # noqa: S608 - constants
_SPANS = f"SELECT {SPAN_COLUMNS} FROM ledger"  # noqa: S608 - constants
_MERGED = f"SELECT {SPAN_COLUMNS} FROM ledger_days"  # noqa: S608 - constants
_HISTORY = (
    f"SELECT {SPAN_COLUMNS} FROM (SELECT number, provider_id, fact FROM ledger "  # noqa: S608 - constants
    "UNION ALL SELECT number, provider_id, fact FROM ledger_days) AS spans"
)
_CHARGES = (
    "SELECT ledger.number, ledger.fact, charged.provider_id, charged.from_at, charged.total_micro_usd "
    "FROM charged_instances AS charged JOIN ledger ON ledger.number = charged.last_number WHERE "
)
_SNAPSHOTS = f"SELECT {SNAPSHOT_COLUMNS} FROM snapshots"  # noqa: S608 - constants


class SqlStore(ABC):
    """A Store on a SQL database, with `?` for values."""

    spec_sql: ClassVar[str]  # the JSON document of a job
    audit_sql: ClassVar[str]  # the JSON document of an entry of the audit trail

    @abstractmethod
    async def close(self) -> None:
        """See Store."""

    @abstractmethod
    async def _write(self, operation: Operation[T]) -> T:
        """Run the operation in one transaction; return when it is on disk."""

    @abstractmethod
    async def _rows(self, query: str, values: Sequence[object] = ()) -> Sequence[Row]:
        """Return the rows of a query."""

    async def accept_job(
        self, spec: JobSpec, *, request_digest: str, accepted_at: datetime, template: bytes | None = None
    ) -> Acceptance:
        return await self._write(operations.accept_job(spec, request_digest, accepted_at, template))

    async def job_template(self, job_id: JobId) -> bytes | None:
        records = await self._rows("SELECT template FROM jobs WHERE job_id = ?", (job_id,))
        return None if not records or records[0][0] is None else str(records[0][0]).encode()

    async def finish_job(self, job_id: JobId, *, outcome: JobOutcome, finished_at: datetime) -> bool:
        return await self._write(operations.finish_job(job_id, outcome, finished_at))

    async def job(self, job_id: JobId) -> JobRow | None:
        records = await self._rows(f"{_JOBS} WHERE job_id = ?", (job_id,))
        return rows.job(records[0]) if records else None

    async def jobs(
        self, wanted: JobFilter = EVERY_JOB, *, cursor: str | None = None, count_max: int = 100
    ) -> Page[JobRow]:
        terms: dict[str, Sequence[object]] = {"TRUE": ()}
        if wanted.project_id is not None:
            terms["project_id = ?"] = (wanted.project_id,)
        if wanted.job_name is not None:
            terms[f"{self.spec_sql} ->> 'job_name' = ?"] = (wanted.job_name,)
        if wanted.submitted_by is not None:
            terms[f"{self.spec_sql} ->> 'submitted_by' = ?"] = (wanted.submitted_by,)
        if wanted.outcomes:
            terms[f"outcome IN ({operations.places(len(wanted.outcomes))})"] = wanted.outcomes
        if wanted.accepted_from is not None:
            terms["accepted_at >= ?"] = (rows.number_of(wanted.accepted_from),)
        if wanted.accepted_before is not None:
            terms["accepted_at < ?"] = (rows.number_of(wanted.accepted_before),)
        values = [value for given in terms.values() for value in given]
        return await self._page(_JOBS, " AND ".join(terms), values, cursor, count_max, rows.job)

    async def unfinished_jobs(self) -> Sequence[JobRow]:
        return [rows.job(row) for row in await self._rows(f"{_JOBS} WHERE outcome IS NULL ORDER BY number")]

    async def record_plan(self, fact: ScalingPlanMade, *, made_at: datetime) -> bool:
        return await self._write(operations.record_plan(fact, made_at))

    async def plan(self, plan_id: PlanId) -> PlanRow | None:
        records = await self._rows(f"{_PLANS} WHERE plan_id = ?", (plan_id,))
        return rows.plan(records[0]) if records else None

    async def plans(
        self, *, made_before: datetime | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[PlanRow]:
        where, values = ("TRUE", ()) if made_before is None else ("made_at < ?", (number_of(made_before),))
        return await self._page(_PLANS, where, values, cursor, count_max, rows.plan)

    async def charge(self, spans: Sequence[CostAccrued]) -> int:
        return await self._write(operations.charge(spans))

    async def ledger(
        self, *, provider_id: ProviderId | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[CostAccrued]:
        where, values = ("provider_id = ?", (provider_id,)) if provider_id is not None else ("TRUE", ())
        return await self._page(_HISTORY, where, values, cursor, count_max, rows.span)

    async def charges_between(self, since: datetime, until: datetime, *, count_max: int) -> Sequence[CostAccrued]:
        days = (period_name("day", since), period_name("day", until))
        merged = await self._rows(f"{_MERGED} WHERE day >= ? AND day < ? LIMIT ?", (*days, count_max))
        instants = (number_of(since), number_of(until), count_max - len(merged))
        others = await self._rows(f"{_SPANS} WHERE from_at >= ? AND from_at < ? LIMIT ?", instants)
        return [rows.span(row) for row in (*merged, *others)]

    async def first_charged_at(self) -> datetime | None:
        query = "SELECT period FROM charged_periods WHERE length(period) = 10 ORDER BY period LIMIT 1"
        records = await self._rows(query)
        return datetime.fromisoformat(str(records[0][0])).replace(tzinfo=UTC) if records else None

    async def last_charges(self, also: Collection[ProviderId] = ()) -> Mapping[ProviderId, LastCharge]:
        charged = list(await self._rows(f"{_CHARGES} charged.is_open = 1"))
        for part in operations.batched(sorted(also)):
            where = f"charged.is_open = 0 AND charged.provider_id IN ({operations.places(len(part))})"
            charged += await self._rows(_CHARGES + where, part)
        return {
            ProviderId(str(provider_id)): LastCharge(
                last=rows.span((number, fact)), from_at=rows.instant(from_at), total_micro_usd=rows.integer(total)
            )
            for number, fact, provider_id, from_at, total in charged
        }

    async def roll_up(self, *, before: datetime, after: str = "") -> str | None:
        return await self._write(retention.roll_up(after, before))

    async def delete_expired(self, expiry: Expiry, *, count_max: int = 200) -> int:
        return await self._write(retention.delete_expired(expiry, count_max))

    @abstractmethod
    async def reclaim_space(self, now: datetime, rolled_before: datetime) -> None:
        """See Store."""

    async def confirm_charge(self, span: CostAccrued) -> None:
        update = "UPDATE ledger SET is_confirmed = 1 WHERE provider_id = ? AND from_at = ?"
        await self._write(execute(update, span.provider_id, number_of(span.from_at)))

    async def unconfirmed_charges(self, count_max: int) -> Sequence[CostAccrued]:
        records = await self._rows(f"{_SPANS} WHERE is_confirmed = 0 ORDER BY number LIMIT ?", (count_max,))
        return [rows.span(row) for row in records]

    async def spent_by_job(self) -> Mapping[JobId, int]:
        records = await self._rows("SELECT job_id, allocated_micro_usd FROM charged_jobs")
        return {JobId(str(job_id)): rows.integer(spent) for job_id, spent in records}

    async def spent_by_period(self, since: datetime) -> Sequence[Spent]:
        records = await self._rows(
            "SELECT period, owner, micro_usd FROM charged_periods "
            "WHERE period >= CASE length(period) WHEN 7 THEN ? ELSE ? END ORDER BY period, owner",
            (period_name("month", since), period_name("day", since)),
        )
        return [
            Spent(period=str(day), owner=str(owner), micro_usd=rows.integer(spent)) for day, owner, spent in records
        ]

    async def begin_request(self, key: str, *, request_digest: str, started_at: datetime) -> RequestRow | None:
        return await self._write(operations.begin_request(key, request_digest, started_at))

    async def answer_request(self, key: str, *, status: int, answer: bytes) -> None:
        update = "UPDATE requests SET status = ?, answer = ? WHERE idempotency_key = ?"
        await self._write(execute(update, status, answer, key))

    async def delete_requests(self, before: datetime) -> int:
        return await self._write(execute("DELETE FROM requests WHERE started_at < ? RETURNING 1", number_of(before)))

    async def append_audit(self, entries: Sequence[AuditEntry]) -> int:
        return await self._write(trail.append_audit(entries))

    async def audit_position(self, stream: str) -> int:
        records = await self._rows("SELECT sequence FROM audit_positions WHERE stream = ?", (stream,))
        return rows.integer(records[0][0]) if records else 0

    async def project_audit(self, entries: Sequence[AuditEntry], position: StreamPosition) -> bool:
        return await self._write(trail.project_audit(entries, position))

    async def audit(
        self,
        wanted: AuditFilter = EVERY_ENTRY,
        *,
        cursor: str | None = None,
        count_max: int = 100,
        is_oldest_first: bool = False,
    ) -> Trail:
        terms = {f"{self.audit_sql} ->> '{name}' = ?": value for name, value in wanted.equal.items()}
        if wanted.from_at is not None:
            terms[f"{self.audit_sql} ->> 'at' >= ?"] = wanted.from_at
        if wanted.before_at is not None:
            terms[f"{self.audit_sql} ->> 'at' < ?"] = wanted.before_at
        where, values = [*terms, "TRUE"], [*terms.values()]
        count = max(1, min(count_max, PAGE_COUNT_MAX))
        if cursor is not None:
            where.append(f"number {'>' if is_oldest_first else '<'} {parse_cursor(cursor):d}")
        records = await self._rows(trail.page_query(where, is_oldest_first=is_oldest_first), (*values, count + 1))
        anchor, head = trail.chain_links(records[0][3:])
        found = tuple(trail.audit_row(row[:3]) for row in records[:count] if row[0] is not None)
        next_cursor = str(found[-1].number) if len(records) > count else None
        return Trail(rows=found, next_cursor=next_cursor, anchor=anchor, head=head)

    async def cut_audit(self, *, before: datetime, at: datetime, count_max: int = 200) -> int:
        return await self._write(trail.cut_audit(instant_text(before), instant_text(at), count_max))

    async def save_snapshot(self, *, label: bytes, body: bytes, saved_at: datetime, service: str = "") -> None:
        insert = "INSERT INTO snapshots (saved_at, label, body, service) VALUES (?, ?, ?, ?)"
        await self._write(execute(insert, number_of(saved_at), label, body, service))

    async def snapshots(self, service: str = "") -> Sequence[SnapshotRow]:
        query = f"{_SNAPSHOTS} WHERE service = ? ORDER BY number DESC"
        return [rows.snapshot(row) for row in await self._rows(query, (service,))]

    async def snapshot_body(self, number: int) -> bytes | None:
        records = await self._rows("SELECT body FROM snapshots WHERE number = ?", (number,))
        return msgspec.convert(records[0][0], bytes) if records else None

    async def delete_snapshots(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            await self._write(execute("DELETE FROM snapshots WHERE number = ?", number))

    async def _page(
        self,
        select: str,
        where: str,
        values: Sequence[object],
        cursor: str | None,
        count_max: int,
        to_row: Callable[[Row], T],
    ) -> Page[T]:
        """Return rows before the cursor, newest first. One more is read to detect a next page."""
        count = max(1, min(count_max, PAGE_COUNT_MAX))
        if cursor is not None:
            where, values = f"{where} AND number < ?", (*values, parse_cursor(cursor))
        query = f"{select} WHERE {where} ORDER BY number DESC LIMIT ?"
        records = await self._rows(query, (*values, count + 1))
        next_cursor = str(records[count - 1][0]) if len(records) > count else None
        return Page(rows=tuple(to_row(row) for row in records[:count]), next_cursor=next_cursor)
