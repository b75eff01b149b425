"""ReplicaSets and the PodDisruptionBudgets that protect them.

Source: Kubernetes documentation, "ReplicaSet", "Specifying a Disruption Budget for your Application", "API-initiated
Eviction" (read 2026-11-21).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from gpu_autoscaler.kube.protocol import BUDGETS, PODS, Eviction
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.ids import derive_id
from gpu_autoscaler.sim.cluster.controllers import REACTION_SECONDS, Workloads, controller_of, is_ready
from gpu_autoscaler.sim.cluster.objects import Entry

NAMESPACE = "serving"


@dataclass(slots=True)
class ReplicaSet:
    """Replicas of one pod template."""

    name: str
    uid: str
    replicas_count: int
    pod: core.PodSpec
    annotations: dict[str, str]
    created_count: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its pods, selected by its budget."""
        return {"app": self.name}


class ReplicaSets:
    """The controllers of ReplicaSets and PodDisruptionBudgets."""

    def __init__(self, workloads: Workloads) -> None:
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._by_uid: dict[str, ReplicaSet] = {}  # by uid
        self._is_counting = False
        self._cluster.listen(self._on_change)

    def start(
        self, name: str, pod: core.PodSpec, *, replicas_count: int, annotations: dict[str, str], healthy_count_min: int
    ) -> str:
        """Create the replicas and their budget; return the uid of the ReplicaSet."""
        replica_set = ReplicaSet(name, derive_id("group", name), replicas_count, pod, annotations)
        self._by_uid[replica_set.uid] = replica_set
        selector = core.LabelSelector(match_labels=replica_set.labels)
        budget = core.PodDisruptionBudget(
            metadata=self._cluster.metadata(NAMESPACE, name),
            spec=core.BudgetSpec(selector=selector),
            status=core.BudgetStatus(desired_healthy=healthy_count_min),
        )
        self._cluster.put(BUDGETS, budget)
        self._fill()
        return replica_set.uid

    def scale(self, uid: str, replicas_count: int) -> None:
        """Set the number of replicas; the youngest surplus pods are deleted."""
        replica_set = self._by_uid[uid]
        replica_set.replicas_count = replicas_count
        remaining = [pod for pod in self._pods(replica_set) if pod.metadata.deletion_timestamp is None]
        for pod in remaining[replicas_count:]:
            self._workloads.delete(pod)
        self._fill()

    def stop(self, uid: str) -> None:
        replica_set = self._by_uid.pop(uid)
        budget = self._cluster.find(BUDGETS, NAMESPACE, replica_set.name)
        if budget is not None:
            self._cluster.remove(BUDGETS, budget)
        for pod in self._pods(replica_set):
            self._workloads.delete(pod)

    def names(self) -> list[str]:
        return sorted(replica_set.name for replica_set in self._by_uid.values())

    def tighten(self, name: str) -> Callable[[], None]:
        """Let the budget allow no disruption for now; return a function that restores it."""
        budget = self._cluster.find(BUDGETS, NAMESPACE, name)
        replicas_count = next(
            replica_set.replicas_count for replica_set in self._by_uid.values() if replica_set.name == name
        )
        before = replicas_count if budget is None else budget.status.desired_healthy
        self._require_healthy(name, replicas_count)
        return partial(self._require_healthy, name, before)

    def _require_healthy(self, name: str, healthy_count_min: int) -> None:
        budget = self._cluster.find(BUDGETS, NAMESPACE, name)
        if budget is not None:
            allowed = max(0, budget.status.current_healthy - healthy_count_min)
            status = replace(budget.status, desired_healthy=healthy_count_min, disruptions_allowed=allowed)
            self._cluster.put(BUDGETS, replace(budget, status=status))

    def evict(self, pod: core.Pod) -> Eviction:
        """Answer an eviction like the API server."""
        budgets = self._cluster.budgets_of(pod)
        if len(budgets) > 1:
            return Eviction(answer="refused", message="more than one PodDisruptionBudget covers the pod")
        if budgets and is_ready(pod) and pod.metadata.deletion_timestamp is None:
            status = budgets[0].status
            if status.disruptions_allowed <= 0:
                return Eviction(answer="blocked", message=f"{budgets[0].metadata.name} allows no disruption now")
            # Counted at once, so that two evictions in one instant do not both succeed.
            decremented = replace(
                status, disruptions_allowed=status.disruptions_allowed - 1, current_healthy=status.current_healthy - 1
            )
            self._cluster.put(BUDGETS, replace(budgets[0], status=decremented))
        self._workloads.disrupt(pod)
        return Eviction(answer="accepted")

    def _pods(self, replica_set: ReplicaSet) -> list[core.Pod]:
        return [pod for pod in self._cluster.all(PODS) if controller_of(pod) == replica_set.uid]

    def _on_change(self, plural: str, entry: Entry) -> None:
        if plural == PODS.plural and entry.object.metadata.namespace == NAMESPACE and not self._is_counting:
            self._is_counting = True
            self._workloads.loop.call_later(REACTION_SECONDS, self._count)

    def _count(self) -> None:
        self._is_counting = False
        self._fill()
        for replica_set in self._by_uid.values():
            budget = self._cluster.find(BUDGETS, NAMESPACE, replica_set.name)
            if budget is None:
                continue
            healthy = sum(is_ready(pod) and pod.metadata.deletion_timestamp is None for pod in self._pods(replica_set))
            allowed = max(0, healthy - budget.status.desired_healthy)
            status = replace(budget.status, current_healthy=healthy, disruptions_allowed=allowed)
            if status != budget.status:
                self._cluster.put(BUDGETS, replace(budget, status=status))

    def _fill(self) -> None:
        for replica_set in tuple(self._by_uid.values()):
            remaining = [pod for pod in self._pods(replica_set) if pod.metadata.deletion_timestamp is None]
            for _ in range(replica_set.replicas_count - len(remaining)):
                self._make(replica_set)

    def _make(self, replica_set: ReplicaSet) -> None:
        replica_set.created_count += 1
        owner = core.OwnerReference(kind="ReplicaSet", name=replica_set.name, uid=replica_set.uid, controller=True)
        metadata = self._cluster.metadata(
            NAMESPACE,
            f"{replica_set.name}-{replica_set.created_count}",
            labels=replica_set.labels,
            annotations=dict(replica_set.annotations),
            owner_references=(owner,),
        )
        self._cluster.put(PODS, core.Pod(metadata=metadata, spec=replica_set.pod))
