"""Translates Kubernetes Jobs of the binder, and other kinds that carry a job's members, to facts."""

from datetime import datetime

from gpu_autoscaler.events.job import JobFinished, JobStarted
from gpu_autoscaler.kube.translate.workload_progress import display_name, progress
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId


def job_id_of(job: core.Object) -> JobId | None:
    """Return the id of the Job's job; None for a Job that the binder did not create."""
    job_id = job.metadata.labels.get(labels.JOB_ID)
    return JobId(job_id) if job_id else None


def are_all_running(job: core.Object) -> bool:
    """True while every required member is ready or done, and at least one is still running."""
    return progress(job).is_running


def job_started(
    job: core.Object, job_id: JobId, *, started_at: datetime, epoch: int, is_found_running: bool
) -> JobStarted:
    """Return the start of all members as a fact; the Job itself does not record it."""
    return JobStarted(
        epoch=epoch,
        version=job.version,
        job_id=job_id,
        kube_job=f"{job.metadata.namespace}/{job.metadata.name}",
        started_at=started_at,
        is_found_running=is_found_running,
    )


def job_finished(job: core.Object, job_id: JobId, *, seen_at: datetime) -> JobFinished | None:
    """Return the Job's end as a fact; None before it."""
    end = progress(job).end
    if end is None:
        return None
    return JobFinished(job_id=job_id, outcome=end.outcome, finished_at=end.at or seen_at, message=end.message)


def is_taken_away(job: core.Object) -> bool:
    """True for a Job that the binder deletes to recreate it: its end is not the end of the job."""
    return labels.TAKEN_AWAY in job.metadata.annotations


def job_removed(job: core.Object, job_id: JobId, *, seen_at: datetime) -> JobFinished:
    """Return the end of a job whose Job was deleted before completion."""
    return JobFinished(
        job_id=job_id, outcome="cancelled", finished_at=seen_at, message=f"{display_name(job)} was deleted"
    )


def is_over(job: core.Object) -> bool:
    """True for a Job that has ended."""
    return progress(job).end is not None


def is_ending(job: core.Object) -> bool:
    """True for a Job that ended, is ending or is being deleted: it ends its own pods and replaces none."""
    return job.metadata.deletion_timestamp is not None or progress(job).is_ending


def is_fully_suspended(job: core.Object) -> bool:
    """True for a suspended Job without pods: from then on its scheduling directives may be changed. Source: Kubernetes,
    "Jobs: Mutable Scheduling Directives"; seen on v1.36: the status then has no `startTime`."""
    return progress(job).is_fully_suspended
