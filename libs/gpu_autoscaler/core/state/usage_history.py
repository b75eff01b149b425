"""GPU time of jobs by owner, in parts of six hours. Folded from JOB alone, when an attempt ends.

An attempt counts from its placement to its end, with the GPUs of all placed members; a share of a GPU counts as one
GPU. Sums are integers, so the order of attempts does not matter. Readers add the time of running attempts. Queues read
it for fair share, with the weight of its age; quotas read it by UTC month, which begins with a part.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.policy.quota_settings import project_owner, user_owner
from gpu_autoscaler.core.state.state import JobRecord
from gpu_autoscaler.core.state.tables import Batch
from gpu_autoscaler.model.jobs import JobSpec

PART_HOURS = 6
# More than four of the longest half-lives of a queue: a sixteenth of the weight is left.
PARTS_KEPT_COUNT = 60 * 24 // PART_HOURS
# Project default: above it, the owners without recent GPU time are forgotten first.
OWNERS_COUNT_MAX = 4000
# What forgotten projects and users used together. It counts for the quota of each owner without an entry: at most too
# much, never too little.
OTHERS = "others"
WHOLE = 1 << 16  # weight of GPU time of this part
_PART = timedelta(hours=PART_HOURS)
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MEMBER = "member/"


class Attempt(NamedTuple):
    """GPUs held by one attempt of a job."""

    number: int
    gpu_count: int
    placed_at: datetime
    ended_at: datetime | None  # None: it holds them still


def member_owner(project: str, user: str) -> str:
    """Return the key of a user in a project; jobs of unknown users have one key."""
    return f"{_MEMBER}{project}/{user}"


def owners_of(spec: JobSpec) -> tuple[str, str, str]:
    """Return the keys that a job's GPU time counts for: project, user, and user within the project."""
    project, user = spec.project_id, spec.submitted_by
    return project_owner(project), user_owner(user), member_owner(project, user)


def gpus_of_member(spec: JobSpec) -> int:
    """Return the GPUs of each member; a share of a GPU counts as one."""
    return spec.member_resources.gpu_count + sum(count for _, count in spec.member_resources.slices)


def last_attempt(job: JobRecord) -> Attempt | None:
    """Return the last placement of the job; None: it was never placed, or its request is unknown."""
    placed, preempted = job.placed, job.preempted
    if placed is None or job.queued is None:
        return None
    ended_at = None if job.finished is None else job.finished.finished_at
    if preempted is not None and preempted.attempt >= placed.attempt:
        ended_at = preempted.preempted_at
    gpu_count = len(placed.node_uids) * gpus_of_member(job.queued.spec)
    return Attempt(placed.attempt, gpu_count, placed.placed_at, ended_at)


def fold_usage(batch: Batch, before: JobRecord, after: JobRecord) -> None:
    """Add the GPU time of the attempt that ended between these two records of a job. Repeats find it ended."""
    known, now = last_attempt(before), last_attempt(after)
    newest = batch.newest.get("job")
    if now is None or now.ended_at is None or after.queued is None or newest is None:
        return
    is_same = known is not None and known.number == now.number
    if is_same and known is not None and known.ended_at is not None:
        return
    oldest = part_of(newest) - PARTS_KEPT_COUNT
    spec = after.queued.spec
    parts = [entry for entry in time_in_parts(now.placed_at, now.ended_at) if entry[0] > oldest]
    used = {part: now.gpu_count * microseconds for part, microseconds in parts}
    if not used or not now.gpu_count:
        return
    for owner in owners_of(spec):
        _add(batch, owner, used)
    _forget_owners(batch)


def _add(batch: Batch, owner: str, used: Mapping[int, int]) -> None:
    usage = dict(batch.gpu_time.get(owner) or {})
    for part, amount in used.items():
        usage[part] = usage.get(part, 0) + amount
    batch.gpu_time.set(owner, usage)


def _forget_owners(batch: Batch) -> None:
    known = batch.gpu_time.now
    excess = len(known) - OWNERS_COUNT_MAX
    if excess <= 0:
        return
    named = (owner for owner in known if owner != OTHERS)
    for owner in sorted(named, key=lambda owner: (max(known[owner]), sum(known[owner].values()), owner))[:excess]:
        used = known[owner]
        batch.gpu_time.remove(owner)
        if not owner.startswith(_MEMBER):
            _add(batch, OTHERS, used)


def prune_usage(batch: Batch, newest: datetime) -> None:
    """Forget what is too old to count."""
    oldest = part_of(newest) - PARTS_KEPT_COUNT
    for owner, usage in tuple(batch.gpu_time.now.items()):
        kept = {part: amount for part, amount in usage.items() if part > oldest}
        if not kept:
            batch.gpu_time.remove(owner)
        elif len(kept) < len(usage):
            batch.gpu_time.set(owner, kept)


def part_of(at: datetime) -> int:
    """Return the number of the part since 1970."""
    return (at - _EPOCH) // _PART


def time_in_parts(start: datetime, end: datetime) -> Iterator[tuple[int, int]]:
    """Yield each part of the span and the microseconds in it, at most the last PARTS_KEPT_COUNT parts; none for an
    empty span."""
    for part in range(max(part_of(start), part_of(end) - PARTS_KEPT_COUNT), part_of(end) + 1):
        first = _EPOCH + part * _PART
        microseconds = (min(end, first + _PART) - max(start, first)) // _MICROSECOND
        if microseconds > 0:
            yield part, microseconds


def time_between(usage: Mapping[int, int], begin: datetime, end: datetime) -> int:
    """Return the microseconds of GPU time in the parts between these instants, each the beginning of a part."""
    return sum(amount for part, amount in usage.items() if part_of(begin) <= part < part_of(end))


def weight(age_hours: float, half_life_hours: float) -> int:
    """Return the weight of GPU time of this age: half per half-life, linear in between."""
    halvings, rest = divmod(max(0.0, age_hours), half_life_hours)
    whole = WHOLE >> int(halvings)
    return whole - int(whole * rest / (2 * half_life_hours))


def weighted(usage: Mapping[int, int], as_of: datetime, half_life_hours: float) -> int:
    """Return the microseconds of GPU time, each part with the weight of its age."""
    now = part_of(as_of)
    return sum(amount * weight((now - part) * PART_HOURS, half_life_hours) for part, amount in usage.items())
