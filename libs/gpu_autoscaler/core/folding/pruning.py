"""What the state may forget, so that it stays as large as the cluster and not as long as its history.

How old something is, is told by the newest instant of its own stream: never by a clock, never by another stream,
which may be hours ahead while a service catches up. Ages are counted in whole hours, so only a fact that begins a new
hour of its stream makes the state forget.
"""

from datetime import datetime

from msgspec.structs import replace

from gpu_autoscaler.core.folding.batch import Batch
from gpu_autoscaler.core.folding.ledger import prune_costs
from gpu_autoscaler.core.hours import hour
from gpu_autoscaler.core.state import DrainRecord, JobRecord, NoticeRecord, OrderRecord
from gpu_autoscaler.model.ids import PodUid

# Longer than any repeat that a broker or a crashed publisher makes (minutes), shorter than what fills a memory.
TOMBSTONE_HOURS = 6
# Longer than any time after which a policy calls a node idle; a node's name is rarely used again.
BUSY_HOURS = 7 * 24
# Eight times the time in which such a count halves (`core/interruptions.py`): less than half a percent of it is left.
SPOT_ENDS_HOURS = 8 * 6


def is_past_retention(at: datetime, newest: datetime) -> bool:
    """True when something that ended then has been kept for its life."""
    return at < newest and hour(at) < hour(newest) - TOMBSTONE_HOURS


def is_long_idle(busy_until: datetime, newest: datetime) -> bool:
    """True when a node was in use so long ago that it is not remembered."""
    return busy_until < newest and hour(busy_until) < hour(newest) - BUSY_HOURS


def prune_pod(batch: Batch, uid: PodUid, gone_at: datetime) -> None:
    """Forget the end of one pod where it is that old, without a look at all others: after an outage old ends come by
    the thousand, and the others were looked at when the hour began."""
    if (newest := batch.newest.get("pod")) is not None and is_past_retention(gone_at, newest):
        batch.pods.gone.remove(uid)


def prune(batch: Batch, domain: str, newest: datetime) -> None:
    """Forget what ended more than its life before the newest instant of the domain."""

    def is_old(ended_at: datetime | None) -> bool:
        return ended_at is not None and is_past_retention(ended_at, newest)

    match domain:
        case "pod":
            batch.pods.gone.forget(hour(newest) - TOMBSTONE_HOURS)
            batch.budgets.gone.forget(hour(newest) - TOMBSTONE_HOURS)
            batch.busy_until.forget(lambda at: is_long_idle(at, newest))
        case "node":
            batch.nodes.gone.forget(hour(newest) - TOMBSTONE_HOURS)
            batch.observed_allocatable.forget(lambda each: is_old(each.gone_at))
            batch.instances.forget(lambda each: each.state == "terminated" and is_old(each.terminated_at))
            _forget_missing_instances(batch)
            _forget_spot_ends(batch, newest)
        case "gpu":
            batch.telemetry.forget(lambda window: is_old(window.window_started_at))
            batch.telemetry_history.forget(lambda trail: is_old(trail.seen_until))
        case "spot":
            batch.notices.forget(lambda record: is_old(notice_ended_at(record)))
            batch.rebalance_recommended_at.forget(is_old)
        case "job":
            batch.jobs.forget(lambda job: is_old(job_ended_at(job)))
            _mark_strays(batch, newest)
        case "cost":
            prune_costs(batch, newest, lambda said_at: is_past_retention(said_at, newest))
        case "scaling":
            batch.orders.forget(lambda order: is_old(order_ended_at(order)))
            batch.drains.forget(lambda drain: is_old(drain_ended_at(drain)))
            batch.gangs.forget(lambda gang: is_old(gang.abandoned_at))


def _forget_missing_instances(batch: Batch) -> None:
    """Forget instances that the cloud's own lists have left out for a tombstone's life."""
    listed_at = batch.instances_listed_at
    if listed_at is None:
        return
    missing = {
        provider_id for provider_id, seen_at in batch.instances_seen_at.now.items() if is_past_retention(seen_at, listed_at)
    }
    for provider_id in missing:
        batch.instances_seen_at.remove(provider_id)
        batch.instances.remove(provider_id)


def _forget_spot_ends(batch: Batch, newest: datetime) -> None:
    """Forget ends that hardly weigh any more, hour by hour."""
    oldest = hour(newest) - SPOT_ENDS_HOURS
    for place, ends in tuple(batch.spot_terminations.now.items()):
        kept = {at: each for at, each in ends.items() if at >= oldest}
        if not kept:
            batch.spot_terminations.remove(place)
        elif len(kept) < len(ends):
            batch.spot_terminations.set(place, kept)


def _mark_strays(batch: Batch, newest: datetime) -> None:
    """Begin the life of words about jobs that nobody knows: anybody may cancel what never was, as often as they like.

    It begins here and not when they were said, because whoever says them says when as well.
    """
    strays = [job_id for job_id, job in batch.jobs.now.items() if _is_stray(job) and job.unknown_since is None]
    for job_id in strays:
        batch.jobs.set(job_id, replace(batch.jobs.now[job_id], unknown_since=newest))


def _is_stray(job: JobRecord) -> bool:
    return job.requested is None and job.queued is None and job.rejected is None and job.finished is None


def notice_ended_at(record: NoticeRecord) -> datetime:
    """When the notice has nothing more to say: its deadline has passed, and the last word that took it back."""
    last = max(record.notice.reclaim_at or record.last_received_at, record.last_received_at)
    return last if record.withdrawn is None else max(last, record.withdrawn.withdrawn_at)


def job_ended_at(job: JobRecord) -> datetime | None:
    """When the job ended, was refused, or turned out never to have been one; None: it goes on."""
    if job.finished is not None:
        return job.finished.finished_at
    if _is_stray(job):
        return job.unknown_since
    return job.rejected_at if job.queued is None else None


def order_ended_at(order: OrderRecord) -> datetime | None:
    """When the purchase came to nothing or its instance was gone; None: it counts."""
    if order.terminated is not None:
        return order.terminated.terminated_at
    return None if order.refused is None else order.refused.refused_at


def drain_ended_at(drain: DrainRecord) -> datetime | None:
    """When the removal was done or given up; None: it goes on."""
    if drain.terminated is not None:
        return drain.terminated.terminated_at
    return None if drain.cancelled is None else drain.cancelled.cancelled_at
