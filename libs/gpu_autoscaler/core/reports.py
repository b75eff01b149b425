"""Capacity that was asked for through `demand.reported`: whether a wish can be meant, and what it asks for.

Called by `fold`, which keeps no wish that cannot be meant, by the scheduler and the gateway, which say so, and by
`core/demand.py`.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.admission import admit
from gpu_autoscaler.core.policy import DEFAULT_POLICY
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, JobSpec, Mistake, ResourceRequest

# Our own. A thousand members are more than a wish without pods should buy; each is an item of every plan.
MEMBERS_COUNT_MAX = 1000
# Our own. Who wants room for longer says so again; a source that died is forgotten after a week.
AHEAD_MAX = timedelta(days=7)
# Our own. Sources come from anybody: the state stays small whatever they send.
SOURCES_COUNT_MAX = 256


def mistakes_of(fact: DemandReported, at: datetime) -> tuple[Mistake, ...]:
    """Return everything that is wrong with a wish said at this instant; empty: it can be meant."""
    read = _read(fact)
    of_shape = () if isinstance(read, JobSpec) else read
    return (*of_shape, *_of_count(fact), *_of_time(fact, at))


def spec_of(fact: DemandReported) -> JobSpec:
    """What each member would be as a job of its own; only for a wish without mistakes."""
    read = _read(fact)
    assert isinstance(read, JobSpec), f"the wish of {fact.source!r} was kept although it cannot be meant"  # noqa: S101 - a bug of ours
    return read


@remembered(SOURCES_COUNT_MAX)
def _read(fact: DemandReported) -> JobSpec | tuple[Mistake, ...]:
    """The wish as an unnamed job: what is right for a job's member is right here. Depends on the fact alone."""
    shape = fact.shape
    request = JobRequested(
        job_name="wish",
        project_id=fact.source,
        gpu_requirements=GpuRequirements(
            gpu_count=shape.gpu_count, gpu_type=shape.gpu_type, gpu_memory_gb=shape.gpu_memory_gb
        ),
        container=ContainerRequest(image="none"),
        priority=fact.priority,
        resources=ResourceRequest(cpu=shape.cpu, memory=shape.memory, ephemeral_storage=shape.ephemeral_storage),
        preemptible=fact.preemptible,
    )
    found = admit(
        request,
        event_id="",
        at=fact.until,
        now=fact.until,
        policy=DEFAULT_POLICY,
        gpu_models=frozenset(),
        gpus_per_node_max=None,
    )
    return found if isinstance(found, JobSpec) else tuple(Mistake(_field(one.field), one.reason) for one in found)


def _field(of_job: str) -> str:
    """The wish's name for a field of a job."""
    if of_job == "project_id":
        return "source"
    return f"shape.{of_job.rpartition('.')[2]}" if "." in of_job else of_job


def _of_count(fact: DemandReported) -> Iterator[Mistake]:
    if fact.count is not None and not 0 <= fact.count <= MEMBERS_COUNT_MAX:
        yield Mistake("count", f"is {fact.count}; say 0 to {MEMBERS_COUNT_MAX} members, or null where it is not known")


def _of_time(fact: DemandReported, at: datetime) -> Iterator[Mistake]:
    if fact.until <= at:
        yield Mistake("until", "is over already; say until when the room is wanted")
    elif fact.until - at > AHEAD_MAX:
        yield Mistake("until", f"is more than {AHEAD_MAX.days} days ahead; say it again when that time has passed")
