"""What instances still claim of money limits: their time since the last charge, and as long as they may yet run.

Read by `core/spending/money.py`. A node claims from the plan that buys it on; what has ended claims what is not charged
of it.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.bins import PodsByNode
from gpu_autoscaler.core.demand import job_spec
from gpu_autoscaler.core.folding.ledger import owners_of
from gpu_autoscaler.core.nodes.booting import has_workload_pods
from gpu_autoscaler.core.nodes.life import NodePhase, NodeView
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.core.state import ClusterState, OrderRecord
from gpu_autoscaler.core.views import counts_for_idleness
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.money import cost_micro_usd

# From the last pod's end to the end of billing: a tick, the executor's step, the cloud's own time to end a machine.
ENDING_SECONDS = 120.0
_OVER = (NodePhase.DRAINED, NodePhase.TERMINATING, NodePhase.FAILED)


class UnbilledTime(NamedTuple):
    """One instance's time that is not in the ledger."""

    name: str
    provider_id: ProviderId | None
    owners: tuple[str, ...]  # whose limits it counts against
    price_micro_usd_per_hour: int | None
    from_at: datetime  # charged up to here, or begun
    until_at: datetime | None  # the latest at which billing ends; None: nobody knows

    def micro_usd(self, from_at: datetime, to_at: datetime) -> int:
        """What it costs between two instants; 0 where it does not reach in between, or has no price."""
        until_at = to_at if self.until_at is None else min(self.until_at, to_at)
        return cost_rounded_up(self.price_micro_usd_per_hour or 0, max(self.from_at, from_at), until_at)


def cost_rounded_up(price_micro_usd_per_hour: int, from_at: datetime, to_at: datetime) -> int:
    """A limit is held to the micro-dollar, so no remainder is left out."""
    if to_at <= from_at or not price_micro_usd_per_hour:
        return 0
    return cost_micro_usd(price_micro_usd_per_hour, to_at - from_at) + 1


def tail_seconds(policy: ScalingPolicy) -> float | None:
    """How long a node may still run once its work is over; None: the policy may keep it for ever."""
    if any(pool.nodes_count_min or pool.is_paused for pool in policy.pools):
        return None
    if policy.nodes_count_min or policy.headrooms or policy.scheduled_limits or policy.forecast.is_on:
        return None
    return max(policy.idle_seconds_max, policy.scale_down_cooldown_seconds) + policy.drain_seconds_max + ENDING_SECONDS


def unbilled_time_of(
    state: ClusterState, views: tuple[NodeView, ...], pods: PodsByNode, policy: ScalingPolicy, as_of: datetime
) -> tuple[UnbilledTime, ...]:
    """Every claim there is, of nodes that count against limits and of those that are gone."""
    counted = (view for view in views if view.is_ours and view.is_counted)
    return (*(_claim(view, pods, state, policy, as_of) for view in counted), *_of_the_gone(state, views))


def _claim(view: NodeView, pods: PodsByNode, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> UnbilledTime:
    launched = None if view.order is None else view.order.launched
    planned_at = None if view.order is None else view.order.planned_at
    began_at = (
        view.instance.launched_at
        if view.instance is not None
        else launched.launched_at
        if launched is not None
        else planned_at or as_of
    )
    return UnbilledTime(
        name=view.name,
        provider_id=view.provider_id,
        owners=owners_of(view.pool, view.zone, view.labels.get(labels.PROJECT_ID)),
        price_micro_usd_per_hour=view.price_micro_usd_per_hour,
        from_at=_uncharged_from(began_at, view.provider_id, state),
        until_at=billing_ends_by(view, pods, state, policy, as_of),
    )


def billing_ends_by(
    view: NodeView, pods: PodsByNode, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> datetime | None:
    """The latest instant at which the node's billing ends, as its work may take; None: nobody knows."""
    ending = timedelta(seconds=ENDING_SECONDS)
    if view.phase is NodePhase.FAILED and has_workload_pods(view, pods):
        return None  # its drain is to come
    drain = None if view.drain is None else view.drain.decision
    if view.phase in _OVER:
        return as_of + ending
    if isinstance(drain, DrainNode) and not drain.is_voluntary:
        return max(drain.deadline_at, as_of) + ending
    tail = tail_seconds(policy)
    if tail is None or view.phase is NodePhase.LOST:
        return None
    if view.is_booting:
        decision = None if view.order is None else view.order.decision
        if decision is None or decision.work_seconds_max is None or view.usable_by is None:
            return None
        return view.usable_by + timedelta(seconds=decision.work_seconds_max + tail)
    latest = as_of
    for pod in pods.get(view.name, ()):
        if not counts_for_idleness(pod):
            continue
        spec = job_spec(state, pod.job_id)
        if spec is None:
            return None
        latest = max(latest, (pod.started_at or as_of) + timedelta(seconds=spec.duration_seconds_max))
    return latest + timedelta(seconds=tail)


def _uncharged_from(began_at: datetime, provider_id: ProviderId | None, state: ClusterState) -> datetime:
    charge = None if provider_id is None else state.charges.get(provider_id)
    return began_at if charge is None else max(began_at, charge.until_at)


@remembered(2)
def _of_the_gone(state: ClusterState, views: tuple[NodeView, ...]) -> tuple[UnbilledTime, ...]:
    """The time of instances that are gone and not charged to their end."""
    counted = {view.provider_id for view in views if view.is_ours and view.is_counted}
    orders = _by_instance(state.orders)
    found = (
        _gone(provider_id, orders.get(provider_id), state.instances.get(provider_id), state)
        for provider_id in sorted({*orders, *state.instances})
        if provider_id not in counted
    )
    return tuple(claim for claim in found if claim is not None)


@remembered(2)
def _by_instance(orders: Mapping[ActionId, OrderRecord]) -> Mapping[ProviderId, OrderRecord]:
    return {order.launched.provider_id: order for order in orders.values() if order.launched is not None}


def _gone(
    provider_id: ProviderId, order: OrderRecord | None, instance: NodeInstanceObserved | None, state: ClusterState
) -> UnbilledTime | None:
    launched = None if order is None else order.launched
    said = None if order is None else order.terminated
    began = instance or launched
    ends = (None if part is None else part.terminated_at for part in (instance, said))
    ended_at = next((at for at in ends if at is not None), None)
    charge = state.charges.get(provider_id)
    if began is None or ended_at is None or (charge is not None and charge.is_corrected):
        return None
    from_at = _uncharged_from(began.launched_at, provider_id, state)
    if from_at >= ended_at:
        return None
    decision = None if order is None else order.decision
    parts = (instance, launched, None if decision is None else decision.offer)
    prices = (part.price_micro_usd_per_hour for part in parts if part is not None)
    told = {} if decision is None else dict(decision.labels)
    return UnbilledTime(
        name=provider_id,
        provider_id=provider_id,
        owners=owners_of(None if decision is None else decision.pool, began.zone, told.get(labels.PROJECT_ID)),
        price_micro_usd_per_hour=next((price for price in prices if price is not None), None),
        from_at=from_at,
        until_at=ended_at,
    )
