"""The status of an AutoscalingPolicy: its nodes and costs by pool, and whether it is active."""

from collections.abc import Sequence
from datetime import datetime

from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.state.ledger import Period, period_name
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.kube.wire.policy import PolicyCondition, PolicySpec, PolicyStatus, PoolStatus
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import PolicyDocument

MESSAGE_LENGTH_MAX = 4096  # of a condition; Kubernetes allows eight times as much


def policy_status(
    before: PolicyStatus,
    generation: int,
    active: PolicyDocument | None,
    active_spec: PolicySpec | None,
    refused: Sequence[str],
    state: ClusterState,
    now: datetime,
) -> PolicyStatus:
    """Return the status of the policy at this generation. `refused`: why it is not active; empty if it is."""
    names = () if active is None else tuple(pool.name for pool in active.pools)
    own = [view for view in node_views(state, now) if view.is_ours and view.pool in names]
    pools = tuple(_pool(name, [view for view in own if view.pool == name]) for name in names)
    ready = [view for view in own if view.is_usable]
    pending = sum(pool.pending for pool in pools)
    spot = sum(view.capacity_type is CapacityType.SPOT for view in ready)
    prices = [view.price_micro_usd_per_hour for view in own if view.is_counted]
    return PolicyStatus(
        observed_generation=generation,
        active_generation=None if active is None else active.generation,
        active_spec=active_spec if active is not None and active.generation != generation else None,
        nodes=len(ready),
        nodes_pending=pending,
        nodes_desired=len(ready) + pending,
        gpus=sum(view.allocatable.gpu_count for view in ready),
        spot_percentage=round(100 * spot / len(ready)) if ready else None,
        price_usd_per_hour=None if None in prices else _usd(sum(price or 0 for price in prices)),
        spent_today_usd=_spent("day", names, state, now),
        spent_this_month_usd=_spent("month", names, state, now),
        pools=pools,
        conditions=_conditions(before, generation, active, refused, now),
    )


def _pool(name: str, own: Sequence[NodeView]) -> PoolStatus:
    return PoolStatus(
        name=name,
        nodes=sum(view.is_usable for view in own),
        pending=sum(view.is_booting for view in own),
        terminating=sum(view.is_leaving for view in own),
        gpus=sum(view.allocatable.gpu_count for view in own if view.is_usable),
    )


def _spent(period: Period, pools: Sequence[str], state: ClusterState, now: datetime) -> str | None:
    """Return what the ledger has charged; None while it has published nothing."""
    if state.ledger_reported_at is None and not state.charges:
        return None
    owners = state.spent.get(period_name(period, now)) or {}
    return _usd(sum(owners.get(f"pool/{name}", 0) for name in pools))


def _usd(micro_usd: int) -> str:
    return f"{micro_usd / MICRO_USD_PER_USD:.2f}"


def _conditions(
    before: PolicyStatus, generation: int, active: PolicyDocument | None, refused: Sequence[str], now: datetime
) -> tuple[PolicyCondition, ...]:
    """Return the conditions `Accepted` (the policy is valid) and `Ready` (this generation is active)."""
    if not refused:
        accepted = ("True", "Accepted", "")
        ready = ("True", "Active", f"generation {generation} is active")
    else:
        accepted = ("False", "Refused", "; ".join(refused)[:MESSAGE_LENGTH_MAX])
        message = "no generation is active" if active is None else f"generation {active.generation} stays active"
        ready = ("False", "Refused", message)
    known = {condition.type: condition for condition in before.conditions}
    return (
        _condition("Accepted", *accepted, generation, known.get("Accepted"), now),
        _condition("Ready", *ready, generation, known.get("Ready"), now),
    )


def _condition(
    kind: str, status: str, reason: str, message: str, generation: int, before: PolicyCondition | None, now: datetime
) -> PolicyCondition:
    """Return the condition; its transition time is that of the last change of its status."""
    is_unchanged = before is not None and before.status == status
    return PolicyCondition(
        type=kind,
        status="True" if status == "True" else "False",
        reason=reason,
        message=message,
        observed_generation=generation,
        last_transition_time=before.last_transition_time
        if before is not None and is_unchanged
        else now.replace(microsecond=0),
    )
