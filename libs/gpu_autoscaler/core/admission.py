"""Whether a request can become a job: all of its mistakes at once, or the checked job in our units.

Called by the scheduler for each `job.requested`, and by the gateway before it publishes one. What depends on the
cluster's state (the queue is full, the id is taken) is theirs to say.
"""

from gpu_autoscaler.model.ids import JobId, derive_id


def job_id_of(asked: JobId | None, event_id: str) -> JobId:
    """Return the id that was asked for, else one derived from the event: the same request is the same job."""
    return asked if asked is not None else JobId(f"job-{derive_id('job', event_id)[:12]}")
