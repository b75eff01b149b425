"""The second opinion on what is bought in one call: alike, and of one gang. Called by `core/check.py` alone."""

from collections import defaultdict
from collections.abc import Iterator

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, Plan


def together_mistakes(plan: Plan, _: ClusterState, __: ScalingPolicy) -> Iterator[str]:
    """What the cloud is asked for in one call is refused or sold as one, so all of it has to be of one gang."""
    calls: dict[str, list[BuyNode]] = defaultdict(list)
    for decision in plan.decisions:
        if isinstance(decision, BuyNode) and decision.transaction is not None:
            calls[decision.transaction].append(decision)
    for name, bought in calls.items():
        if len(bought) < 2 or bought[0].action_id != name:
            yield f"{len(bought)} nodes are bought in one call as {name}, which is the first of two or more nowhere"
        if bought[0].gang is None or any(one.gang != bought[0].gang for one in bought):
            yield f"nodes are bought in one call as {name}, and are not of one gang"
        if any(
            (one.pool, one.offer, one.taints) != (bought[0].pool, bought[0].offer, bought[0].taints) for one in bought
        ):
            yield f"nodes are bought in one call as {name}, and are not alike"
