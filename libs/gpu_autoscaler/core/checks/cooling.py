"""The part of the second opinion that looks at the scale-up cooldown. Called by `core/check.py` alone."""

from collections.abc import Iterator

from gpu_autoscaler.core.checks.pods import job_named
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.reasons import UnmetDemand

_HIGH_PRIORITY = 1000


def hurried_purchases(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node that is bought within the cooldown for jobs none of which is urgent."""
    seconds = policy.limits.scale_up_cooldown_seconds
    if not seconds:
        return
    orders = [order for order in state.orders.values() if order.decision is not None and order.planned_at is not None]
    known = [order for order in orders if order.decision and isinstance(order.decision.reason, UnmetDemand)]
    ages = [(plan.as_of - order.planned_at).total_seconds() for order in known if order.planned_at is not None]
    if not ages or min(ages) >= seconds:
        return
    begun = {order.decision.gang for order in known if order.decision is not None}
    for decision in plan.decisions:
        if not isinstance(decision, BuyNode) or not isinstance(decision.reason, UnmetDemand):
            continue
        named = [job_named(key) for key in decision.reason.demand]
        jobs = [None if job_id is None else state.jobs.get(job_id) for job_id in named]
        priorities = [None if job is None or job.queued is None else job.queued.spec.priority for job in jobs]
        # Of pods nothing is proven here: what makes one urgent is Kubernetes' own scale of priorities.
        is_proven = priorities and None not in priorities and max(each or 0 for each in priorities) < _HIGH_PRIORITY
        if is_proven and (decision.gang is None or decision.gang not in begun):
            yield f"{decision.offer.key} is bought {min(ages):g} s after the last purchase, {seconds:g} s are to pass"
