"""Retention: the state grows with the cluster, not with its history.

Ages are whole hours, measured against the newest instant of the same stream, never against a clock or another stream.
"""

from datetime import datetime

from msgspec.structs import replace

from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.ledger import prune_costs
from gpu_autoscaler.core.state.state import DrainRecord, JobRecord, NoticeRecord, OrderRecord
from gpu_autoscaler.core.state.tables import Batch
from gpu_autoscaler.core.state.usage_history import prune_usage
from gpu_autoscaler.model.ids import PodUid

# Longer than redelivery by a broker or a restarted publisher (minutes), short enough for memory.
TOMBSTONE_HOURS = 6
# Longer than any idle time of a policy; node names are rarely reused.
BUSY_HOURS = 7 * 24
# Eight half-lives of `core/state/interruption_history.py`: less than half a percent of the weight is left.
SPOT_ENDS_HOURS = 8 * 6


def is_past_retention(at: datetime, newest: datetime) -> bool:
    """True if the retention of something that ended then is over."""
    return at < newest and hour(at) < hour(newest) - TOMBSTONE_HOURS


def is_long_idle(busy_until: datetime, newest: datetime) -> bool:
    """True if a node was used so long ago that it is pruned."""
    return busy_until < newest and hour(busy_until) < hour(newest) - BUSY_HOURS


def prune_pod(batch: Batch, uid: PodUid, gone_at: datetime) -> None:
    """Prune the tombstone of one pod if its retention is over. Others are not checked: after an outage thousands of old
    deletions arrive, and the others were pruned with the hour."""
    if (newest := batch.newest.get("pod")) is not None and is_past_retention(gone_at, newest):
        batch.pods.gone.remove(uid)


def prune(batch: Batch, domain: str, newest: datetime) -> None:
    """Prune everything of the domain whose retention is over."""

    def is_old(ended_at: datetime | None) -> bool:
        return ended_at is not None and is_past_retention(ended_at, newest)

    match domain:
        case "pod":
            batch.pods.gone.forget(hour(newest) - TOMBSTONE_HOURS)
            batch.budgets.gone.forget(hour(newest) - TOMBSTONE_HOURS)
            for watched in (batch.quotas, batch.provisioning):
                watched.gone.forget(hour(newest) - TOMBSTONE_HOURS)
                if watched.synced is not None and is_past_retention(watched.synced.seen_at, newest):
                    watched.living.forget(lambda _: True)  # they are not watched any more
            batch.busy_until.forget(lambda at: is_long_idle(at, newest))
        case "node":
            batch.nodes.gone.forget(hour(newest) - TOMBSTONE_HOURS)
            batch.observed_allocatable.forget(lambda observed: is_old(observed.gone_at))
            batch.instances.forget(lambda instance: instance.state == "terminated" and is_old(instance.terminated_at))
            _prune_missing_instances(batch)
            _prune_spot_terminations(batch, newest)
        case "gpu":
            batch.telemetry.forget(lambda window: is_old(window.window_started_at))
            batch.telemetry_history.forget(lambda history: is_old(history.seen_until))
        case "spot":
            batch.notices.forget(lambda record: is_old(notice_ended_at(record)))
            batch.rebalance_recommended_at.forget(is_old)
        case "job":
            batch.jobs.forget(lambda job: is_old(job_ended_at(job)))
            _mark_unknown_jobs(batch, newest)
            prune_usage(batch, newest)
        case "cost":
            prune_costs(batch, newest, lambda reported_at: is_past_retention(reported_at, newest))
        case "scaling":
            batch.orders.forget(lambda order: is_old(order_ended_at(order)))
            batch.drains.forget(lambda drain: is_old(drain_ended_at(drain)))
            batch.gangs.forget(lambda gang: is_old(gang.abandoned_at))


def _prune_missing_instances(batch: Batch) -> None:
    """Prune instances that were missing from the lists of the cloud for the retention of a tombstone."""
    listed_at = batch.instances_listed_at
    if listed_at is None:
        return
    missing = {
        provider_id
        for provider_id, seen_at in batch.instances_seen_at.now.items()
        if is_past_retention(seen_at, listed_at)
    }
    for provider_id in missing:
        batch.instances_seen_at.remove(provider_id)
        batch.instances.remove(provider_id)


def _prune_spot_terminations(batch: Batch, newest: datetime) -> None:
    oldest = hour(newest) - SPOT_ENDS_HOURS
    for place, hours in tuple(batch.spot_terminations.now.items()):
        kept = {at: counts for at, counts in hours.items() if at >= oldest}
        if not kept:
            batch.spot_terminations.remove(place)
        elif len(kept) < len(hours):
            batch.spot_terminations.set(place, kept)


def _mark_unknown_jobs(batch: Batch, newest: datetime) -> None:
    """Start the retention of facts about unknown jobs: anybody may cancel a job that never existed. It starts now and
    not at the time of the facts, because that time is set by their senders."""
    unknown = [job_id for job_id, job in batch.jobs.now.items() if _is_unknown(job) and job.unknown_since is None]
    for job_id in unknown:
        batch.jobs.set(job_id, replace(batch.jobs.now[job_id], unknown_since=newest))


def _is_unknown(job: JobRecord) -> bool:
    return job.requested is None and job.queued is None and job.rejected is None and job.finished is None


def notice_ended_at(record: NoticeRecord) -> datetime:
    """Return when the notice became obsolete: after its deadline and its withdrawal."""
    last = max(record.notice.reclaim_at or record.last_received_at, record.last_received_at)
    return last if record.withdrawn is None else max(last, record.withdrawn.withdrawn_at)


def job_ended_at(job: JobRecord) -> datetime | None:
    """Return when the job ended, was rejected, or was found to be unknown; None: it is open."""
    if job.finished is not None:
        return job.finished.finished_at
    if _is_unknown(job):
        return job.unknown_since
    return job.rejected_at if job.queued is None else None


def order_ended_at(order: OrderRecord) -> datetime | None:
    """Return when the launch was refused or the instance was terminated; None: it is open."""
    if order.terminated is not None:
        return order.terminated.terminated_at
    return None if order.refused is None else order.refused.refused_at


def drain_ended_at(drain: DrainRecord) -> datetime | None:
    """Return when the removal completed or was canceled; None: it is open."""
    if drain.terminated is not None:
        return drain.terminated.terminated_at
    return None if drain.cancelled is None else drain.cancelled.cancelled_at
