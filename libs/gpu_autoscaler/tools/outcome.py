"""What a time cost, how long its work waited, and which nodes there were, measured from facts alone: the same for what
was recorded and for what a model says would have been.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPreempted, JobQueued, JobStarted
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.tools.history import Stored

ALL = "all"
_NAMES = {value: name for name, value in PRIORITY_NAMES.items()}
_HOUR = timedelta(hours=1)


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """From a job's acceptance to its first start; who did not start waited to the end."""

    jobs_count: int
    mean_seconds: float
    p95_seconds: float
    max_seconds: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a time."""

    cost_micro_usd: int
    price_unknown_count: int  # machines without a price: they cost something, and are not in the sum
    node_hours: float
    nodes_count_max: int
    jobs_count: int
    started_count: int
    finished_count: int
    interrupted_count: int  # attempts that were lost
    waiting: dict[str, Waiting]  # by priority, and `all`
    nodes: tuple[tuple[Instant, int], ...]  # from each instant on, so many machines were paid for
    queue: tuple[tuple[Instant, int], ...]  # from each instant on, so many jobs waited for their first start


class Work(msgspec.Struct):
    """A job, or a pod that is one."""

    priority: int | None  # None: not one of ours
    queued_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What was paid for."""

    from_at: Instant
    to_at: Instant | None  # None: it goes on
    price_micro_usd_per_hour: int | None


def measure(facts: Iterable[Stored], from_at: datetime, to_at: datetime, before: ClusterState = EMPTY_STATE) -> Outcome:
    """Return the figures from one instant to another. `before`: what was known ahead of the first of the facts."""
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
    for each in facts:
        if each.at > to_at:
            continue
        fact = each.recorded.fact
        if isinstance(fact, NodeInstanceObserved):
            known = machines.get(fact.provider_id)
            if known is None or known.version < fact.version:
                machines[fact.provider_id] = fact
        elif isinstance(fact, JobQueued):
            jobs.setdefault(fact.job_id, Work(priority=fact.spec.priority, queued_at=fact.queued_at))
        elif isinstance(fact, JobPreempted):
            interrupted_count += each.at >= from_at
        else:
            _note(fact, jobs)
    paid = (
        Machine(from_at=one.launched_at, to_at=one.terminated_at, price_micro_usd_per_hour=one.price_micro_usd_per_hour)
        for one in machines.values()
    )
    return summed(paid, jobs.values(), interrupted_count, from_at, to_at)


def _note(fact: object, jobs: dict[JobId, Work]) -> None:
    if isinstance(fact, JobStarted) and (job := jobs.get(fact.job_id)) is not None:
        job.started_at = job.started_at or fact.started_at
    elif isinstance(fact, JobFinished) and (job := jobs.get(fact.job_id)) is not None:
        job.finished_at = job.finished_at or fact.finished_at


def summed(
    machines: Iterable[Machine], work: Iterable[Work], interrupted_count: int, from_at: datetime, to_at: datetime
) -> Outcome:
    """Return the figures of these machines and this work from one instant to another."""
    spans = [
        (machine, max(machine.from_at, from_at), min(machine.to_at or to_at, to_at))
        for machine in machines
        if (machine.to_at or to_at) > from_at and machine.from_at < to_at
    ]
    ours = [each for each in work if (each.finished_at or to_at) > from_at]
    waited: defaultdict[str, list[float]] = defaultdict(list)
    for each in ours:
        if each.finished_at is not None and each.started_at is None:
            continue  # cancelled before it began: it waited for nothing
        seconds = max(0.0, ((each.started_at or to_at) - each.queued_at).total_seconds())
        if each.priority is not None:
            waited[_NAMES.get(each.priority, str(each.priority))].append(seconds)
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
        jobs_count=len(ours),
        started_count=sum(each.started_at is not None for each in ours),
        finished_count=sum(each.finished_at is not None for each in ours),
        interrupted_count=interrupted_count,
        waiting={name: _waiting(seconds) for name, seconds in sorted(waited.items(), key=_urgent_first)},
        nodes=nodes,
        queue=_steps(
            [(max(each.queued_at, from_at), each.started_at or each.finished_at or to_at) for each in ours],
            from_at,
            to_at,
        ),
    )


def _urgent_first(item: tuple[str, Sequence[float]]) -> tuple[int, str]:
    name = item[0]
    value = PRIORITY_NAMES.get(name)
    if value is None:
        value = int(name) if name.isdigit() else -1  # `all` comes last
    return (-value, name)


def _waiting(seconds: Sequence[float]) -> Waiting:
    ranked = sorted(seconds)
    return Waiting(
        jobs_count=len(ranked),
        mean_seconds=sum(ranked) / len(ranked),
        p95_seconds=ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))],
        max_seconds=ranked[-1],
    )


def _steps(
    spans: Sequence[tuple[datetime, datetime]], from_at: datetime, to_at: datetime
) -> tuple[tuple[Instant, int], ...]:
    """Return how many spans are open from each instant on at which that changes."""
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
