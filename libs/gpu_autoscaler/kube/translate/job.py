"""Kubernetes Jobs that the binder made, as facts. Source: Kubernetes API reference v1.36, "Job" (read 2026-11-21)."""

from datetime import datetime
from typing import Literal

from gpu_autoscaler.events.job import JobFinished, JobStarted
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.translate.common import condition
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId

# What a Job carries before it is Complete or Failed, while its pods are still being ended.
_ANNOUNCED = ("SuccessCriteriaMet", "FailureTarget")
_OUTCOMES: dict[str, Literal["completed", "failed"]] = {"Complete": "completed", "Failed": "failed"}


def job_id_of(job: wire.Job) -> JobId | None:
    """Return whose Job this is; None: not one of the binder's."""
    job_id = job.metadata.labels.get(labels.JOB_ID)
    return JobId(job_id) if job_id else None


def are_all_running(job: wire.Job) -> bool:
    """True while every member is ready or done, and at least one still works."""
    status = job.status
    return status.ready > 0 and status.ready + status.succeeded >= job.spec.parallelism


def job_started(job: wire.Job, job_id: JobId, *, started_at: datetime, epoch: int) -> JobStarted:
    """Return the start of all members as a fact; the Job itself does not say when that was."""
    return JobStarted(
        epoch=epoch,
        version=job.version,
        job_id=job_id,
        kube_job=f"{job.metadata.namespace}/{job.metadata.name}",
        started_at=started_at,
    )


def job_finished(job: wire.Job, job_id: JobId, *, seen_at: datetime) -> JobFinished | None:
    """Return the Job's end as a fact; None while it goes on.

    A Job is Complete or Failed once, and for good; until then FailureTarget and SuccessCriteriaMet announce it.
    """
    for condition_type, outcome in _OUTCOMES.items():
        end = condition(job.status.conditions, condition_type)
        if end is not None and end.status == "True":
            return JobFinished(
                job_id=job_id,
                outcome=outcome,
                finished_at=job.status.completion_time or end.last_transition_time or seen_at,
                message="" if outcome == "completed" else f"{end.reason}: {end.message}",
            )
    return None


def job_removed(job: wire.Job, job_id: JobId, *, seen_at: datetime) -> JobFinished:
    """Return the end of a job whose Job somebody deleted before it was done."""
    message = f"Kubernetes Job {job.metadata.namespace}/{job.metadata.name} was deleted"
    return JobFinished(job_id=job_id, outcome="cancelled", finished_at=seen_at, message=message)


def is_over(job: wire.Job) -> bool:
    """True for a Job that is Complete or Failed."""
    return _has_one_of(job, tuple(_OUTCOMES))


def is_ending(job: wire.Job) -> bool:
    """True for a Job that is over, about to be, or being deleted: it ends its pods itself and replaces none."""
    return job.metadata.deletion_timestamp is not None or _has_one_of(job, (*_ANNOUNCED, *_OUTCOMES))


def is_held(job: wire.Job) -> bool:
    """True for a suspended Job whose pods are gone: from then on its template's node affinity may change again.

    Source: Kubernetes, "Jobs: Mutable Scheduling Directives"; seen on v1.36: the status loses its `startTime` then.
    """
    is_still = not job.status.active and not job.status.terminating
    return job.spec.suspend and is_still and _has_one_of(job, ("Suspended",))


def _has_one_of(job: wire.Job, condition_types: tuple[str, ...]) -> bool:
    found = (condition(job.status.conditions, condition_type) for condition_type in condition_types)
    return any(each is not None and each.status == "True" for each in found)
