"""Gangs that are bought for in vain: until when each waits, and which has had its time. Asked by `cover_demand`."""

from collections.abc import Mapping
from datetime import datetime, timedelta

from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.nodes.life import NodeView
from gpu_autoscaler.core.policies.gang import GangPolicy
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.core.state import ClusterState, GangRecord
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.waits import GangBackoff, GangTimedOut


def waits(gang: str, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> GangBackoff | None:
    """Return until when nothing is bought for the gang; None: it may be bought for now."""
    record = state.gangs.get(gang)
    if record is None:
        return None
    retry_at = tried_again_at(record, policy.gangs)
    if as_of >= retry_at:
        return None
    return GangBackoff(gang=gang, abandoned_count=record.abandoned_count, retry_at=retry_at)


def tried_again_at(record: GangRecord, rules: GangPolicy) -> Instant:
    """When a gang that was bought for in vain may be bought for again."""
    return record.abandoned_at + timedelta(seconds=_wait_seconds(record, rules))


def _wait_seconds(record: GangRecord, rules: GangPolicy) -> float:
    """Twice as long after each try, up to the most."""
    seconds = rules.backoff_seconds_min
    for _ in range(record.abandoned_count - 1):
        if seconds >= rules.backoff_seconds_max:
            break
        seconds *= 2
    return min(seconds, rules.backoff_seconds_max)


def is_late(gang: str, draft: Draft, policy: ScalingPolicy) -> GangTimedOut | None:
    """Return how long the gang's nodes have been on their way, where that is too long; None: there is time."""
    begun_at = _begun(draft.views).get(gang)
    if begun_at is None:
        return None
    bought_seconds = (draft.as_of - begun_at).total_seconds()
    most = policy.gangs.complete_seconds_max
    if bought_seconds < most:
        return None
    return GangTimedOut(gang=gang, bought_seconds=bought_seconds, complete_seconds_max=most)


@remembered(2)
def _begun(views: tuple[NodeView, ...]) -> Mapping[str, Instant]:
    """When the first node was bought that a gang still waits on: it boots, or stands empty."""
    begun: dict[str, Instant] = {}
    for view in views:
        order = view.order
        if order is None or order.decision is None or order.planned_at is None or order.decision.gang is None:
            continue
        if (view.is_booting or _is_unused(view)) and view.drain is None:
            gang = order.decision.gang
            begun[gang] = min(order.planned_at, begun.get(gang, order.planned_at))
    return begun


def _is_unused(view: NodeView) -> bool:
    """True for a node on which nothing has run yet; what a gang left behind after an earlier start is merely idle."""
    empty_since, usable_since = view.empty_since, view.usable_since
    return empty_since is not None and usable_since is not None and empty_since <= usable_since
