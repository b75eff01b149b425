"""Converts rows of a store of record. Instants are microseconds since 1970 UTC, documents JSON."""

from datetime import UTC, datetime, timedelta

import msgspec

from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.store.protocol import JobRow, PlanRow, SnapshotRow

Row = tuple[object, ...]

JOB_COLUMNS = "number, spec, request_digest, accepted_at, outcome, finished_at"
PLAN_COLUMNS = "number, made_at, fact"
SPAN_COLUMNS = "number, fact"
SNAPSHOT_COLUMNS = "number, saved_at, label"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

_job_spec_decoder = msgspec.json.Decoder(JobSpec)
_plan_decoder = msgspec.json.Decoder(ScalingPlanMade)
_span_decoder = msgspec.json.Decoder(CostAccrued)
_encoder = msgspec.json.Encoder()


def job(row: Row) -> JobRow:
    """Return the job in a row of JOB_COLUMNS."""
    _, spec, digest, accepted_at, outcome, finished_at = row
    return msgspec.convert(
        {
            "spec": _job_spec_decoder.decode(str(spec)),
            "request_digest": digest,
            "accepted_at": instant(accepted_at),
            "outcome": outcome,
            "finished_at": None if finished_at is None else instant(finished_at),
        },
        JobRow,
    )


def plan(row: Row) -> PlanRow:
    """Return the plan in a row of PLAN_COLUMNS."""
    _, made_at, fact = row
    return PlanRow(fact=_plan_decoder.decode(str(fact)), made_at=instant(made_at))


def span(row: Row) -> CostAccrued:
    """Return the charged span in a row of SPAN_COLUMNS."""
    return _span_decoder.decode(str(row[1]))


def snapshot(row: Row) -> SnapshotRow:
    """Return the snapshot in a row of SNAPSHOT_COLUMNS."""
    number, saved_at, label = row
    return msgspec.convert({"number": number, "saved_at": instant(saved_at), "label": label}, SnapshotRow)


def document(fact: msgspec.Struct) -> str:
    """Return the JSON column for a fact."""
    return _encoder.encode(fact).decode()


def number_of(at: datetime) -> int:
    """Return the column for an instant."""
    return (at - _EPOCH) // _MICROSECOND


def instant(number: object) -> datetime:
    """Return the instant of a column."""
    return _EPOCH + integer(number) * _MICROSECOND


def integer(value: object) -> int:
    """Return a column's integer; any other type is a bug."""
    assert isinstance(value, int), f"the column holds {value!r}, not an integer"  # noqa: S101 - a bug
    return value
