"""Kubernetes Jobs that the binder made, and other kinds that carry a job's members, as facts."""

from datetime import datetime

from gpu_autoscaler.events.job import JobFinished, JobStarted
from gpu_autoscaler.kube.translate.workload_progress import called, progress
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId


def job_id_of(job: core.Object) -> JobId | None:
    """Return whose Job this is; None: not one of the binder's."""
    job_id = job.metadata.labels.get(labels.JOB_ID)
    return JobId(job_id) if job_id else None


def are_all_running(job: core.Object) -> bool:
    """True while every member that is needed is ready or done, and at least one still works."""
    return progress(job).is_running


def job_started(job: core.Object, job_id: JobId, *, started_at: datetime, epoch: int) -> JobStarted:
    """Return the start of all members as a fact; the Job itself does not say when that was."""
    return JobStarted(
        epoch=epoch,
        version=job.version,
        job_id=job_id,
        kube_job=f"{job.metadata.namespace}/{job.metadata.name}",
        started_at=started_at,
    )


def job_finished(job: core.Object, job_id: JobId, *, seen_at: datetime) -> JobFinished | None:
    """Return the Job's end as a fact; None while it goes on."""
    end = progress(job).end
    if end is None:
        return None
    return JobFinished(job_id=job_id, outcome=end.outcome, finished_at=end.at or seen_at, message=end.message)


def is_taken_away(job: core.Object) -> bool:
    """True for a Job that the binder deletes to make it anew: its end means nothing for its job."""
    return labels.TAKEN_AWAY in job.metadata.annotations


def job_removed(job: core.Object, job_id: JobId, *, seen_at: datetime) -> JobFinished:
    """Return the end of a job whose Job somebody deleted before it was done."""
    return JobFinished(job_id=job_id, outcome="cancelled", finished_at=seen_at, message=f"{called(job)} was deleted")


def is_over(job: core.Object) -> bool:
    """True for a Job that has ended."""
    return progress(job).end is not None


def is_ending(job: core.Object) -> bool:
    """True for a Job that is over, about to be, or being deleted: it ends its pods itself and replaces none."""
    return job.metadata.deletion_timestamp is not None or progress(job).is_ending


def is_held(job: core.Object) -> bool:
    """True for a suspended Job whose pods are gone: from then on it may be changed what it is let go with.

    Source: Kubernetes, "Jobs: Mutable Scheduling Directives"; seen on v1.36: the status loses its `startTime` then.
    """
    return progress(job).is_held
