"""Estimated start and cost of jobs. None if unknown."""

from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.demand.durations import Durations
from gpu_autoscaler.core.demand.queue_order import ordered_queue
from gpu_autoscaler.core.explain.status import StatusView, job_line
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import queue_of
from gpu_autoscaler.core.queueing.estimates import Estimates
from gpu_autoscaler.core.state.queries import is_preempted
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.model.estimates import Estimate
from gpu_autoscaler.model.jobs import FINAL_STATES, JobSpec, JobState
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler_services.gateway import schema

_OF_JOBS = frozenset({"jobs", "newest", "gpu_time", "durations", "spent_by_job", "instances_seen_at"})
_OF_CAPACITY = tuple(name for name in ClusterState.__struct_fields__ if name not in _OF_JOBS)
_WAITING_STATES = frozenset({JobState.PENDING, JobState.QUEUED, JobState.PROVISIONING, JobState.PREEMPTED})


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """State shared by all jobs of one answer, computed once."""

    state: ClusterState
    as_of: datetime
    waiting: tuple[JobRecord, ...]  # the queue in order
    estimates: Estimates
    durations: Durations
    policy: ScalingPolicy

    @classmethod
    def of(cls, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> "Scene":
        return cls(
            state=state,
            as_of=as_of,
            waiting=ordered_queue(state, policy, as_of),
            estimates=Estimates(state, policy, as_of),
            durations=Durations(state),
            policy=policy,
        )

    def of_state(self, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> "Scene | None":
        """Return the scene with the queue of a later state, for the answers to jobs that enter it, each behind the one
        before; None: something else than jobs has changed."""
        if policy is not self.policy or any(
            getattr(state, name) is not getattr(self.state, name) for name in _OF_CAPACITY
        ):
            return None
        waiting = ordered_queue(state, policy, as_of)
        return msgspec.structs.replace(self, state=state, waiting=waiting)

    def estimate(self, spec: JobSpec, status: JobState) -> Estimate | None:
        """Return the job's estimate; for a running or ended job the last one recorded."""
        if (estimate := self.estimates.of(spec.job_id)) is not None:
            return estimate
        record = self.state.jobs.get(spec.job_id)
        if record is not None and record.estimated is not None:
            return record.estimated.estimate
        return self.estimates.of_new(spec) if status in _WAITING_STATES else None

    def position(self, spec: JobSpec, status: JobState) -> int | None:
        """Return the position in the queue; for a pending job the position that it will get."""
        for position, record in enumerate(self.waiting, start=1):
            if record.queued is not None and record.queued.job_id == spec.job_id:
                return position
        if status is not JobState.PENDING:
            return None
        return 1 + sum(
            record.queued is not None and record.queued.spec.priority >= spec.priority for record in self.waiting
        )


def job(spec: JobSpec, status: JobState, scene: Scene, status_view: StatusView | None = None) -> schema.Job:
    """Return the job with state and estimate; with a status view also what it waits for."""
    record = scene.state.jobs.get(spec.job_id, JobRecord())
    placed, started, finished = record.placed, record.started, record.finished
    preempted, expected = record.preempted, scene.estimate(spec, status)
    run = None if status in FINAL_STATES else scene.durations.predicted(spec)
    left = scene.durations.of_job(record, scene.as_of) if status is JobState.RUNNING else None
    message = "" if finished is None else finished.message
    if status is JobState.PREEMPTED and preempted is not None:
        message = preempted.cause
    if status_view is not None and status in _WAITING_STATES:
        message = " ".join(filter(None, (f"{message}." if message else "", job_line(spec.job_id, status_view))))
    return schema.Job(
        job_id=spec.job_id,
        status=status,
        queue_position=scene.position(spec, status),
        estimated_start_time=_start_at(expected, record, status, scene),
        estimated_start_earliest=None if expected is None else expected.start_at_earliest,
        estimated_start_latest=None if expected is None else expected.start_at_latest,
        estimated_cost_usd=None if expected is None else _usd(expected.cost_micro_usd),
        estimated_cost_usd_max=None if expected is None else _usd(expected.cost_micro_usd_max),
        estimate_basis="" if expected is None else expected.why,
        created_at=spec.requested_at,
        job_name=spec.job_name,
        project_id=spec.project_id,
        priority=spec.priority,
        gpu_type=",".join(spec.models) or None,
        gpu_count=spec.member_resources.gpu_count,
        members=spec.member_count,
        min_members=spec.member_count_min,
        preemptible=spec.is_preemptible,
        attempt=0 if placed is None else placed.attempt,
        node_names=() if placed is None else tuple(dict.fromkeys(placed.node_names)),
        started_at=None if started is None else started.started_at,
        finished_at=None if finished is None else finished.finished_at,
        message=message,
        submitted_by=spec.submitted_by,
        queue=queue_of(scene.policy.queues, spec.project_id).name,
        expected_run_seconds=None if run is None else run.median_seconds,
        expected_run_seconds_low=None if run is None else run.low_seconds,
        expected_run_seconds_high=None if run is None else run.high_seconds,
        expected_end_time=None if left is None else scene.as_of + timedelta(seconds=left.median_seconds),
        run_time_basis="" if run is None else run.sentence(),
    )


def _usd(micro_usd: int | None) -> float | None:
    return None if micro_usd is None else round(micro_usd / MICRO_USD_PER_USD, 6)


def _start_at(expected: Estimate | None, record: JobRecord, status: JobState, scene: Scene) -> datetime | None:
    """Return the start, or the estimated start, which is never in the past."""
    if record.started is not None and not is_preempted(record):
        return record.started.started_at
    if status in FINAL_STATES or expected is None or expected.start_at is None:
        return None
    return max(expected.start_at, scene.as_of)
