"""Invariant: no voluntary drain starts on a node with pods whose PodDisruptionBudget allows no disruption.

Kubernetes checks the budget at each eviction; the system must not start a drain that cannot complete.
"""

from collections.abc import Callable

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import BUDGETS
from gpu_autoscaler.model.decisions import DrainNode, Plan
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.kubernetes import Entry
from gpu_autoscaler.sim.timeline import VirtualLoop
from gpu_autoscaler.sim.workloads import Workloads, is_ready

NO_VOLUNTARY_REMOVAL = "no voluntary removal"
KNOWN_SECONDS = 60.0  # a budget that has allowed nothing this long without faults is known to every process


class Permission:
    """Tracks since when each budget allows no disruption."""

    def __init__(self, workloads: Workloads, cloud: Cloud, breaks: Callable[[str, str], None]) -> None:
        self._loop: VirtualLoop = workloads.loop
        self._cluster = workloads.cluster
        self._cloud = cloud
        self._breaks = breaks
        self._closed_at: dict[str, float] = {}  # by uid of the budget
        self._cluster.listen(self._heard)

    def _heard(self, plural: str, entry: Entry) -> None:
        budget = entry.object
        if plural != BUDGETS.plural or not isinstance(budget, wire.PodDisruptionBudget):
            return
        if entry.is_deleted or budget.status.disruptions_allowed > 0:
            self._closed_at.pop(budget.metadata.uid, None)
        else:
            self._closed_at.setdefault(budget.metadata.uid, self._loop.time())

    def planned(self, plan: Plan, *, is_calm: bool) -> None:
        """A plan was published. With faults it may use stale data."""
        for decision in plan.decisions if is_calm else ():
            machine = self._cloud.of_node(decision.node_name) if isinstance(decision, DrainNode) else None
            if machine is None or not isinstance(decision, DrainNode) or not decision.is_voluntary:
                continue
            for pod in self._cloud.pods_on(machine):
                closed = self._closed_to(pod) if is_ready(pod) and not pod.metadata.deletion_timestamp else None
                if closed is not None:
                    what = f"{machine.node_name} is drained by choice, and budget {closed} keeps {pod.metadata.name}"
                    self._breaks(NO_VOLUNTARY_REMOVAL, what)
                    return

    def _closed_to(self, pod: wire.Pod) -> str | None:
        for budget in self._cluster.all(BUDGETS):
            selector = budget.spec.selector
            covers = (
                budget.metadata.namespace == pod.metadata.namespace
                and selector is not None
                and selector.match_labels.items() <= pod.metadata.labels.items()
            )
            closed_at = self._closed_at.get(budget.metadata.uid)
            if covers and closed_at is not None and self._loop.time() - closed_at > KNOWN_SECONDS:
                return budget.metadata.name
        return None
