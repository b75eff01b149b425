"""What did an interval cost, how long did jobs wait, how many nodes were there?

Measured from facts alone, the same way for recorded and simulated facts.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPreempted, JobQueued, JobStarted
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.runtime.history import Stored

ALL = "all"
_NAMES = {value: name for name, value in PRIORITY_NAMES.items()}
_HOUR = timedelta(hours=1)


class WaitTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Wait from acceptance to first start; a job that did not start waits until the end of the interval."""

    jobs_count: int
    mean_seconds: float
    p95_seconds: float
    max_seconds: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an interval."""

    cost_micro_usd: int
    price_unknown_count: int  # machines without a known price, missing in the sum
    node_hours: float
    nodes_count_max: int
    jobs_count: int
    started_count: int
    finished_count: int
    interrupted_count: int  # attempts lost to preemption
    waiting: dict[str, WaitTimes]  # by priority, and `all`
    nodes: tuple[tuple[Instant, int], ...]  # (from, number of billed machines)
    queue: tuple[tuple[Instant, int], ...]  # (from, number of jobs waiting for their first start)


class Work(msgspec.Struct):
    """A job, or a pod counted as a job."""

    priority: int | None  # None: not a job of ours
    queued_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A billed machine."""

    from_at: Instant
    to_at: Instant | None  # None: still running
    price_micro_usd_per_hour: int | None


def measure(facts: Iterable[Stored], from_at: datetime, to_at: datetime, before: ClusterState = EMPTY_STATE) -> Outcome:
    """Return the figures of the interval. `before` is the state ahead of the first fact."""
    machines = dict(before.instances)
    jobs: dict[JobId, Work] = {
        job_id: Work(
            priority=record.queued.spec.priority,
            queued_at=record.queued.queued_at,
            started_at=None if record.started is None else record.started.started_at,
            finished_at=None if record.finished is None else record.finished.finished_at,
        )
        for job_id, record in before.jobs.items()
        if record.queued is not None
    }
    interrupted_count = 0
    for stored in facts:
        if stored.at > to_at:
            continue
        fact = stored.recorded.fact
        if isinstance(fact, NodeInstanceObserved):
            known = machines.get(fact.provider_id)
            if known is None or known.version < fact.version:
                machines[fact.provider_id] = fact
        elif isinstance(fact, JobQueued):
            jobs.setdefault(fact.job_id, Work(priority=fact.spec.priority, queued_at=fact.queued_at))
        elif isinstance(fact, JobPreempted):
            interrupted_count += stored.at >= from_at
        else:
            _note(fact, jobs)
    billed = (
        Machine(
            from_at=instance.launched_at,
            to_at=instance.terminated_at,
            price_micro_usd_per_hour=instance.price_micro_usd_per_hour,
        )
        for instance in machines.values()
    )
    return outcome_of(billed, jobs.values(), interrupted_count, from_at, to_at)


def _note(fact: object, jobs: dict[JobId, Work]) -> None:
    if isinstance(fact, JobStarted) and (job := jobs.get(fact.job_id)) is not None:
        job.started_at = job.started_at or fact.started_at
    elif isinstance(fact, JobFinished) and (job := jobs.get(fact.job_id)) is not None:
        job.finished_at = job.finished_at or fact.finished_at


def outcome_of(
    machines: Iterable[Machine], work: Iterable[Work], interrupted_count: int, from_at: datetime, to_at: datetime
) -> Outcome:
    """Return the figures of these machines and jobs in the interval."""
    spans = [
        (machine, max(machine.from_at, from_at), min(machine.to_at or to_at, to_at))
        for machine in machines
        if (machine.to_at or to_at) > from_at and machine.from_at < to_at
    ]
    jobs = [job for job in work if (job.finished_at or to_at) > from_at]
    waited: defaultdict[str, list[float]] = defaultdict(list)
    for job in jobs:
        if job.finished_at is not None and job.started_at is None:
            continue  # canceled before its start: not a wait
        seconds = max(0.0, ((job.started_at or to_at) - job.queued_at).total_seconds())
        if job.priority is not None:
            waited[_NAMES.get(job.priority, str(job.priority))].append(seconds)
        waited[ALL].append(seconds)
    nodes = _steps([(begin, end) for _, begin, end in spans], from_at, to_at)
    return Outcome(
        cost_micro_usd=sum(
            cost_micro_usd(price, end - begin)
            for machine, begin, end in spans
            if (price := machine.price_micro_usd_per_hour) is not None
        ),
        price_unknown_count=sum(machine.price_micro_usd_per_hour is None for machine, _, _ in spans),
        node_hours=sum((end - begin) / _HOUR for _, begin, end in spans),
        nodes_count_max=max((count for _, count in nodes), default=0),
        jobs_count=len(jobs),
        started_count=sum(job.started_at is not None for job in jobs),
        finished_count=sum(job.finished_at is not None for job in jobs),
        interrupted_count=interrupted_count,
        waiting={name: _waiting(seconds) for name, seconds in sorted(waited.items(), key=_urgent_first)},
        nodes=nodes,
        queue=_steps(
            [(max(job.queued_at, from_at), job.started_at or job.finished_at or to_at) for job in jobs], from_at, to_at
        ),
    )


def _urgent_first(item: tuple[str, Sequence[float]]) -> tuple[int, str]:
    name = item[0]
    value = PRIORITY_NAMES.get(name)
    if value is None:
        value = int(name) if name.isdigit() else -1  # `all` is last
    return (-value, name)


def _waiting(seconds: Sequence[float]) -> WaitTimes:
    ranked = sorted(seconds)
    return WaitTimes(
        jobs_count=len(ranked),
        mean_seconds=sum(ranked) / len(ranked),
        p95_seconds=ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))],
        max_seconds=ranked[-1],
    )


def _steps(
    spans: Sequence[tuple[datetime, datetime]], from_at: datetime, to_at: datetime
) -> tuple[tuple[Instant, int], ...]:
    """Return (instant, number of open spans) at the start and at each change."""
    changes: defaultdict[datetime, int] = defaultdict(int)
    for begin, end in spans:
        if end > begin:
            changes[begin] += 1
            changes[end] -= 1
    count, steps = 0, [(from_at, 0)]
    for at, change in sorted(changes.items()):
        count += change
        if at <= from_at:
            steps = [(from_at, count)]
        elif change and at < to_at:
            steps.append((at, count))
    return tuple(steps)
