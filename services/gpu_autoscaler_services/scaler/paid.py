"""The end of what is paid for: said like a notice of the cloud, so that its work moves in time."""

from collections.abc import Iterator
from datetime import timedelta

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler_services.scaler.inventory import InstancesListed


def ends_due(state: ClusterState, policy: ScalingPolicy, listed: InstancesListed) -> Iterator[SpotNoticeReceived]:
    """Yield a notice for each listed instance whose paid period is nearly over, once."""
    ahead = timedelta(seconds=policy.paid_drain_seconds)
    for one in listed.instances:
        order = None if one.action_id is None else state.orders.get(one.action_id)
        until = None if order is None or order.decision is None else order.decision.offer.paid_until
        if until is None or one.state == "terminated" or listed.listed_at < until - ahead:
            continue
        notice = SpotNoticeReceived(
            provider_id=one.provider_id,
            kind="paid_period_over",
            provider_event=until.isoformat(),
            reclaim_at=until,
            received_at=listed.listed_at,
            way="calendar",
        )
        if notice.notice_id not in state.notices:
            yield notice
