"""Deadlines of jobs: a request is accepted if it can be met by the estimate of this moment, else refused with it.

The queue honors an accepted deadline by order: at equal priority the earliest start goes first. A job that has to
finish has to start its run time before; that is the predicted one, or its time limit.
"""

from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.estimates import Estimates, likely_seconds
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.estimates import Estimate
from gpu_autoscaler.model.format import duration, instant
from gpu_autoscaler.model.jobs import JobSpec, Violation


def with_start_deadline(spec: JobSpec, state: ClusterState) -> JobSpec:
    """Return the job with the latest start that its deadlines allow, by which the queue orders it."""
    if spec.finish_by_at is None:
        return spec
    latest_at = spec.finish_by_at - timedelta(seconds=likely_seconds(spec, state))
    return msgspec.structs.replace(spec, start_by_at=min(spec.start_by_at or latest_at, latest_at))


def deadline_violations(
    spec: JobSpec, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> tuple[Violation, ...]:
    """Return the deadlines of a new job that cannot be met. An unknown start refuses only what is over already."""
    if spec.start_by_at is None and spec.finish_by_at is None:
        return ()
    estimate = Estimates(state, policy, as_of).of_new(spec)
    start_at = max(as_of, estimate.start_at or estimate.start_at_earliest or as_of)
    violations: list[Violation] = []
    if spec.start_by_at is not None and start_at > spec.start_by_at:
        reason = f"is {instant(spec.start_by_at)}, but {_start(start_at, estimate)}; set a later time"
        violations.append(Violation("start_by_at", reason))
    seconds = likely_seconds(spec, state)
    end_at = start_at + timedelta(seconds=seconds)
    if spec.finish_by_at is not None and end_at > spec.finish_by_at:
        runs = f"and it runs for {duration(seconds)}, to {instant(end_at)}"
        reason = (
            f"is {instant(spec.finish_by_at)}, but {_start(start_at, estimate)}, {runs}; set a later time, or a shorter"
            " max_duration_hours"
        )
        violations.append(Violation("finish_by_at", reason))
    return tuple(violations)


def _start(start_at: datetime, estimate: Estimate) -> str:
    why = estimate.why.rstrip(".")
    return f"the job is expected to start at {instant(start_at)} ({why[:1].lower()}{why[1:]})"
