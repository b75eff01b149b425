"""The writes of a store, in SQL for both SQLite and PostgreSQL: one transaction each, independent of a connection.

An operation is a generator: it yields a statement with `?` for values, is sent the rows, and returns the result. A
driver runs it in one transaction, on a thread or on the event loop.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from datetime import datetime
from typing import TypeVar

import msgspec

from gpu_autoscaler.core.state.ledger import spent_in
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.ids import JobId, ProviderId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.store.protocol import Acceptance, JobOutcome, RequestRow
from gpu_autoscaler.store.rows import Row, document, instant, integer, number_of

T = TypeVar("T")
Statement = tuple[str, Sequence[object]]
Operation = Generator[Statement, Sequence[Row], T]

_ADD_JOB = """
INSERT INTO jobs (job_id, project_id, request_digest, spec, accepted_at, template) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING RETURNING number
"""
_ROLLED = "SELECT provider_id, rolled_until FROM charged_instances WHERE rolled_until > 0 AND provider_id IN ({})"
_ADD_SPANS = """
INSERT INTO ledger (provider_id, from_at, to_at, total_micro_usd, idle_micro_usd, fact) VALUES {}
ON CONFLICT DO NOTHING RETURNING number, provider_id, from_at
"""
_ADD_TO_INSTANCES = """
INSERT INTO charged_instances (provider_id, from_at, last_number, total_micro_usd, is_open) VALUES {}
ON CONFLICT (provider_id) DO UPDATE SET
    last_number = excluded.last_number,
    total_micro_usd = charged_instances.total_micro_usd + excluded.total_micro_usd,
    is_open = excluded.is_open
"""
_ADD_TO_JOBS = """
INSERT INTO charged_jobs (job_id, allocated_micro_usd) VALUES {}
ON CONFLICT (job_id) DO UPDATE SET
    allocated_micro_usd = charged_jobs.allocated_micro_usd + excluded.allocated_micro_usd
"""
_ADD_TO_PERIODS = """
INSERT INTO charged_periods (period, owner, micro_usd) VALUES {}
ON CONFLICT (period, owner) DO UPDATE SET micro_usd = charged_periods.micro_usd + excluded.micro_usd
"""
ROWS_COUNT_MAX = 200  # of one statement: databases limit its values, and each number of rows is a statement to prepare
_ADD_REQUEST = """
INSERT INTO requests (idempotency_key, request_digest, started_at) VALUES (?, ?, ?)
ON CONFLICT DO NOTHING RETURNING started_at
"""


def accept_job(
    spec: JobSpec, request_digest: str, accepted_at: datetime, template: bytes | None
) -> Operation[Acceptance]:
    """Add the job's row unless its id is taken; return whether by the same request."""
    text = None if template is None else template.decode()
    values = (spec.job_id, spec.project_id, request_digest, document(spec), number_of(accepted_at), text)
    added = yield (_ADD_JOB, values)
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
    for part in batched(spans):
        new_count += yield from _charge_part(part)
    return new_count


def _charge_part(spans: Sequence[CostAccrued]) -> Operation[int]:
    """A statement a table, not a span: at 1,000 nodes a minute has 1,000 spans with six sums each."""
    provider_ids = sorted({span.provider_id for span in spans})
    rolled = yield _ROLLED.format(places(len(provider_ids))), provider_ids
    rolled_until = {provider_id: integer(until) for provider_id, until in rolled}
    by_key = {(span.provider_id, number_of(span.from_at)): span for span in reversed(spans)}  # the first one wins
    rows = [
        (*key, number_of(span.to_at), span.total_micro_usd, span.idle_micro_usd, document(span))
        for key, span in reversed(by_key.items())
        if key[1] >= rolled_until.get(span.provider_id, key[1])
    ]
    added = (yield insert(_ADD_SPANS, rows)) if rows else ()
    instances: dict[ProviderId, tuple[object, ...]] = {}
    jobs: Counter[JobId] = Counter()
    periods: Counter[tuple[str, str]] = Counter()
    for number, provider_id, from_at in sorted(added, key=lambda row: integer(row[0])):
        span = by_key[ProviderId(str(provider_id)), integer(from_at)]
        _, first_at, _, total, _ = instances.get(span.provider_id, ("", from_at, 0, 0, 0))
        total = integer(total) + span.total_micro_usd
        instances[span.provider_id] = (span.provider_id, first_at, number, total, int(not span.is_final))
        for share in span.shares:
            if share.job_id is not None:
                jobs[share.job_id] += share.allocated_micro_usd
        for period, owner, amount in spent_in(span):
            periods[period, owner] += amount
    sums: list[tuple[str, list[tuple[object, ...]]]] = [
        (_ADD_TO_INSTANCES, list(instances.values())),
        (_ADD_TO_JOBS, sorted(jobs.items())),
        (_ADD_TO_PERIODS, [(*key, amount) for key, amount in sorted(periods.items())]),
    ]
    for query, values in sums:
        for part in batched(values):
            yield insert(query, part)
    return len(added)


def batched(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items in parts of at most ROWS_COUNT_MAX."""
    return (items[start : start + ROWS_COUNT_MAX] for start in range(0, len(items), ROWS_COUNT_MAX))


def places(count: int) -> str:
    """Return this number of places for values."""
    return ", ".join("?" * count)


def insert(query: str, values: Sequence[Sequence[object]]) -> Statement:
    """Return a statement that inserts these rows at once."""
    row = f"({places(len(values[0]))})"
    return query.format(", ".join([row] * len(values))), tuple(value for row_values in values for value in row_values)


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
