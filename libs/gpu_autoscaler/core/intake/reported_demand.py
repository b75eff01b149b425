"""Reported demand (`demand.reported`): its validation, and the reports that the state keeps.

`fold` ignores invalid reports; the scheduler and the gateway reject them.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.intake.admission import UNKNOWN_SUPPLY, admit
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY
from gpu_autoscaler.core.state.state import ReportedDemandRecord
from gpu_autoscaler.core.state.tables import Batch
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, JobSpec, ResourceRequest, Violation

# Project default. Every member is a demand item of every plan.
MEMBERS_COUNT_MAX = 1000
# Project default. A source repeats its report for longer demand; a dead source is forgotten after a week.
AHEAD_MAX = timedelta(days=7)
# Project default. Anybody may report; it bounds the state.
SOURCES_COUNT_MAX = 256
_ANY_TIME = datetime(2026, 1, 1, tzinfo=UTC)  # the time of a report is judged apart from its shape


def violations_of(fact: DemandReported, at: datetime) -> tuple[Violation, ...]:
    """Return every violation of a report made at this instant; empty: it is valid."""
    parsed = _parse(fact)
    shape_violations = () if isinstance(parsed, JobSpec) else parsed
    return (*shape_violations, *_count_violations(fact), *_time_violations(fact, at))


def spec_of(fact: DemandReported) -> JobSpec:
    """Return each member as a job; only for a valid report."""
    parsed = _parse(fact)
    assert isinstance(parsed, JobSpec), f"invalid report of {fact.source!r} in the state"  # noqa: S101 - a bug
    return parsed


def fold_reported_demand(batch: Batch, fact: DemandReported, at: datetime, sequence: int) -> None:
    """Keep the last valid report of each source; a report with unknown count changes nothing.

    The last one by sequence in the stream. Anybody may publish reports with any date, so they do not advance the time
    of the stream. Readers skip expired reports; above SOURCES_COUNT_MAX the one that expires first is removed.
    """
    if fact.count is None or violations_of(fact, at):
        return
    reports = batch.reported_demand
    known = reports.now.get(fact.source)
    if known is not None and known.sequence >= sequence:
        return
    reports.set(fact.source, ReportedDemandRecord(reported=fact, reported_at=at, sequence=sequence))
    if len(reports.now) > SOURCES_COUNT_MAX:
        reports.remove(min(reports.now, key=lambda source: (reports.now[source].reported.until, source)))


@cached_by_identity(SOURCES_COUNT_MAX)
def _parse(fact: DemandReported) -> JobSpec | tuple[Violation, ...]:
    """Parse the report as a job, so that the rules of jobs apply. Depends on the fact only."""
    shape = fact.shape
    request = JobRequested(
        job_name="reported-demand",
        project_id=fact.source,
        gpu_requirements=GpuRequirements(
            gpu_count=shape.gpu_count, gpu_type=shape.gpu_type, gpu_memory_gb=shape.gpu_memory_gb
        ),
        container=ContainerRequest(image="none"),
        priority=fact.priority,
        resources=ResourceRequest(cpu=shape.cpu, memory=shape.memory, ephemeral_storage=shape.ephemeral_storage),
        preemptible=fact.preemptible,
    )
    result = admit(request, event_id="", at=_ANY_TIME, now=_ANY_TIME, policy=DEFAULT_POLICY, supply=UNKNOWN_SUPPLY)
    if isinstance(result, JobSpec):
        return result
    return tuple(Violation(_field(violation.field), violation.reason) for violation in result)


def _field(job_field: str) -> str:
    if job_field == "project_id":
        return "source"
    return f"shape.{job_field.rpartition('.')[2]}" if "." in job_field else job_field


def _count_violations(fact: DemandReported) -> Iterator[Violation]:
    if fact.count is not None and not 0 <= fact.count <= MEMBERS_COUNT_MAX:
        yield Violation("count", f"is {fact.count}; must be 0 to {MEMBERS_COUNT_MAX}, or null if unknown")


def _time_violations(fact: DemandReported, at: datetime) -> Iterator[Violation]:
    if fact.until <= at:
        yield Violation("until", "is in the past; set the end of the demand")
    elif fact.until - at > AHEAD_MAX:
        yield Violation("until", f"is more than {AHEAD_MAX.days} days ahead; report again later")
