"""The part of the second opinion that looks at budgets of removals. Called by `core/checks/removals.py` alone.

Reads the clock face minute by minute, where `core/removing/pace.py` looks for the last beginning.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.cron import schedule
from gpu_autoscaler.core.policies.removal import DisruptionBudget
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.hints import RebalanceRecommended
from gpu_autoscaler.model.reasons import BootTimedOut, NodeDrifted, NodeExpired, NodeUnhealthy, NodeUnderused

_MINUTE = timedelta(minutes=1)


def beyond_budgets(
    drains: Iterable[DrainNode], moving_count: int, nodes_count: int, policy: ScalingPolicy, as_of: datetime
) -> Iterator[str]:
    """Yield a sentence for each budget that is passed by `moving_count` nodes from before and these of one cause."""
    counts = Counter(_cause(drain) for drain in drains)
    for budget in policy.removal.disruption_budgets:
        is_bad = any(budget.mistakes())
        if not is_bad and not _holds(budget, as_of):
            continue
        for cause, count in counts.items():
            if budget.causes and cause not in budget.causes:
                continue
            going = moving_count + count
            if is_bad:
                yield f"{going} nodes would be leaving as {cause} under a budget that cannot be read"
            elif budget.nodes_count_max is not None and going > budget.nodes_count_max:
                yield f"{going} nodes would be leaving as {cause}, a budget allows {budget.nodes_count_max}"
            # Rounded up, so less than one node more than the share.
            elif budget.nodes_ratio_max is not None and going - nodes_count * budget.nodes_ratio_max > 1 - 1e-6:
                yield f"{going} of {nodes_count} nodes would be leaving as {cause}, a budget allows a smaller share"


def _cause(drain: DrainNode) -> str:
    names = {
        NodeUnderused: "underused",
        NodeDrifted: "drifted",
        NodeExpired: "expired",
        NodeUnhealthy: "unhealthy",
        BootTimedOut: "unhealthy",
        RebalanceRecommended: "rebalance_recommended",
    }
    return names.get(type(drain.reason), "empty")


def _holds(budget: DisruptionBudget, as_of: datetime) -> bool:
    if budget.schedule is None or budget.duration_seconds is None:
        return True
    face = schedule(budget.schedule, budget.time_zone)
    at = as_of.replace(second=0, microsecond=0)
    while at > as_of - timedelta(seconds=budget.duration_seconds):
        wall = at.astimezone(face.zone)
        if wall.minute in face.minutes and wall.hour in face.hours and face.starts_on(wall.date()):
            return True
        at -= _MINUTE
    return False
