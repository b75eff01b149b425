"""A gang is bought whole or not at all: no plan buys for some of its members and holds others back for a limit.

Part of the witness.
"""

from collections.abc import Callable, Mapping

from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons import BudgetLimit, GpusLimit, MoneyLimit, NodesLimit, UnmetDemand
from gpu_autoscaler.store.protocol import JobRow

PROMISE = "a gang is bought whole"
_LIMITS = (BudgetLimit, GpusLimit, MoneyLimit, NodesLimit)


class Wholeness:
    """Reads plans beside the jobs that are accepted."""

    def __init__(self, jobs: Mapping[JobId, JobRow], breaks: Callable[[str, str], None]) -> None:
        self._jobs = jobs
        self._breaks = breaks

    def planned(self, plan: Plan) -> None:
        """A plan was made."""
        limited = {held.subject: held.reason for held in plan.held_back if isinstance(held.reason, _LIMITS)}
        for decision in plan.decisions:
            if isinstance(decision, BuyNode) and isinstance(decision.reason, UnmetDemand):
                for key in decision.reason.demand:
                    if key in limited and self._is_gang(key):
                        tag = limited[key].tag()
                        self._breaks(PROMISE, f"{decision.action_id} is bought for {key}, and {tag} holds it back")

    def _is_gang(self, key: str) -> bool:
        row = self._jobs.get(JobId(key.removeprefix("job/")))
        return row is not None and row.spec.gang_count > 1
