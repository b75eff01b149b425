"""The interface of a store of record. Every implementation passes `tests/contract/store`.

Writes are idempotent: a repeated row is no error and adds no second row. A completed write survives a power cut.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from gpu_autoscaler.events.cost import CostAccrued, Spent
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.audit import EVERY_ENTRY, AuditEntry, AuditFilter, AuditRow, Link
from gpu_autoscaler.model.ids import JobId, PlanId, ProviderId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.observed import Instant

T = TypeVar("T")

PAGE_COUNT_MAX = 1000  # maximum rows per page
CURSOR_LENGTH_MAX = 18  # digits that fit in 64 bits

# accepted: a new row. same: the same request was accepted before. conflict: the id is taken by another request.
Acceptance = Literal["accepted", "same", "conflict"]
JobOutcome = Literal["completed", "failed", "cancelled"]


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted job."""

    spec: JobSpec
    request_digest: str
    accepted_at: Instant
    outcome: JobOutcome | None = None  # None: not finished
    finished_at: Instant | None = None


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs are wanted; None and () do not restrict."""

    project_id: str | None = None
    job_name: str | None = None
    submitted_by: str | None = None
    outcomes: tuple[JobOutcome, ...] = ()
    accepted_from: Instant | None = None
    accepted_before: Instant | None = None

    def wants(self, row: JobRow) -> bool:
        """Return whether the row is wanted."""
        return (
            self.project_id in {None, row.spec.project_id}
            and self.job_name in {None, row.spec.job_name}
            and self.submitted_by in {None, row.spec.submitted_by}
            and (not self.outcomes or row.outcome in self.outcomes)
            and (self.accepted_from is None or row.accepted_at >= self.accepted_from)
            and (self.accepted_before is None or row.accepted_at < self.accepted_before)
        )


EVERY_JOB = JobFilter()


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A published plan."""

    fact: ScalingPlanMade
    made_at: Instant


class LastCharge(msgspec.Struct, frozen=True, kw_only=True):
    """Up to when an instance is charged."""

    last: CostAccrued  # the latest span
    from_at: Instant  # start of the first span: the launch
    total_micro_usd: int  # of all spans


class Expiry(msgspec.Struct, frozen=True, kw_only=True):
    """What is past its retention."""

    ledger_before: Instant  # merged spans, and instances that ended before
    silent_before: Instant  # an instance without a span since then is no longer open
    jobs_before: Instant  # jobs that finished before
    plan_age: timedelta  # plans this much older than the last one


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A REST request with an Idempotency-Key, and its answer once there is one."""

    request_digest: str
    started_at: Instant
    status: int | None = None  # None: in progress, or the process died
    answer: bytes | None = None


class SnapshotRow(msgspec.Struct, frozen=True, kw_only=True):
    """A saved snapshot without its body. `runtime/snapshot_codec.py` decodes the label."""

    number: int  # ascending, never reused
    saved_at: Instant  # wall time
    label: bytes


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Rows, newest first, and the cursor of the next page."""

    rows: tuple[T, ...]
    next_cursor: str | None = None  # None: the last page


