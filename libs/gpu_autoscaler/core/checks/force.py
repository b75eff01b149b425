"""The part of the second opinion that looks at force and at replacements: who is emptied against its pods'
protection, and what is bought to save money.

Called by `core/checks/removals.py` alone.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.nodes.life import node_views
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons import BootTimedOut, NodeExpired, NodeUnhealthy, ReplacesNodes


def unfounded_force(drain: DrainNode, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Iterator[str]:
    """Yield a sentence for a drain with force that no sickness, age or boot bears out, or that leaves little time."""
    node, rules = state.nodes.get(drain.node_uid), policy.removal
    if node is None:
        return
    age_seconds, limit = (as_of - node.created_at).total_seconds(), rules.expire_seconds_max
    match drain.reason:
        case NodeExpired():
            least = None if limit is None else limit * (1 - rules.expire_jitter_ratio) + rules.expire_grace_seconds
            if least is None or age_seconds < least:
                yield f"node {drain.node_name} is emptied by force at an age of {age_seconds:g} s"
        case NodeUnhealthy():
            if not drain.reason.is_fatal:
                yield f"node {drain.node_name} is emptied by force, though its GPUs still work"
        case BootTimedOut():
            view = next((each for each in node_views(state, as_of) if each.node_uid == drain.node_uid), None)
            if view is None or view.usable_since is not None or view.usable_by is None or as_of < view.usable_by:
                yield f"node {drain.node_name} is emptied by force, though it was usable, or may be in time"
        case _:
            yield f"node {drain.node_name} is emptied by force, which {drain.reason.tag()} does not allow"
    if drain.deadline_at < as_of + timedelta(seconds=rules.forced_drain_seconds):
        yield f"node {drain.node_name} is emptied by force within less than {rules.forced_drain_seconds:g} s"


def vain_replacements(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node bought in place of others that is no cheaper, or is bought twice at once."""
    prices = {each.provider_id: each.price_micro_usd_per_hour for each in state.instances.values()}
    for record in state.orders.values():
        if record.launched is not None:
            prices.setdefault(record.launched.provider_id, record.launched.price_micro_usd_per_hour)
    yield from _bought_back(plan, state, policy)
    overhead = policy.node_overhead_micro_usd_per_hour
    spent: Counter[tuple[NodeUid, ...]] = Counter()
    for decision in plan.decisions:
        reason = decision.reason
        if isinstance(decision, BuyNode) and isinstance(reason, ReplacesNodes) and reason.cause == "underused":
            spent[reason.node_uids] += (decision.offer.price_micro_usd_per_hour or 0) + overhead
    for node_uids, price in spent.items():
        instances = [state.nodes[uid].provider_id for uid in node_uids if uid in state.nodes]
        known = [prices.get(each) for each in instances if each is not None]
        # Prices of some may be known by the offer alone: nothing is proven against those.
        if (
            None not in known
            and len(known) == len(node_uids)
            and price >= sum((each or 0) + overhead for each in known)
        ):
            yield f"nodes {', '.join(node_uids)} are replaced to save money by what costs {price} micro-dollars an hour"


def _bought_back(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """What went by choice within the cooldown is not bought again to save money."""
    since = plan.as_of - timedelta(seconds=policy.scale_down_cooldown_seconds)
    left = {
        record.decision.provider_id
        for record in state.drains.values()
        if isinstance(record.decision, DrainNode)
        and record.decision.is_voluntary
        and record.cancelled is None
        and record.planned_at is not None
        and record.planned_at > since
    }
    kinds = {each.instance_type for each in state.instances.values() if each.provider_id in left}
    for decision in plan.decisions:
        reason = decision.reason
        is_for_money = isinstance(reason, ReplacesNodes) and reason.cause == "underused"
        if isinstance(decision, BuyNode) and is_for_money and decision.offer.instance_type in kinds:
            yield f"{decision.offer.key} is bought to save money, and one of its kind went a moment ago"
