"""The end of a paid reservation, published as an interruption notice so that its work moves before."""

from collections.abc import Iterator
from datetime import timedelta

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler_services.scaler.inventory import InstancesListed


def ends_due(state: ClusterState, policy: ScalingPolicy, listed: InstancesListed) -> Iterator[SpotNoticeReceived]:
    """Yield a notice, once, for each listed instance whose reservation is about to end."""
    ahead = timedelta(seconds=policy.reservation_drain_seconds)
    for instance in listed.instances:
        order = None if instance.action_id is None else state.orders.get(instance.action_id)
        until = None if order is None or order.decision is None else order.decision.offer.paid_until
        if until is None or instance.state == "terminated" or listed.listed_at < until - ahead:
            continue
        notice = SpotNoticeReceived(
            provider_id=instance.provider_id,
            kind="paid_period_over",
            provider_event=until.isoformat(),
            reclaim_at=until,
            received_at=listed.listed_at,
            way="calendar",
        )
        if notice.notice_id not in state.notices:
            yield notice
