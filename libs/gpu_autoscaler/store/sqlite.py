"""The store of record in one SQLite file, for services on one machine. Several processes open the same file.

Every statement runs on one thread of its own, so the loop never waits for the disk. Write-ahead log, and synchronous
FULL: a commit is on the disk when it returns (SQLite documentation, "PRAGMA synchronous", read 2026-11-21; NORMAL
may lose the last commits of a write-ahead log in a power cut).
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from gpu_autoscaler.core.ledger import period_name
from gpu_autoscaler.events.cost import CostAccrued, Spent
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.model.ids import JobId, PlanId, ProviderId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.store.charging import charge
from gpu_autoscaler.store.protocol import (
    PAGE_COUNT_MAX,
    Acceptance,
    JobOutcome,
    JobRow,
    LastCharge,
    Page,
    PlanRow,
    RequestRow,
    SnapshotRow,
    place_of,
)
from gpu_autoscaler.store.schema import migrate, refuse_other

T = TypeVar("T")
Row = tuple[object, ...]

BUSY_SECONDS_MAX = 10.0  # for another process to finish its transaction
URL_PREFIX = "sqlite:///"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_JOB_COLUMNS = "number, spec, request_digest, accepted_at, outcome, finished_at"

_job_spec_decoder = msgspec.json.Decoder(JobSpec)
_plan_decoder = msgspec.json.Decoder(ScalingPlanMade)
_span_decoder = msgspec.json.Decoder(CostAccrued)
_encode = msgspec.json.Encoder().encode


def path_of(url: str) -> Path:
    """Return the file that `sqlite:///relative` or `sqlite:////absolute` names. Raises ConfigError for other URLs."""
    path = url.removeprefix(URL_PREFIX)
    if path == url or not path:
        raise ConfigError("store", [f"url: must be {URL_PREFIX}<file>, such as {URL_PREFIX}gpu-autoscaler.db"])
    return Path(path)


class SqliteStore:
    """A Store in one file. Make it with `open`."""

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor, path: Path) -> None:
        self._connection = connection
        self._thread = thread
        self._path = path

    @classmethod
    async def open(cls, path: Path, *, is_read_only: bool = False) -> "SqliteStore":
        """Open or make the file and bring its schema up to date; `is_read_only` does neither.

        Raises ConfigError for a missing folder, a file that is no database, or another schema than can be had here;
        TransientError while another process holds it.
        """
        if not path.parent.is_dir():
            raise ConfigError(
                "store", [f"folder {path.parent} of {path.name} does not exist; make it or set store.url"]
            )
        thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            connection = await asyncio.get_running_loop().run_in_executor(thread, _connect, path, is_read_only)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(connection, thread, path)

    async def close(self) -> None:
        """Finish what is under way and close the file."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    async def accept_job(self, spec: JobSpec, *, request_digest: str, accepted_at: datetime) -> Acceptance:
        """See Store."""

        def accept(connection: sqlite3.Connection) -> Acceptance:
            added = connection.execute(
                "INSERT INTO jobs (job_id, project_id, request_digest, spec, accepted_at) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (spec.job_id, spec.project_id, request_digest, _encode(spec).decode(), _number(accepted_at)),
            ).rowcount
            if added:
                return "accepted"
            query = "SELECT request_digest FROM jobs WHERE job_id = ?"
            (known,) = connection.execute(query, (spec.job_id,)).fetchone()
            return "same" if known == request_digest else "conflict"

        return await self._write(accept)

    async def finish_job(self, job_id: JobId, *, outcome: JobOutcome, finished_at: datetime) -> bool:
        """See Store."""

        def finish(connection: sqlite3.Connection) -> bool:
            connection.execute(
                "UPDATE jobs SET outcome = ?, finished_at = ? WHERE job_id = ? AND outcome IS NULL",
                (outcome, _number(finished_at), job_id),
            )
            return connection.execute("SELECT 1 FROM jobs WHERE job_id = ?", (job_id,)).fetchone() is not None

        return await self._write(finish)

    async def job(self, job_id: JobId) -> JobRow | None:
        """See Store."""
        rows = await self._rows(f"SELECT {_JOB_COLUMNS} FROM jobs WHERE job_id = ?", (job_id,))  # noqa: S608 - constant
        return _job(rows[0]) if rows else None

    async def jobs(
        self, *, project_id: str | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[JobRow]:
        """See Store."""
        where, values = ("project_id = ?", (project_id,)) if project_id is not None else ("TRUE", ())
        return await self._page(f"SELECT {_JOB_COLUMNS} FROM jobs", where, values, cursor, count_max, _job)  # noqa: S608

    async def unfinished_jobs(self) -> Sequence[JobRow]:
        """See Store."""
        rows = await self._rows(f"SELECT {_JOB_COLUMNS} FROM jobs WHERE outcome IS NULL ORDER BY number", ())  # noqa: S608
        return [_job(row) for row in rows]

    async def record_plan(self, fact: ScalingPlanMade, *, made_at: datetime) -> bool:
        """See Store."""
        values = (fact.plan_id, _number(made_at), _encode(fact).decode())
        insert = "INSERT INTO plans (plan_id, made_at, fact) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        return await self._write(lambda connection: connection.execute(insert, values).rowcount > 0)

    async def plan(self, plan_id: PlanId) -> PlanRow | None:
        """See Store."""
        rows = await self._rows("SELECT number, made_at, fact FROM plans WHERE plan_id = ?", (plan_id,))
        return _plan(rows[0]) if rows else None

    async def plans(self, *, cursor: str | None = None, count_max: int = 100) -> Page[PlanRow]:
        """See Store."""
        return await self._page("SELECT number, made_at, fact FROM plans", "TRUE", (), cursor, count_max, _plan)

    async def charge(self, spans: Sequence[CostAccrued]) -> int:
        """See Store."""
        return await self._write(lambda connection: sum(charge(connection, span) for span in spans))

    async def ledger(
        self, *, provider_id: ProviderId | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[CostAccrued]:
        """See Store."""
        where, values = ("provider_id = ?", (provider_id,)) if provider_id is not None else ("TRUE", ())
        return await self._page("SELECT number, fact FROM ledger", where, values, cursor, count_max, _span)

    async def last_charges(self) -> Mapping[ProviderId, LastCharge]:
        """See Store."""
        rows = await self._rows(
            "SELECT charged.provider_id, charged.from_at, charged.total_micro_usd, ledger.fact "
            "FROM charged_instances AS charged JOIN ledger ON ledger.number = charged.last_number",
            (),
        )
        return {
            ProviderId(str(provider_id)): LastCharge(
                last=_span_decoder.decode(str(fact)), from_at=_instant(from_at), total_micro_usd=_integer(total)
            )
            for provider_id, from_at, total, fact in rows
        }

    async def confirm_charge(self, span: CostAccrued) -> None:
        """See Store."""
        update = "UPDATE ledger SET is_confirmed = 1 WHERE provider_id = ? AND from_at = ?"
        values = (span.provider_id, _number(span.from_at))
        await self._write(lambda connection: connection.execute(update, values))

    async def unconfirmed_charges(self, count_max: int) -> Sequence[CostAccrued]:
        """See Store."""
        query = "SELECT number, fact FROM ledger WHERE is_confirmed = 0 ORDER BY number LIMIT ?"
        rows = await self._rows(query, (count_max,))
        return [_span(row) for row in rows]

    async def spent_by_job(self) -> Mapping[JobId, int]:
        """See Store."""
        rows = await self._rows("SELECT job_id, allocated_micro_usd FROM charged_jobs", ())
        return {JobId(str(job_id)): _integer(spent) for job_id, spent in rows}

    async def spent_by_period(self, since: datetime) -> Sequence[Spent]:
        """See Store."""
        names = (period_name("month", since), period_name("day", since))
        query = (
            "SELECT period, owner, micro_usd FROM charged_periods "
            "WHERE period >= CASE length(period) WHEN 7 THEN ? ELSE ? END ORDER BY period, owner"
        )
        rows = await self._rows(query, names)
        return [Spent(period=str(period), owner=str(owner), micro_usd=_integer(spent)) for period, owner, spent in rows]

    async def begin_request(self, key: str, *, request_digest: str, begun_at: datetime) -> RequestRow | None:
        """See Store."""

        def begin(connection: sqlite3.Connection) -> RequestRow | None:
            added = connection.execute(
                "INSERT INTO requests (idempotency_key, request_digest, begun_at) VALUES (?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (key, request_digest, _number(begun_at)),
            ).rowcount
            if added:
                return None
            query = "SELECT request_digest, begun_at, status, answer FROM requests WHERE idempotency_key = ?"
            digest, begun, status, answer = connection.execute(query, (key,)).fetchone()
            return RequestRow(request_digest=digest, begun_at=_instant(begun), status=status, answer=answer)

        return await self._write(begin)

    async def answer_request(self, key: str, *, status: int, answer: bytes) -> None:
        """See Store."""
        update = "UPDATE requests SET status = ?, answer = ? WHERE idempotency_key = ?"
        await self._write(lambda connection: connection.execute(update, (status, answer, key)))

    async def forget_requests(self, before: datetime) -> int:
        """See Store."""
        delete, values = "DELETE FROM requests WHERE begun_at < ?", (_number(before),)
        return await self._write(lambda connection: connection.execute(delete, values).rowcount)

    async def keep_snapshot(self, *, label: bytes, body: bytes, kept_at: datetime) -> None:
        """See Store."""
        insert = "INSERT INTO snapshots (kept_at, label, body) VALUES (?, ?, ?)"
        values = (_number(kept_at), label, body)
        await self._write(lambda connection: connection.execute(insert, values))

    async def snapshots(self) -> Sequence[SnapshotRow]:
        """See Store."""
        rows = await self._rows("SELECT number, kept_at, label FROM snapshots ORDER BY number DESC", ())
        return [
            msgspec.convert({"number": number, "kept_at": _instant(kept_at), "label": label}, SnapshotRow)
            for number, kept_at, label in rows
        ]

    async def snapshot_body(self, number: int) -> bytes | None:
        """See Store."""
        rows = await self._rows("SELECT body FROM snapshots WHERE number = ?", (number,))
        return msgspec.convert(rows[0][0], bytes) if rows else None

    async def forget_snapshots(self, numbers: Sequence[int]) -> None:
        """See Store."""
        delete, values = "DELETE FROM snapshots WHERE number = ?", [(number,) for number in numbers]
        await self._write(lambda connection: connection.executemany(delete, values))

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transaction() -> T:
            with self._told():
                # IMMEDIATE takes the write lock first: a transaction that reads before it writes could not wait for it.
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    result = work(self._connection)
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
                return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    async def _rows(self, query: str, values: Sequence[object]) -> list[Row]:
        def read() -> list[Row]:
            with self._told():
                return self._connection.execute(query, values).fetchall()

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def _page(
        self,
        select: str,
        where: str,
        values: Sequence[object],
        cursor: str | None,
        count_max: int,
        to_row: Callable[[Row], T],
    ) -> Page[T]:
        """Rows before the cursor, newest first. One more is read to know whether there is a next page."""
        count = max(1, min(count_max, PAGE_COUNT_MAX))
        if cursor is not None:
            where, values = f"{where} AND number < ?", (*values, place_of(cursor))
        query = f"{select} WHERE {where} ORDER BY number DESC LIMIT ?"
        rows = await self._rows(query, (*values, count + 1))
        next_cursor = str(rows[count - 1][0]) if len(rows) > count else None
        return Page(rows=tuple(to_row(row) for row in rows[:count]), next_cursor=next_cursor)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A full disk, a lock or a lost file is for later; the message says which."""
        try:
            yield
        except sqlite3.OperationalError as exc:
            raise TransientError(f"store {self._path}: {exc}; free the disk or the lock, it is tried again") from exc


def _connect(path: Path, is_read_only: bool) -> sqlite3.Connection:  # noqa: FBT001 - handed on by position
    address = f"{path.absolute().as_uri()}?mode={'ro' if is_read_only else 'rwc'}"
    try:
        connection = sqlite3.connect(
            address, uri=True, timeout=BUSY_SECONDS_MAX, isolation_level=None, check_same_thread=False
        )
    except sqlite3.OperationalError as exc:
        raise ConfigError("store", [f"{path} cannot be opened ({exc}); check its permissions"]) from exc
    try:
        if is_read_only:
            refuse_other(connection, str(path))
            return connection
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        migrate(connection, str(path))
    except sqlite3.OperationalError as exc:
        connection.close()
        raise TransientError(f"store {path}: {exc}; it is tried again") from exc
    except sqlite3.DatabaseError as exc:
        connection.close()
        raise ConfigError("store", [f"{path} is no SQLite database ({exc}); set store.url to another file"]) from exc
    except BaseException:
        connection.close()
        raise
    return connection


def _job(row: Row) -> JobRow:
    _, spec, digest, accepted_at, outcome, finished_at = row
    return msgspec.convert(
        {
            "spec": _job_spec_decoder.decode(str(spec)),
            "request_digest": digest,
            "accepted_at": _instant(accepted_at),
            "outcome": outcome,
            "finished_at": None if finished_at is None else _instant(finished_at),
        },
        JobRow,
    )


def _plan(row: Row) -> PlanRow:
    _, made_at, fact = row
    return PlanRow(fact=_plan_decoder.decode(str(fact)), made_at=_instant(made_at))


def _span(row: Row) -> CostAccrued:
    return _span_decoder.decode(str(row[1]))


def _number(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND


def _instant(number: object) -> datetime:
    return _EPOCH + _integer(number) * _MICROSECOND


def _integer(value: object) -> int:
    assert isinstance(value, int), f"the column holds {value!r}, not an integer"  # noqa: S101 - our own bug
    return value
