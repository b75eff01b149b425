"""A store in memory: the contract of the real ones, without threads or files."""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.state.ledger import period_name, spent_in
from gpu_autoscaler.events.cost import CostAccrued, Spent
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.audit import (
    EVERY_ENTRY,
    AuditEntry,
    AuditFilter,
    AuditRow,
    Link,
    cut_entry,
    instant_text,
    next_row,
)
from gpu_autoscaler.model.ids import JobId, PlanId, ProviderId
from gpu_autoscaler.model.jobs import JobSpec
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
from gpu_autoscaler.store.retention import merge

T = TypeVar("T")
_SpanKey = tuple[ProviderId, datetime]


class Tables:
    """Data on disk: outlives every process."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, JobRow] = {}
        self.templates: dict[JobId, bytes] = {}
        self.plans: dict[PlanId, PlanRow] = {}
        self.ledger: dict[_SpanKey, CostAccrued] = {}
        self.days: dict[tuple[ProviderId, str], CostAccrued] = {}  # merged spans
        self.rolled_until: dict[ProviderId, datetime] = {}
        self.unconfirmed: dict[_SpanKey, CostAccrued] = {}
        self.charges: dict[ProviderId, LastCharge] = {}
        self.spent: dict[JobId, int] = {}
        self.periods: dict[tuple[str, str], int] = {}
        self.requests: dict[str, RequestRow] = {}
        self.snapshots: dict[int, tuple[SnapshotRow, bytes]] = {}
        self.snapshot_services: dict[int, str] = {}
        self.snapshots_count = 0  # kept so far, forgotten ones included
        self.audit: dict[str, tuple[AuditRow, str]] = {}  # by entry id, with the key of the act
        self.audit_anchor = self.audit_head = Link()
        self.audit_positions: dict[str, int] = {}


class MemoryStore:
    """A Store; instances over the same tables see each other's writes."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def accept_job(
        self, spec: JobSpec, *, request_digest: str, accepted_at: datetime, template: bytes | None = None
    ) -> Acceptance:
        await self._reached()
        known = self._tables.jobs.get(spec.job_id)
        if known is not None:
            return "same" if known.request_digest == request_digest else "conflict"
        self._tables.jobs[spec.job_id] = JobRow(spec=spec, request_digest=request_digest, accepted_at=accepted_at)
        if template is not None:
            self._tables.templates[spec.job_id] = template
        return "accepted"

    async def job_template(self, job_id: JobId) -> bytes | None:
        await self._reached()
        return self._tables.templates.get(job_id)

    async def finish_job(self, job_id: JobId, *, outcome: JobOutcome, finished_at: datetime) -> bool:
        await self._reached()
        row = self._tables.jobs.get(job_id)
        if row is not None and row.outcome is None:
            self._tables.jobs[job_id] = replace(row, outcome=outcome, finished_at=finished_at)
        return row is not None

    async def job(self, job_id: JobId) -> JobRow | None:
        await self._reached()
        return self._tables.jobs.get(job_id)

    async def jobs(
        self, wanted: JobFilter = EVERY_JOB, *, cursor: str | None = None, count_max: int = 100
    ) -> Page[JobRow]:
        await self._reached()
        rows = list(self._tables.jobs.values())
        return _page(rows, [wanted.wants(row) for row in rows], cursor, count_max)

    async def unfinished_jobs(self) -> Sequence[JobRow]:
        await self._reached()
        return [row for row in self._tables.jobs.values() if row.outcome is None]

    async def record_plan(self, fact: ScalingPlanMade, *, made_at: datetime) -> bool:
        await self._reached()
        if fact.plan_id in self._tables.plans:
            return False
        self._tables.plans[fact.plan_id] = PlanRow(fact=fact, made_at=made_at)
        return True

    async def plan(self, plan_id: PlanId) -> PlanRow | None:
        await self._reached()
        return self._tables.plans.get(plan_id)

    async def plans(
        self, *, made_before: datetime | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[PlanRow]:
        await self._reached()
        rows = list(self._tables.plans.values())
        wanted = [made_before is None or row.made_at < made_before for row in rows]
        return _page(rows, wanted, cursor, count_max)

    async def charge(self, spans: Sequence[CostAccrued]) -> int:
        await self._reached()
        msgspec.json.encode(spans)  # refuse what cannot be encoded before anything is stored
        return sum(self._charge(span) for span in spans)

    def _charge(self, span: CostAccrued) -> int:
        tables, key = self._tables, (span.provider_id, span.from_at)
        if key in tables.ledger or span.from_at < tables.rolled_until.get(span.provider_id, span.from_at):
            return 0
        tables.ledger[key] = tables.unconfirmed[key] = span
        before = tables.charges.get(span.provider_id)
        tables.charges[span.provider_id] = LastCharge(
            last=span,
            from_at=span.from_at if before is None else before.from_at,
            total_micro_usd=span.total_micro_usd + (0 if before is None else before.total_micro_usd),
        )
        for share in span.shares:
            if share.job_id is not None:
                tables.spent[share.job_id] = tables.spent.get(share.job_id, 0) + share.allocated_micro_usd
        for period, owner, amount in spent_in(span):
            tables.periods[period, owner] = tables.periods.get((period, owner), 0) + amount
        return 1

    async def ledger(
        self, *, provider_id: ProviderId | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[CostAccrued]:
        await self._reached()
        rows = [*self._tables.days.values(), *self._tables.ledger.values()]
        return _page(rows, [provider_id in (None, row.provider_id) for row in rows], cursor, count_max)

    async def charges_between(self, since: datetime, until: datetime, *, count_max: int) -> Sequence[CostAccrued]:
        await self._reached()
        first, end = period_name("day", since), period_name("day", until)
        merged = [span for (_, day), span in self._tables.days.items() if first <= day < end]
        others = [span for (_, from_at), span in self._tables.ledger.items() if since <= from_at < until]
        return [*merged, *others][:count_max]

    async def first_charged_at(self) -> datetime | None:
        await self._reached()
        days = sorted(period for period, _ in self._tables.periods if len(period) == len("2026-11-21"))
        return datetime.fromisoformat(days[0]).replace(tzinfo=UTC) if days else None

    async def last_charges(self, also: Collection[ProviderId] = ()) -> Mapping[ProviderId, LastCharge]:  # noqa: ARG002
        """Ended instances are among them."""
        await self._reached()
        return dict(self._tables.charges)

    async def roll_up(self, *, before: datetime, after: str = "") -> str | None:
        await self._reached()
        tables = self._tables
        provider_id = min((key[0] for key in tables.ledger if key[0] > after), default=None)
        if provider_id is None:
            return None
        last = tables.charges[provider_id].last
        old = [
            (key, span)
            for key, span in tables.ledger.items()
            if key[0] == provider_id and key[1] < before and key not in tables.unconfirmed and span is not last
        ]
        if not old:
            return provider_id
        day = period_name("day", min(key[1] for key, _ in old))
        taken = {key: span for key, span in old if period_name("day", key[1]) == day}
        known = tables.days.get((provider_id, day))
        merged = merge([*(() if known is None else (known,)), *taken.values()])
        tables.days[provider_id, day] = merged
        tables.rolled_until[provider_id] = max(merged.to_at, tables.rolled_until.get(provider_id, merged.to_at))
        tables.ledger = {key: span for key, span in tables.ledger.items() if key not in taken}
        return after

    async def delete_expired(self, expiry: Expiry, *, count_max: int = 200) -> int:
        """Charges stay: they are few in a run."""
        await self._reached()
        tables, oldest = self._tables, period_name("day", expiry.ledger_before)
        days = [key for key in tables.days if key[1] < oldest][:count_max]
        newest = max((row.made_at for row in tables.plans.values()), default=expiry.silent_before)
        plans = [plan_id for plan_id, row in tables.plans.items() if row.made_at < newest - expiry.plan_age][:count_max]
        limit = expiry.jobs_before
        ended = [job_id for job_id, row in tables.jobs.items() if row.finished_at and row.finished_at < limit]
        ended = ended[:count_max]
        for job_id in ended:
            del tables.jobs[job_id]
            tables.templates.pop(job_id, None)
            tables.spent.pop(job_id, None)
        for key in days:
            del tables.days[key]
        for plan_id in plans:
            del tables.plans[plan_id]
        return max(len(ended), len(days), len(plans))

    async def reclaim_space(self, now: datetime, rolled_before: datetime) -> None:
        """There is no disk."""

    async def confirm_charge(self, span: CostAccrued) -> None:
        await self._reached()
        self._tables.unconfirmed.pop((span.provider_id, span.from_at), None)

    async def unconfirmed_charges(self, count_max: int) -> Sequence[CostAccrued]:
        await self._reached()
        return list(self._tables.unconfirmed.values())[:count_max]

    async def spent_by_job(self) -> Mapping[JobId, int]:
        await self._reached()
        return dict(self._tables.spent)

    async def spent_by_period(self, since: datetime) -> Sequence[Spent]:
        await self._reached()
        oldest = period_name("day", since)
        rows = sorted(self._tables.periods.items())
        return [
            Spent(period=period, owner=owner, micro_usd=amount)
            for (period, owner), amount in rows
            if period >= oldest[: len(period)]
        ]

    async def begin_request(self, key: str, *, request_digest: str, started_at: datetime) -> RequestRow | None:
        await self._reached()
        known = self._tables.requests.get(key)
        if known is None:
            self._tables.requests[key] = RequestRow(request_digest=request_digest, started_at=started_at)
        return known

    async def answer_request(self, key: str, *, status: int, answer: bytes) -> None:
        await self._reached()
        row = self._tables.requests.get(key)
        if row is not None:
            self._tables.requests[key] = replace(row, status=status, answer=answer)

    async def delete_requests(self, before: datetime) -> int:
        await self._reached()
        old = [key for key, row in self._tables.requests.items() if row.started_at < before]
        for key in old:
            del self._tables.requests[key]
        return len(old)

    async def append_audit(self, entries: Sequence[AuditEntry]) -> int:
        await self._reached()
        before = self._tables.audit_head.number
        for entry in entries:
            if entry.entry_id not in self._tables.audit:
                row = next_row(self._tables.audit_head, entry)
                self._tables.audit[entry.entry_id] = (row, entry.act_key)
                self._tables.audit_head = Link(number=row.number, hash=row.hash)
        return self._tables.audit_head.number - before

    async def audit_position(self, stream: str) -> int:
        await self._reached()
        return self._tables.audit_positions.get(stream, 0)

    async def project_audit(self, entries: Sequence[AuditEntry], position: StreamPosition) -> bool:
        await self._reached()
        if self._tables.audit_positions.get(position.stream, 0) != position.after:
            return False
        known = {act_key for _, act_key in self._tables.audit.values()}
        await self.append_audit([entry for entry in entries if entry.act_key not in known])
        self._tables.audit_positions[position.stream] = position.until
        return True

    async def audit(
        self,
        wanted: AuditFilter = EVERY_ENTRY,
        *,
        cursor: str | None = None,
        count_max: int = 100,
        is_oldest_first: bool = False,
    ) -> Trail:
        await self._reached()
        bound = None if cursor is None else parse_cursor(cursor)
        rows = [row for row, _ in self._tables.audit.values() if wanted.wants(row.document)]
        rows = rows if is_oldest_first else rows[::-1]
        if bound is not None:
            rows = [row for row in rows if (row.number > bound if is_oldest_first else row.number < bound)]
        count = max(1, min(count_max, PAGE_COUNT_MAX))
        next_cursor = str(rows[count - 1].number) if len(rows) > count else None
        tables = self._tables
        return Trail(
            rows=tuple(rows[:count]), next_cursor=next_cursor, anchor=tables.audit_anchor, head=tables.audit_head
        )

    async def cut_audit(self, *, before: datetime, at: datetime, count_max: int = 200) -> int:
        await self._reached()
        anchor, stored = self._tables.audit_anchor, [row for row, _ in self._tables.audit.values()][:count_max]
        entry = cut_entry(anchor, stored, before_at=instant_text(before), at=instant_text(at))
        if entry is None or entry.cut is None:
            return 0
        last = entry.cut.number
        self._tables.audit = {key: value for key, value in self._tables.audit.items() if value[0].number > last}
        self._tables.audit_anchor = entry.cut
        await self.append_audit((entry,))
        return last - anchor.number

    async def save_snapshot(self, *, label: bytes, body: bytes, saved_at: datetime, service: str = "") -> None:
        await self._reached()
        self._tables.snapshots_count += 1
        number = self._tables.snapshots_count
        self._tables.snapshots[number] = (SnapshotRow(number=number, saved_at=saved_at, label=label), body)
        self._tables.snapshot_services[number] = service

    async def snapshots(self, service: str = "") -> Sequence[SnapshotRow]:
        await self._reached()
        rows = (row for row, _ in reversed(self._tables.snapshots.values()))
        return [row for row in rows if self._tables.snapshot_services[row.number] == service]

    async def snapshot_body(self, number: int) -> bytes | None:
        await self._reached()
        kept = self._tables.snapshots.get(number)
        return None if kept is None else kept[1]

    async def delete_snapshots(self, numbers: Sequence[int]) -> None:
        await self._reached()
        for number in numbers:
            self._tables.snapshots.pop(number, None)

    async def close(self) -> None:
        """Nothing to close."""

    async def _reached(self) -> None:
        """Check that the store can be reached; subclasses fail here."""


def _page(rows: Sequence[T], is_wanted: Sequence[bool], cursor: str | None, count_max: int) -> Page[T]:
    """Return the newest wanted rows before the cursor: the position, from 1, of the last row of the former page."""
    count = max(1, min(count_max, PAGE_COUNT_MAX))
    end = len(rows) if cursor is None else min(len(rows), parse_cursor(cursor) - 1)
    places = [place for place in range(end, 0, -1) if is_wanted[place - 1]]
    given = places[:count]
    next_cursor = str(given[-1]) if len(places) > count else None
    return Page(rows=tuple(rows[place - 1] for place in given), next_cursor=next_cursor)
