"""Notices that people give by annotation, to see what an interruption does. Only where the policy allows it."""

from datetime import datetime, timedelta

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.labels import SPOT_INTERRUPTION_WARNING, SPOT_TERMINATION_TIME
from gpu_autoscaler_services.spot_watcher.notices import new_notice

WITHOUT_TIME = timedelta(seconds=120)  # as EC2 warns


def annotated_notices(state: ClusterState, now: datetime) -> list[Fact]:
    """Return the notices of annotations that are not known yet, and the end of those that were taken off in time."""
    facts: list[Fact] = []
    for node in state.nodes.values():
        if node.action_id is None or node.provider_id is None:
            continue  # not ours: nothing of it is ever removed
        known = [each for each in state.notices.values() if each.notice.provider_id == node.provider_id]
        standing = [each.notice for each in known if each.is_active and each.notice.way == "annotation"]
        shown = _shown(node, standing, now)
        if shown is not None:
            told = new_notice(node.provider_id, node.name, shown, known, now, way="annotation")
            facts += [] if told is None else [told]
        events = set() if shown is None else {shown.provider_event}
        facts += [_withdrawn(node.provider_id, each, now) for each in standing if _is_off(each, events, now)]
    return facts


def _shown(node: NodeObserved, standing: list[SpotNoticeReceived], now: datetime) -> ReclaimNotice | None:
    annotations = dict(node.annotations)
    if annotations.get(SPOT_INTERRUPTION_WARNING) != "true":
        return None
    text = annotations.get(SPOT_TERMINATION_TIME, "")
    event = f"annotation/{text}"
    try:
        reclaim_at = datetime.fromisoformat(text)
    except ValueError:
        reclaim_at = now + WITHOUT_TIME
    if reclaim_at.tzinfo is None:
        reclaim_at = now + WITHOUT_TIME  # no instant without its zone
    first = next((each for each in standing if each.provider_event == event), None)
    return ReclaimNotice("terminate", event, reclaim_at if first is None else first.reclaim_at)


def _is_off(notice: SpotNoticeReceived, events: set[str], now: datetime) -> bool:
    return notice.provider_event not in events and notice.reclaim_at is not None and now < notice.reclaim_at


def _withdrawn(provider_id: ProviderId, notice: SpotNoticeReceived, now: datetime) -> SpotNoticeWithdrawn:
    return SpotNoticeWithdrawn(
        provider_id=provider_id, kind=notice.kind, provider_event=notice.provider_event, withdrawn_at=now
    )
