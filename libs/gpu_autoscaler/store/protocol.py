"""What a store of record does. Every implementation passes `tests/contract/store`.

Writes are idempotent: the same row again is no error and no second row. When a write returns, it survives a power cut.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from gpu_autoscaler.events.cost import CostAccrued, Spent
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.ids import JobId, PlanId, ProviderId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.observed import Instant

T = TypeVar("T")

PAGE_COUNT_MAX = 1000  # rows of one answer, whatever is asked for
CURSOR_LENGTH_MAX = 18  # digits that surely fit in a database's 64 bits

# accepted: a new row. same: this very request was accepted before. conflict: the id is taken by another request.
Acceptance = Literal["accepted", "same", "conflict"]
JobOutcome = Literal["completed", "failed", "cancelled"]


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted job."""

    spec: JobSpec
    request_digest: str
    accepted_at: Instant
    outcome: JobOutcome | None = None  # None: not finished
    finished_at: Instant | None = None


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as it was published."""

    fact: ScalingPlanMade
    made_at: Instant


class LastCharge(msgspec.Struct, frozen=True, kw_only=True):
    """How far an instance is charged."""

    last: CostAccrued  # the latest span
    from_at: Instant  # where the first span began: the launch
    total_micro_usd: int  # of all spans


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A REST request with an Idempotency-Key, and its answer once there is one."""

    request_digest: str
    begun_at: Instant
    status: int | None = None  # None: still being answered, or the process died over it
    answer: bytes | None = None


class SnapshotRow(msgspec.Struct, frozen=True, kw_only=True):
    """A kept state, without its body. What the label says is the runtime's affair (`runtime/snapshot_codec.py`)."""

    number: int  # counts up, never given twice
    kept_at: Instant  # wall time
    label: bytes


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Rows, newest first, and where to go on."""

    rows: tuple[T, ...]
    next_cursor: str | None = None  # None: these were the last


def place_of(cursor: str) -> int:
    """Return the row's number that a cursor stands for. Raises ValueError for a cursor that no store gave."""
    if not cursor.isdecimal() or len(cursor) > CURSOR_LENGTH_MAX:
        raise ValueError(f"no cursor of ours: {cursor!r}; use the next_cursor of an earlier page")
    return int(cursor)


class Store(Protocol):
    """The store of record. All methods raise TransientError while it is full, locked or away; ValueError for a cursor
    that it never gave."""

    async def accept_job(self, spec: JobSpec, *, request_digest: str, accepted_at: datetime) -> Acceptance:
        """Commit the job's row, unless its id is taken. `request_digest` tells the same request from another one."""
        ...

    async def finish_job(self, job_id: JobId, *, outcome: JobOutcome, finished_at: datetime) -> bool:
        """Commit the job's final state; the first one stands. False when there is no such job."""
        ...

    async def job(self, job_id: JobId) -> JobRow | None:
        """Return the job; None when it was never accepted."""
        ...

    async def jobs(
        self, *, project_id: str | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[JobRow]:
        """Return jobs, the last accepted first."""
        ...

    async def unfinished_jobs(self) -> Sequence[JobRow]:
        """Return every job without a final state, the first accepted first: what a lost stream is rebuilt from."""
        ...

    async def record_plan(self, fact: ScalingPlanMade, *, made_at: datetime) -> bool:
        """Commit the plan; False when it is recorded already."""
        ...

    async def plan(self, plan_id: PlanId) -> PlanRow | None:
        """Return the plan; None when it was never recorded."""
        ...

    async def plans(self, *, cursor: str | None = None, count_max: int = 100) -> Page[PlanRow]:
        """Return plans, the last recorded first."""
        ...

    async def charge(self, spans: Sequence[CostAccrued]) -> int:
        """Commit spans of instances' cost in one transaction; return how many were new.

        A span that begins where a committed one of the same instance begins is that one, whatever it says.
        """
        ...

    async def ledger(
        self, *, provider_id: ProviderId | None = None, cursor: str | None = None, count_max: int = 100
    ) -> Page[CostAccrued]:
        """Return charged spans, the last committed first."""
        ...

    async def last_charges(self) -> Mapping[ProviderId, LastCharge]:
        """Return how far each instance is charged."""
        ...

    async def confirm_charge(self, span: CostAccrued) -> None:
        """Commit that the stream has this span."""
        ...

    async def unconfirmed_charges(self, count_max: int) -> Sequence[CostAccrued]:
        """Return committed spans of which nobody knows whether the stream has them, oldest first."""
        ...

    async def spent_by_job(self) -> Mapping[JobId, int]:
        """Return what each job was allocated so far, in micro-dollars."""
        ...

    async def spent_by_period(self, since: datetime) -> Sequence[Spent]:
        """Return what was charged in each day and month of UTC from that of `since` on, by owner, in that order."""
        ...

    async def begin_request(self, key: str, *, request_digest: str, begun_at: datetime) -> RequestRow | None:
        """Claim an Idempotency-Key; None when it was free, else the request that holds it."""
        ...

    async def answer_request(self, key: str, *, status: int, answer: bytes) -> None:
        """Commit the answer that every repeat of the request gets."""
        ...

    async def forget_requests(self, before: datetime) -> int:
        """Drop claims that were begun before; return how many."""
        ...

    async def save_snapshot(self, *, label: bytes, body: bytes, kept_at: datetime) -> None:
        """Commit a folded state and what it stands for."""
        ...

    async def snapshots(self) -> Sequence[SnapshotRow]:
        """Return all that are kept, the last kept first, without their bodies."""
        ...

    async def snapshot_body(self, number: int) -> bytes | None:
        """Return the state that was kept under this number; None when it is forgotten."""
        ...

    async def delete_snapshots(self, numbers: Sequence[int]) -> None:
        """Drop these; numbers that are not there are no mistake."""
        ...

    async def close(self) -> None:
        """Finish what is under way and leave."""
        ...
