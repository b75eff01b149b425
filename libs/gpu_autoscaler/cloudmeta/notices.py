"""Turns notices of metadata, queue and annotations into facts, given the notices that are known. Pure."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.core.state.state import ClusterState, NoticeRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.spot import NoticeChannel, SpotNoticeReceived, SpotNoticeWithdrawn, SpotRebalanceRecommended
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.labels import SPOT_INTERRUPTION_WARNING, SPOT_TERMINATION_TIME

# Maintenance is announced weeks ahead; work moves shortly before it. As early as Azure announces its own.
MAINTENANCE_AHEAD = timedelta(minutes=15)
DEFAULT_WARNING = timedelta(seconds=120)  # of annotations without a time; as EC2 warns


def notices_of(state: ClusterState, provider_id: ProviderId) -> list[NoticeRecord]:
    """Return all known notices of this instance, also withdrawn ones."""
    return [record for record in state.notices.values() if record.notice.provider_id == provider_id]


def is_early(shown: ReclaimNotice, now: datetime) -> bool:
    """Return True for maintenance more than MAINTENANCE_AHEAD away."""
    return shown.kind == "maintenance" and shown.reclaim_at is not None and shown.reclaim_at - now > MAINTENANCE_AHEAD


def notice_facts(
    provider_id: ProviderId,
    node_name: str | None,
    shown: Sequence[ReclaimNotice],
    known: Sequence[NoticeRecord],
    now: datetime,
) -> list[Fact]:
    """Return unknown notices, and withdrawals of known ones that the metadata no longer shows.

    `known`: all notices of this instance, also withdrawn ones. Only notices from metadata whose deadline has not passed
    are withdrawn.
    """
    facts: list[Fact] = []
    names = {(notice.kind, notice.provider_event) for notice in shown}
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
    received = (new_notice(provider_id, node_name, notice, known, now) for notice in shown)
    return facts + [fact for fact in received if fact is not None]


def new_notice(
    provider_id: ProviderId,
    node_name: str | None,
    shown: ReclaimNotice,
    known: Iterable[NoticeRecord],
    now: datetime,
    *,
    channel: NoticeChannel = "metadata",
) -> SpotNoticeReceived | None:
    """Return the notice as a fact; None if it is known already from any source, or too early.

    Each source names an interruption differently, and a queue may have several messages for it: a warning, a lifecycle
    hook, the termination. The first name counts: a later notice is published, under that name, only with an earlier
    deadline.
    """
    if is_early(shown, now):
        return None
    event, withdrawn_at = shown.provider_event, None
    for record in known:
        notice = record.notice
        if notice.kind != shown.kind:
            continue
        if notice.provider_event == shown.provider_event:
            # Azure shows no deadline any more once the event has started.
            if record.is_active and shown.reclaim_at in (None, notice.reclaim_at):
                return None
            withdrawn_at = None if record.withdrawn is None else record.withdrawn.withdrawn_at
        elif record.is_active and (notice.channel != channel or channel == "queue"):
            if shown.reclaim_at is None or (notice.reclaim_at is not None and notice.reclaim_at <= shown.reclaim_at):
                return None
            event, channel = notice.provider_event, notice.channel
    return SpotNoticeReceived(
        provider_id=provider_id,
        kind=shown.kind,
        provider_event=event,
        reclaim_at=shown.reclaim_at,
        node_name=node_name,
        received_at=now,
        withdrawn_at=withdrawn_at,
        channel=channel,
    )


def _can_be_withdrawn(notice: SpotNoticeReceived, now: datetime) -> bool:
    deadline = notice.reclaim_at
    return (
        notice.channel == "metadata" and notice.kind != "paid_period_over" and deadline is not None and now < deadline
    )


def rebalance_fact(provider_id: ProviderId, node_name: str | None, noticed_at: datetime) -> SpotRebalanceRecommended:
    """Return the recommendation as a fact; the same recommendation is the same fact by id."""
    return SpotRebalanceRecommended(provider_id=provider_id, noticed_at=noticed_at, node_name=node_name)


# ---- test notices by annotation


def annotated_notices(state: ClusterState, now: datetime) -> list[Fact]:
    """Return the notices and withdrawals of node annotations that are not known yet; of our nodes only."""
    facts: list[Fact] = []
    for node in state.nodes.values():
        if node.action_id is None or node.provider_id is None:
            continue
        known = notices_of(state, node.provider_id)
        active = [record.notice for record in known if record.is_active and record.notice.channel == "annotation"]
        shown = _annotated(node, active, now)
        if shown is not None:
            received = new_notice(node.provider_id, node.name, shown, known, now, channel="annotation")
            facts += [] if received is None else [received]
        for notice in active:
            is_shown = shown is not None and shown.provider_event == notice.provider_event
            if not is_shown and notice.reclaim_at is not None and now < notice.reclaim_at:
                facts.append(
                    SpotNoticeWithdrawn(
                        provider_id=node.provider_id,
                        kind=notice.kind,
                        provider_event=notice.provider_event,
                        withdrawn_at=now,
                    )
                )
    return facts


def _annotated(node: NodeObserved, active: Sequence[SpotNoticeReceived], now: datetime) -> ReclaimNotice | None:
    annotations = dict(node.annotations)
    if annotations.get(SPOT_INTERRUPTION_WARNING) != "true":
        return None
    text = annotations.get(SPOT_TERMINATION_TIME, "")
    event = f"annotation/{text}"
    try:
        reclaim_at = datetime.fromisoformat(text)
    except ValueError:
        reclaim_at = now + DEFAULT_WARNING
    if reclaim_at.tzinfo is None:
        reclaim_at = now + DEFAULT_WARNING  # without a time zone it is no instant
    first = next((notice for notice in active if notice.provider_event == event), None)
    return ReclaimNotice("terminate", event, reclaim_at if first is None else first.reclaim_at)
