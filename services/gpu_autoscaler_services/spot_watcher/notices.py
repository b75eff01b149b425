"""From what one instance's metadata shows, and what is known already, to facts. No IO."""

from collections.abc import Iterable
from datetime import datetime

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.core.state import NoticeRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn, SpotRebalanceRecommended
from gpu_autoscaler.model.ids import ProviderId


def notice_facts(
    provider_id: ProviderId,
    node_name: str | None,
    shown: ReclaimNotice | None,
    standing: Iterable[NoticeRecord],
    now: datetime,
) -> list[Fact]:
    """Return what is new: a notice not yet known, and those known that the metadata no longer shows.

    `standing` are the notices known of this instance. Only those that metadata gave can be taken back by it: a notice
    from elsewhere carries an event id that metadata never shows, and one whose deadline has passed is history.
    """
    facts: list[Fact] = []
    is_known = False
    for record in standing:
        notice = record.notice
        if record.withdrawn is not None or notice.reclaim_at is None:
            continue
        if shown is not None and (notice.kind, notice.provider_event) == (shown.kind, shown.provider_event):
            is_known = notice.reclaim_at == shown.reclaim_at
        elif notice.provider_event == notice.reclaim_at.isoformat() and now < notice.reclaim_at:
            facts.append(
                SpotNoticeWithdrawn(
                    provider_id=provider_id, kind=notice.kind, provider_event=notice.provider_event, withdrawn_at=now
                )
            )
    if shown is not None and not is_known:
        facts.append(
            SpotNoticeReceived(
                provider_id=provider_id,
                kind=shown.kind,
                provider_event=shown.provider_event,
                reclaim_at=shown.reclaim_at,
                node_name=node_name,
                received_at=now,
            )
        )
    return facts


def rebalance_fact(provider_id: ProviderId, node_name: str | None, noticed_at: datetime) -> SpotRebalanceRecommended:
    """Return the hint as a fact; read again, it is the same fact."""
    return SpotRebalanceRecommended(provider_id=provider_id, noticed_at=noticed_at, node_name=node_name)
