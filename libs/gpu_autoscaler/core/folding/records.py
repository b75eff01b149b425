"""What a fact makes of the record of one job, purchase, removal or notice. Used by `core/fold.py`.

Each function returns the very record it was given where the fact is no news: a repeat, or a step that happened.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import assert_never

from msgspec.structs import replace

from gpu_autoscaler.core.folding.batch import version_of
from gpu_autoscaler.core.state import DrainRecord, JobRecord, NoticeRecord, OrderRecord
from gpu_autoscaler.events import job, scaling, spot
from gpu_autoscaler.events.catalogue import OneJobFact

_NEVER = datetime.max.replace(tzinfo=UTC)

OrderStep = scaling.ScalingNodeOrdered | scaling.ScalingNodeLaunched | scaling.ScalingLaunchRefused
DrainStep = scaling.ScalingDrainStarted | scaling.ScalingPodEvicted | scaling.ScalingNodeDrained


def job_after(record: JobRecord, fact: OneJobFact, at: datetime) -> JobRecord:
    """First word wins where a thing happens once; the highest attempt or version, or the last, where it comes again."""
    match fact:
        case job.JobRequested():
            return record if record.requested else replace(record, requested=fact, requested_at=at)
        case job.JobCancelRequested():
            return record if record.cancel_requested else replace(record, cancel_requested=fact)
        case job.JobQueued():
            return record if record.queued else replace(record, queued=fact)
        case job.JobRejected():
            # The last word counts: with the first one's age it would be forgotten, and be news when it is said again.
            is_older = record.rejected_at is not None and at <= record.rejected_at
            return record if is_older else replace(record, rejected=fact, rejected_at=at)
        case job.JobPlaced():
            is_news = record.placed is None or fact.attempt > record.placed.attempt
            return replace(record, placed=fact) if is_news else record
        case job.JobPreempted():
            is_news = record.preempted is None or fact.attempt > record.preempted.attempt
            return replace(record, preempted=fact) if is_news else record
        case job.JobStarted():
            is_news = record.started is None or version_of(fact) > version_of(record.started)
            return replace(record, started=fact) if is_news else record
        case job.JobEstimated():
            return record if record.estimated else replace(record, estimated=fact)
        case job.JobEstimateScored():
            return record if record.scored else replace(record, scored=fact)
        case job.JobFinished():
            return record if record.finished else replace(record, finished=fact)
        case _:
            assert_never(fact)


def order_after(record: OrderRecord, fact: OrderStep) -> OrderRecord:
    """A step of a purchase happens once."""
    match fact:
        case scaling.ScalingNodeOrdered():
            return record if record.ordered else replace(record, ordered=fact)
        case scaling.ScalingNodeLaunched():
            return record if record.launched else replace(record, launched=fact)
        case scaling.ScalingLaunchRefused():
            return record if record.refused else replace(record, refused=fact)
        case _:
            assert_never(fact)


def drain_after(record: DrainRecord, fact: DrainStep) -> DrainRecord:
    """A step of a removal happens once; of two words about a pod the forced eviction is the last one."""
    match fact:
        case scaling.ScalingDrainStarted():
            return record if record.started else replace(record, started=fact)
        case scaling.ScalingPodEvicted():
            known = record.evicted.get(fact.pod_uid)
            if known is not None and (known.is_forced or not fact.is_forced):
                return record
            return replace(record, evicted={**record.evicted, fact.pod_uid: fact})
        case scaling.ScalingNodeDrained():
            return record if record.drained else replace(record, drained=fact)
        case _:
            assert_never(fact)


def notice_after(notices: Mapping[str, NoticeRecord], fact: spot.SpotNoticeReceived) -> NoticeRecord:
    """The earliest deadline wins; a notice that was taken back stands again when the cloud says it again later.

    What two ways tell of one interruption at the same moment is one notice, under the name that came first.
    """
    received_at = fact.received_at
    record = notices.get(fact.notice_id)
    if record is None:
        record = next((each for each in notices.values() if is_same_notice(each, fact)), None)
        if record is not None:
            fact = replace(fact, provider_event=record.notice.provider_event, way=record.notice.way)
    if record is None:
        return NoticeRecord(notice=fact, first_received_at=received_at, last_received_at=received_at)
    if record.withdrawn is not None and received_at <= record.withdrawn.withdrawn_at:
        return record  # a repeat of what was taken back
    if not record.is_active:
        return replace(record, notice=fact, first_received_at=received_at, last_received_at=received_at)
    is_earlier = (fact.reclaim_at or _NEVER) < (record.notice.reclaim_at or _NEVER)
    if not is_earlier and record.first_received_at <= received_at <= record.last_received_at:
        return record
    return replace(
        record,
        notice=fact if is_earlier else record.notice,
        first_received_at=min(record.first_received_at, received_at),
        last_received_at=max(record.last_received_at, received_at),
    )


def is_same_notice(record: NoticeRecord, fact: spot.SpotNoticeReceived) -> bool:
    """True for a standing notice of the same kind that came another way; a queue tells of one by several events."""
    known = record.notice
    is_another_way = known.way != fact.way or fact.way == "queue"
    return is_another_way and record.is_active and (known.provider_id, known.kind) == (fact.provider_id, fact.kind)


def notice_withdrawn(record: NoticeRecord, fact: spot.SpotNoticeWithdrawn) -> NoticeRecord:
    """The last withdrawal counts, and only one that is later than the notice: it cannot take back what came after."""
    known = record.withdrawn
    is_old = known is not None and known.withdrawn_at >= fact.withdrawn_at
    return record if is_old or fact.withdrawn_at <= record.last_received_at else replace(record, withdrawn=fact)
