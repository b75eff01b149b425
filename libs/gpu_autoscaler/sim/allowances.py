"""Invariant: a job whose spend exceeds its job budget ends."""

from collections.abc import Callable

from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.sim.binding import FINISHED
from gpu_autoscaler.sim.kubernetes import Kubernetes
from gpu_autoscaler.sim.store import Tables
from gpu_autoscaler.sim.timeline import VirtualLoop

SPEND_LIMITED = "money"
JOBS_CHECKED_SECONDS = 60.0
# A read of the ledger (every minute), an eviction with its grace period, and the termination by the cloud.
ENDED_SECONDS_MAX = 300.0


class Allowances:
    """Tracks since when each job runs beyond its budget without an active fault."""

    def __init__(
        self,
        loop: VirtualLoop,
        cluster: Kubernetes,
        tables: Tables,
        breaks: Callable[[str, str], None],
        *,
        calm_since: Callable[..., float],
    ) -> None:
        self._loop = loop
        self._cluster = cluster
        self._tables = tables
        self._breaks = breaks
        self._calm_since = calm_since
        self._since: dict[JobId, float] = {}

    def begin(self) -> None:
        """Check every minute."""
        self._loop.call_later(JOBS_CHECKED_SECONDS, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        beyond = {job_id: self._since.get(job_id, now) for job_id in self._beyond()}
        pods = (pod for pod in self._cluster.all(PODS) if pod.status.phase not in FINISHED) if beyond else ()
        at_work = {pod.metadata.labels.get(labels.JOB_ID) for pod in pods}
        self._since = {job_id: since for job_id, since in beyond.items() if job_id in at_work}
        for job_id, since in self._since.items():
            seconds = now - max(since, self._calm_since())
            if seconds > ENDED_SECONDS_MAX:
                spent, limit = self._tables.spent[job_id], self._tables.jobs[job_id].spec.budget_limit_micro_usd
                self._breaks(
                    SPEND_LIMITED, f"job {job_id} has spent {spent} of {limit}, and is at work {seconds:.0f} s later"
                )
                return
        self._loop.call_later(JOBS_CHECKED_SECONDS, self._look)

    def _beyond(self) -> list[JobId]:
        rows = ((job_id, self._tables.jobs.get(job_id), spent) for job_id, spent in self._tables.spent.items())
        return [job_id for job_id, row, spent in rows if row and 0 < (row.spec.budget_limit_micro_usd or 0) < spent]
