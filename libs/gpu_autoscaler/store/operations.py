"""The writes of a store, in SQL for both SQLite and PostgreSQL: one transaction each, independent of a connection.

An operation is a generator: it yields a statement with `?` for values, is sent the rows, and returns the result. A
driver runs it in one transaction, on a thread or on the event loop.
"""

from collections.abc import Generator, Sequence
from datetime import datetime
from typing import TypeVar

import msgspec

from gpu_autoscaler.core.state.ledger import spent_in
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.store.protocol import Acceptance, JobOutcome, RequestRow
from gpu_autoscaler.store.rows import Row, document, instant, number_of

T = TypeVar("T")
Statement = tuple[str, Sequence[object]]
Operation = Generator[Statement, Sequence[Row], T]

_ADD_JOB = """
INSERT INTO jobs (job_id, project_id, request_digest, spec, accepted_at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING RETURNING number
"""
_ADD_SPAN = """
INSERT INTO ledger (provider_id, from_at, to_at, total_micro_usd, idle_micro_usd, fact) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING RETURNING number
"""
_ADD_TO_INSTANCE = """
INSERT INTO charged_instances (provider_id, from_at, last_number, total_micro_usd) VALUES (?, ?, ?, ?)
ON CONFLICT (provider_id) DO UPDATE SET
    last_number = excluded.last_number,
    total_micro_usd = charged_instances.total_micro_usd + excluded.total_micro_usd
"""
_ADD_TO_JOB = """
INSERT INTO charged_jobs (job_id, allocated_micro_usd) VALUES (?, ?)
ON CONFLICT (job_id) DO UPDATE SET
    allocated_micro_usd = charged_jobs.allocated_micro_usd + excluded.allocated_micro_usd
"""
_ADD_TO_PERIOD = """
INSERT INTO charged_periods (period, owner, micro_usd) VALUES (?, ?, ?)
ON CONFLICT (period, owner) DO UPDATE SET micro_usd = charged_periods.micro_usd + excluded.micro_usd
"""
_ADD_REQUEST = """
INSERT INTO requests (idempotency_key, request_digest, started_at) VALUES (?, ?, ?)
ON CONFLICT DO NOTHING RETURNING started_at
"""


def accept_job(spec: JobSpec, request_digest: str, accepted_at: datetime) -> Operation[Acceptance]:
    """Add the job's row unless its id is taken; return whether by the same request."""
    added = yield (_ADD_JOB, (spec.job_id, spec.project_id, request_digest, document(spec), number_of(accepted_at)))
    if added:
        return "accepted"
    ((known,),) = yield "SELECT request_digest FROM jobs WHERE job_id = ?", (spec.job_id,)
    return "same" if known == request_digest else "conflict"


def finish_job(job_id: JobId, outcome: JobOutcome, finished_at: datetime) -> Operation[bool]:
    """Set the job's final state unless it has one; False when the job does not exist."""
    yield (
        "UPDATE jobs SET outcome = ?, finished_at = ? WHERE job_id = ? AND outcome IS NULL",
        (outcome, number_of(finished_at), job_id),
    )
    return bool((yield "SELECT 1 FROM jobs WHERE job_id = ?", (job_id,)))


def record_plan(fact: ScalingPlanMade, made_at: datetime) -> Operation[bool]:
    """Add the plan; False when it is already recorded."""
    added = yield (
        "INSERT INTO plans (plan_id, made_at, fact) VALUES (?, ?, ?) ON CONFLICT DO NOTHING RETURNING number",
        (fact.plan_id, number_of(made_at), document(fact)),
    )
    return bool(added)


def charge(spans: Sequence[CostAccrued]) -> Operation[int]:
    """Add new spans to the ledger and its sums; return how many were new."""
    new_count = 0
    for span in spans:
        new_count += yield from _charge_one(span)
    return new_count


def _charge_one(span: CostAccrued) -> Operation[int]:
    from_at, to_at = number_of(span.from_at), number_of(span.to_at)
    added = yield (
        _ADD_SPAN,
        (span.provider_id, from_at, to_at, span.total_micro_usd, span.idle_micro_usd, document(span)),
    )
    if not added:
        return 0
    ((number,),) = added
    yield _ADD_TO_INSTANCE, (span.provider_id, from_at, number, span.total_micro_usd)
    for share in span.shares:
        if share.job_id is not None:
            yield _ADD_TO_JOB, (share.job_id, share.allocated_micro_usd)
    for period in spent_in(span):
        yield _ADD_TO_PERIOD, period
    return 1


def begin_request(key: str, request_digest: str, started_at: datetime) -> Operation[RequestRow | None]:
    """Claim the key; return None when it was free, otherwise the request that holds it."""
    added = yield (_ADD_REQUEST, (key, request_digest, number_of(started_at)))
    if added:
        return None
    ((digest, started, status, answer),) = yield (
        "SELECT request_digest, started_at, status, answer FROM requests WHERE idempotency_key = ?",
        (key,),
    )
    return msgspec.convert(
        {"request_digest": digest, "started_at": instant(started), "status": status, "answer": answer}, RequestRow
    )


def execute(sql: str, *values: object) -> Operation[int]:
    """Run a single statement; return the number of returned rows."""
    return len((yield sql, values))
