"""Invariant: a gang is bought as a whole. No plan buys for some members and defers others for a limit, a gang with a
zone constraint is placed in one zone, and nothing is bought for elastic members of a gang that a limit defers.
"""

from collections.abc import Callable, Mapping

from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons import HourlyPriceLimit, GpusLimit, SpendLimit, NodesLimit, UnmetDemand
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.store.protocol import JobRow

GANGS_WHOLE = "a gang is bought whole"
_LIMITS = (HourlyPriceLimit, GpusLimit, SpendLimit, NodesLimit)


class Wholeness:
    """Compares plans with the accepted jobs."""

    def __init__(self, jobs: Mapping[JobId, JobRow], cloud: Cloud, breaks: Callable[[str, str], None]) -> None:
        self._jobs = jobs
        self._cloud = cloud
        self._breaks = breaks

    def planned(self, plan: Plan) -> None:
        """A plan was published."""
        limited = {held.subject: held.reason for held in plan.deferred if isinstance(held.reason, _LIMITS)}
        for decision in plan.decisions:
            if isinstance(decision, BuyNode) and isinstance(decision.reason, UnmetDemand):
                for key in decision.reason.demand:
                    if key in limited and self._is_gang(key):
                        tag = limited[key].tag()
                        self._breaks(GANGS_WHOLE, f"{decision.action_id} is bought for {key}, and {tag} holds it back")
                    gang = self._gang_before(key)
                    if gang in limited:
                        tag = limited[gang].tag()
                        self._breaks(GANGS_WHOLE, f"{decision.action_id} is bought for {key}, and {tag} holds {gang} back")

    def placed(self, placed: JobPlaced) -> None:
        """A job was released to these nodes."""
        row = self._jobs.get(placed.job_id)
        if row is None or row.spec.within != labels.ZONE:
            return
        machines = (self._cloud.of_node(name) for name in placed.node_names)
        zones = sorted({machine.offer.zone for machine in machines if machine is not None})
        if len(zones) > 1:
            self._breaks(GANGS_WHOLE, f"{placed.job_id} belongs together in one zone, and is placed in {', '.join(zones)}")

    @staticmethod
    def _gang_before(key: str) -> str:
        """Return `job/<id>` for `member/<id>/<number>`, an elastic member; empty for other keys."""
        kind, _, name = key.partition("/")
        return f"job/{name.rpartition('/')[0]}" if kind == "member" else ""

    def _is_gang(self, key: str) -> bool:
        row = self._jobs.get(JobId(key.removeprefix("job/")))
        return row is not None and row.spec.gang_count > 1
