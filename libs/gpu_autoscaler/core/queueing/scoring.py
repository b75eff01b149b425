"""Estimates to publish: one per waiting job, its score when the job starts, and that of its run time when it completed.
Used by the scheduler.

Scores compare with the published estimate, which is never computed again.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from itertools import islice

from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.gpu_slices import member_price
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.estimates import Estimates
from gpu_autoscaler.core.state.duration_history import run_seconds_of
from gpu_autoscaler.core.state.queries import is_waiting
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.job import JobEstimated, JobEstimateScored, RunScore
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.money import cost_micro_usd

PUBLISHED_AT_ONCE_MAX = 500  # per tick; the rest follows in the next tick


def estimates_due(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> tuple[JobEstimated | JobEstimateScored, ...]:
    """Return the first estimate of each waiting job, and the scores of started and completed jobs."""
    new = [job_id for job_id, job in state.jobs.items() if is_waiting(job) and job.estimated is None]
    facts: list[JobEstimated | JobEstimateScored] = []
    if new and state.pods_synced is not None and state.nodes_synced is not None:
        estimates = Estimates(state, policy, as_of)
        for job_id in new[:PUBLISHED_AT_ONCE_MAX]:
            estimate = estimates.of(job_id)
            if estimate is not None:
                facts.append(JobEstimated(job_id=job_id, estimate=estimate, estimated_at=as_of))
    completed = [(job_id, job) for job_id, job in state.jobs.items() if job.finished and not job.run_scored]
    scores = (run_score(job_id, job, as_of) for job_id, job in completed)
    facts += islice(filter(None, scores), PUBLISHED_AT_ONCE_MAX)
    started = [(job_id, job) for job_id, job in state.jobs.items() if is_to_be_scored(job)]
    views = {view.name: view for view in node_views(state, as_of)} if started else {}
    return (*facts, *(_score(job_id, job, views, as_of) for job_id, job in started[:PUBLISHED_AT_ONCE_MAX]))


def is_to_be_scored(job: JobRecord) -> bool:
    """True for a started job with an estimate that is not scored."""
    return job.estimated is not None and job.started is not None and job.scored is None


def run_score(job_id: JobId, job: JobRecord, as_of: datetime) -> JobEstimateScored | None:
    """Return the score of the published prediction; None: there was none, or the run time is unknown."""
    seconds, expected = run_seconds_of(job), None if job.estimated is None else job.estimated.estimate
    if seconds is None or expected is None or expected.run_seconds is None or expected.run_source == "time_limit":
        return None
    low, high = expected.run_seconds_low or 0.0, expected.run_seconds_high or expected.run_seconds
    score = RunScore(
        source=expected.run_source,
        predicted_seconds=expected.run_seconds,
        run_seconds=seconds,
        was_within=low <= seconds <= high,
    )
    return JobEstimateScored(
        job_id=job_id, basis=expected.basis, start_error_seconds=None, was_within=None, cost_error_micro_usd=None,
        scored_at=as_of, run=score,
    )  # fmt: skip


def _score(job_id: JobId, job: JobRecord, views: Mapping[str, NodeView], as_of: datetime) -> JobEstimateScored:
    assert job.estimated is not None, "job has no estimate"  # noqa: S101 - invariant
    assert job.started is not None, "job has not started"  # noqa: S101 - invariant
    expected, started_at = job.estimated.estimate, job.started.started_at
    low, high = expected.start_at_earliest, expected.start_at_latest
    has_range = low is not None and high is not None
    return JobEstimateScored(
        job_id=job_id,
        basis=expected.basis,
        start_error_seconds=None if expected.start_at is None else (started_at - expected.start_at).total_seconds(),
        was_within=low <= started_at <= high if has_range and low is not None and high is not None else None,
        cost_error_micro_usd=_cost_error(job, views),
        scored_at=as_of,
    )


def _cost_error(job: JobRecord, views: Mapping[str, NodeView]) -> int | None:
    """Cost of its nodes above the estimate, for the estimated run time; None: a price is unknown."""
    expected = None if job.estimated is None else job.estimated.estimate
    if expected is None or expected.cost_micro_usd is None or expected.run_seconds is None:
        return None
    if job.queued is None or job.placed is None or not job.placed.node_names:
        return None
    spec, hourly = job.queued.spec, 0
    for name in job.placed.node_names:
        view = views.get(name)
        if view is None or view.price_micro_usd_per_hour is None:
            return None
        price, held = view.price_micro_usd_per_hour, spec.member_resources
        hourly += member_price(price, held, view.allocatable, view.gpu_memory_bytes)
    return cost_micro_usd(hourly, timedelta(seconds=expected.run_seconds)) - expected.cost_micro_usd
