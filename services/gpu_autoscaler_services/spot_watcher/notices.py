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
    known: Iterable[NoticeRecord],
    now: datetime,
) -> list[Fact]:
    """Return what is new: a notice not yet known, and those known that the metadata no longer shows.

    `known` are the notices known of this instance, withdrawn ones too. Only those that metadata gave can be taken back
    by it: a notice from elsewhere carries an event id that metadata never shows, and one whose deadline has passed is
    history.
    """
    facts: list[Fact] = []
    is_known, withdrawn_at = False, None
    for record in known:
        notice = record.notice
        if shown is not None and (notice.kind, notice.provider_event) == (shown.kind, shown.provider_event):
            is_known = record.is_standing and notice.reclaim_at == shown.reclaim_at
            withdrawn_at = None if record.withdrawn is None else record.withdrawn.withdrawn_at
        elif record.is_standing and _can_be_withdrawn(notice, now):
            facts.append(
                SpotNoticeWithdrawn(
                    provider_id=provider_id,
                    kind=notice.kind,
                    provider_event=notice.provider_event,
                    withdrawn_at=now,
                    received_at=record.last_received_at,
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
                withdrawn_at=withdrawn_at,
            )
        )
    return facts


def _can_be_withdrawn(notice: SpotNoticeReceived, now: datetime) -> bool:
    deadline = notice.reclaim_at
    return deadline is not None and notice.provider_event == deadline.isoformat() and now < deadline


def rebalance_fact(provider_id: ProviderId, node_name: str | None, noticed_at: datetime) -> SpotRebalanceRecommended:
    """Return the hint as a fact; read again, it is the same fact."""
    return SpotRebalanceRecommended(provider_id=provider_id, noticed_at=noticed_at, node_name=node_name)
