"""A gang is bought whole or not at all: no plan buys for some of its members and holds others back for a limit. One
that belongs together in a zone is placed in one. Nothing is bought for members beyond a gang that a limit holds back.

Part of the witness.
"""

from collections.abc import Callable, Mapping

from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons import BudgetLimit, GpusLimit, MoneyLimit, NodesLimit, UnmetDemand
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.store.protocol import JobRow

PROMISE = "a gang is bought whole"
_LIMITS = (BudgetLimit, GpusLimit, MoneyLimit, NodesLimit)


class Wholeness:
    """Reads plans beside the jobs that are accepted."""

    def __init__(self, jobs: Mapping[JobId, JobRow], cloud: Cloud, breaks: Callable[[str, str], None]) -> None:
        self._jobs = jobs
        self._cloud = cloud
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
                    gang = self._gang_before(key)
                    if gang in limited:
                        tag = limited[gang].tag()
                        self._breaks(PROMISE, f"{decision.action_id} is bought for {key}, and {tag} holds {gang} back")

    def placed(self, placed: JobPlaced) -> None:
        """A job was released for these nodes."""
        row = self._jobs.get(placed.job_id)
        if row is None or row.spec.within != labels.ZONE:
            return
        machines = (self._cloud.of_node(name) for name in placed.node_names)
        zones = sorted({machine.offer.zone for machine in machines if machine is not None})
        if len(zones) > 1:
            self._breaks(PROMISE, f"{placed.job_id} belongs together in one zone, and is placed in {', '.join(zones)}")

    @staticmethod
    def _gang_before(key: str) -> str:
        """`job/<id>` for `member/<id>/<number>`, a member that the job starts without; empty: it is none."""
        kind, _, name = key.partition("/")
        return f"job/{name.rpartition('/')[0]}" if kind == "member" else ""

    def _is_gang(self, key: str) -> bool:
        row = self._jobs.get(JobId(key.removeprefix("job/")))
        return row is not None and row.spec.gang_count > 1
