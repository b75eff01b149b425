"""From what one instance's metadata shows, or a queue tells, and what is known already, to facts. No IO."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.core.state import NoticeRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import NoticeWay, SpotNoticeReceived, SpotNoticeWithdrawn, SpotRebalanceRecommended
from gpu_autoscaler.model.ids import ProviderId

# Maintenance is announced weeks ahead; work is moved shortly before it. As long as Azure announces its own.
MAINTENANCE_AHEAD = timedelta(minutes=15)


def is_early(shown: ReclaimNotice, now: datetime) -> bool:
    """True for maintenance that is too far away to move work for."""
    return shown.kind == "maintenance" and shown.reclaim_at is not None and shown.reclaim_at - now > MAINTENANCE_AHEAD


def notice_facts(
    provider_id: ProviderId,
    node_name: str | None,
    shown: Sequence[ReclaimNotice],
    known: Sequence[NoticeRecord],
    now: datetime,
) -> list[Fact]:
    """Return what is new: notices not yet known, and those known that the metadata no longer shows.

    `known` are the notices known of this instance, withdrawn ones too. Only those that metadata gave can be taken back
    by it, and one whose deadline has passed is history.
    """
    facts: list[Fact] = []
    names = {(each.kind, each.provider_event) for each in shown}
    for record in known:
        notice = record.notice
        if record.is_active and _can_be_withdrawn(notice, now) and (notice.kind, notice.provider_event) not in names:
            facts.append(
                SpotNoticeWithdrawn(
                    provider_id=provider_id,
                    kind=notice.kind,
                    provider_event=notice.provider_event,
                    withdrawn_at=now,
                    received_at=record.last_received_at,
                )
            )
    news = (new_notice(provider_id, node_name, each, known, now) for each in shown)
    return facts + [fact for fact in news if fact is not None]


def new_notice(
    provider_id: ProviderId,
    node_name: str | None,
    shown: ReclaimNotice,
    known: Iterable[NoticeRecord],
    now: datetime,
    *,
    way: NoticeWay = "metadata",
) -> SpotNoticeReceived | None:
    """Return the notice as a fact; None where it is known already, by whatever way, or is too early to be told.

    Two ways have two names for one interruption, and a queue may have several: a warning, a hook, the end itself. The
    one that was told first names it: another is told only if its deadline is earlier, and then under that name.
    """
    if is_early(shown, now):
        return None
    event, withdrawn_at = shown.provider_event, None
    for record in known:
        notice = record.notice
        if notice.kind != shown.kind:
            continue
        if notice.provider_event == shown.provider_event:
            # Azure says no deadline any more once the event has started: what was said stands.
            if record.is_active and shown.reclaim_at in (None, notice.reclaim_at):
                return None
            withdrawn_at = None if record.withdrawn is None else record.withdrawn.withdrawn_at
        elif record.is_active and (notice.way != way or way == "queue"):
            if shown.reclaim_at is None or (notice.reclaim_at is not None and notice.reclaim_at <= shown.reclaim_at):
                return None
            event, way = notice.provider_event, notice.way
    return SpotNoticeReceived(
        provider_id=provider_id,
        kind=shown.kind,
        provider_event=event,
        reclaim_at=shown.reclaim_at,
        node_name=node_name,
        received_at=now,
        withdrawn_at=withdrawn_at,
        way=way,
    )


def _can_be_withdrawn(notice: SpotNoticeReceived, now: datetime) -> bool:
    deadline = notice.reclaim_at
    return notice.way == "metadata" and notice.kind != "paid_period_over" and deadline is not None and now < deadline


def rebalance_fact(provider_id: ProviderId, node_name: str | None, noticed_at: datetime) -> SpotRebalanceRecommended:
    """Return the hint as a fact; read again, it is the same fact."""
    return SpotRebalanceRecommended(provider_id=provider_id, noticed_at=noticed_at, node_name=node_name)