class StreamPosition(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a stream: the messages after `after`, up to `until`."""

    stream: str
    after: int
    until: int


class Trail(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of the audit trail, and where its chain begins and ends."""

    rows: tuple[AuditRow, ...]
    next_cursor: str | None = None  # None: the last page
    anchor: Link  # the last entry that retention has removed
    head: Link  # the last entry


def parse_cursor(cursor: str) -> int:
    """Return the row number of a cursor. Raises ValueError for an invalid cursor."""
    if not cursor.isdecimal() or len(cursor) > CURSOR_LENGTH_MAX:
        raise ValueError(f"invalid cursor {cursor!r}; use next_cursor of an earlier page")
    return int(cursor)


class Store(Protocol):
    """The store of record. All methods raise TransientError while it is full, locked or away, and ValueError for an
    invalid cursor."""

    async def accept_job(
        self, spec: JobSpec, *, request_digest: str, accepted_at: datetime, template: bytes | None = None
    ) -> Acceptance:
        """Commit the job's row unless its id is taken. `request_digest` identifies a repetition of the same request.

        `template`: the pod template of its members as JSON; None: the job has the short form.
        """

    async def job_template(self, job_id: JobId) -> bytes | None:
        """Return the pod template of the job as JSON; None for a job without one, and for an unknown job."""

    async def finish_job(self, job_id: JobId, *, outcome: JobOutcome, finished_at: datetime) -> bool:
        """Commit the job's final state; the first one wins. False when the job does not exist."""

    async def job(self, job_id: JobId) -> JobRow | None:
        """Return the job; None when it was never accepted."""

    async def jobs(
        self, wanted: JobFilter = EVERY_JOB, *, cursor: str | None = None, count_max: int = 100
    ) -> Page[JobRow]:
        """Return the wanted jobs, the last accepted first."""

    async def unfinished_jobs(self) -> Sequence[JobRow]:
        """Return every job without a final state, the first accepted first, to rebuild a lost stream."""

    async def record_plan(self, fact: ScalingPlanMade, *, made_at: datetime) -> bool:
        """Commit the plan; False when it is already recorded."""

    async def plan(self, plan_id: PlanId) -> PlanRow | None:
        """Return the plan; None when it was never recorded."""

    async def plans(
        self, *, made_before: datetime | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[PlanRow]:
        """Return plans, by default all, the last recorded first."""

    async def charge(self, spans: Sequence[CostAccrued]) -> int:
        """Commit cost spans of instances in one transaction; return how many were new.

        Spans of one instance with equal start are the same span; the first one wins.
        """

    async def ledger(
        self, *, provider_id: ProviderId | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[CostAccrued]:
        """Return charged spans, the last committed first; of old days one for each instance and day."""

    async def charges_between(self, since: datetime, until: datetime, *, count_max: int) -> Sequence[CostAccrued]:
        """Return charged spans that begin in this time, in no order and at most `count_max`; what is merged to a row of
        an instance and UTC day belongs to that day. Both are starts of UTC days."""

    async def first_charged_at(self) -> datetime | None:
        """Return the start of the first UTC day with a charge, also of one that has expired; None: there is none."""

    async def last_charges(self, also: Collection[ProviderId] = ()) -> Mapping[ProviderId, LastCharge]:
        """Return up to when instances are charged: those that have not ended as far as is known, and these."""

    async def roll_up(self, *, before: datetime, after: str = "") -> str | None:
        """Merge confirmed spans from before the start of a UTC day into one row an instance and day, of at most one
        instance and day a call; sums stay the same. The last span of an instance is not merged.

        `after`: what the last call returned, empty at first. None: everything is merged.
        """

    async def delete_expired(self, expiry: Expiry, *, count_max: int = 200) -> int:
        """Delete what has expired, at most `count_max` rows of each kind; return the largest number of deleted ones, 0
        when none is left. A job goes with its spend, and its id can be used again."""

    async def reclaim_space(self, now: datetime, rolled_before: datetime) -> None:
        """Return unused space to the disk, where the database does not do so itself; everything before `rolled_before`
        is merged."""

    async def confirm_charge(self, span: CostAccrued) -> None:
        """Commit that the span is on the stream."""

    async def unconfirmed_charges(self, count_max: int) -> Sequence[CostAccrued]:
        """Return committed spans not confirmed to be on the stream, oldest first."""

    async def spent_by_job(self) -> Mapping[JobId, int]:
        """Return the allocated cost of each job so far, in micro-dollars."""

    async def spent_by_period(self, since: datetime) -> Sequence[Spent]:
        """Return the cost of each UTC day and month from that of `since` on, by period and owner, in this order."""

    async def begin_request(self, key: str, *, request_digest: str, started_at: datetime) -> RequestRow | None:
        """Claim an Idempotency-Key; return None when it was free, otherwise the request that holds it."""

    async def answer_request(self, key: str, *, status: int, answer: bytes) -> None:
        """Commit the answer for every repetition of the request."""

    async def delete_requests(self, before: datetime) -> int:
        """Delete claims started before; return how many."""

    async def append_audit(self, entries: Sequence[AuditEntry]) -> int:
        """Commit entries to the audit trail, each with the next number; return how many were new by their id."""

    async def audit_position(self, stream: str) -> int:
        """Return up to which sequence the facts of the stream are in the audit trail."""

    async def project_audit(self, entries: Sequence[AuditEntry], position: StreamPosition) -> bool:
        """Commit entries of the facts in this part of a stream, but those whose act has one; False, and nothing is
        committed, if the part does not begin where the trail's position is."""

    async def audit(
        self,
        wanted: AuditFilter = EVERY_ENTRY,
        *,
        cursor: str | None = None,
        count_max: int = 100,
        is_oldest_first: bool = False,
    ) -> Trail:
        """Return the wanted entries, the last first, or the first first. The cursor is the number of the last one."""

    async def cut_audit(self, *, before: datetime, at: datetime, count_max: int = 200) -> int:
        """Remove at most `count_max` of the oldest entries from before this instant, with an entry about it; return
        how many. Raises PermanentError, and removes nothing, if their chain is broken."""

    async def save_snapshot(self, *, label: bytes, body: bytes, saved_at: datetime, service: str = "") -> None:
        """Commit a folded state and its label. `service`: whose memory the body has; empty: the state alone."""

    async def snapshots(self, service: str = "") -> Sequence[SnapshotRow]:
        """Return all snapshots of the service without their bodies, the last saved first."""

    async def snapshot_body(self, number: int) -> bytes | None:
        """Return the body of a snapshot; None when it was deleted."""

    async def delete_snapshots(self, numbers: Sequence[int]) -> None:
        """Delete these snapshots; unknown numbers are ignored."""

    async def close(self) -> None:
        """Finish pending work and close."""
