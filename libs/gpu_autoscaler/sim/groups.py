"""ReplicaSets and the PodDisruptionBudgets that protect them.

The rules of the ReplicaSet and disruption controllers, driven by events. Source: Kubernetes documentation,
"ReplicaSet", "Specifying a Disruption Budget for your Application", "API-initiated Eviction" (read 2026-11-21).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import BUDGETS, PODS, Eviction
from gpu_autoscaler.model.ids import derive_id
from gpu_autoscaler.sim.kubernetes import Entry
from gpu_autoscaler.sim.workloads import NOTICED_SECONDS, Workloads, controller_of, is_ready

NAMESPACE = "serving"


@dataclass(slots=True)
class Group:
    """Replicas of one pod template."""

    name: str
    uid: str
    replicas_count: int
    pod: wire.PodSpec
    annotations: dict[str, str]
    made_count: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its pods, selected by its budget."""
        return {"app": self.name}


class Groups:
    """The controllers of ReplicaSets and PodDisruptionBudgets."""

    def __init__(self, workloads: Workloads) -> None:
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._groups: dict[str, Group] = {}  # by uid
        self._is_counting = False
        self._cluster.listen(self._heard)

    def start(
        self, name: str, pod: wire.PodSpec, *, replicas_count: int, annotations: dict[str, str], healthy_count_min: int
    ) -> str:
        """Create the replicas and their budget; return the uid of the ReplicaSet."""
        group = Group(name, derive_id("group", name), replicas_count, pod, annotations)
        self._groups[group.uid] = group
        selector = wire.LabelSelector(match_labels=group.labels)
        budget = wire.PodDisruptionBudget(
            metadata=self._cluster.metadata(NAMESPACE, name),
            spec=wire.BudgetSpec(selector=selector),
            status=wire.BudgetStatus(desired_healthy=healthy_count_min),
        )
        self._cluster.put(BUDGETS, budget)
        self._fill()
        return group.uid

    def scale(self, uid: str, replicas_count: int) -> None:
        """Set the number of replicas; the youngest surplus pods are deleted."""
        group = self._groups[uid]
        group.replicas_count = replicas_count
        staying = [pod for pod in self._pods(group) if pod.metadata.deletion_timestamp is None]
        for pod in staying[replicas_count:]:
            self._workloads.delete(pod)
        self._fill()

    def stop(self, uid: str) -> None:
        """Delete the replicas and their budget."""
        group = self._groups.pop(uid)
        budget = self._cluster.find(BUDGETS, NAMESPACE, group.name)
        if budget is not None:
            self._cluster.remove(BUDGETS, budget)
        for pod in self._pods(group):
            self._workloads.delete(pod)

    def names(self) -> list[str]:
        """Return the names of all ReplicaSets, sorted."""
        return sorted(group.name for group in self._groups.values())

    def tighten(self, name: str) -> Callable[[], None]:
        """Let the budget allow no disruption for now; return a function that restores it."""
        budget = self._cluster.find(BUDGETS, NAMESPACE, name)
        replicas_count = next(group.replicas_count for group in self._groups.values() if group.name == name)
        before = replicas_count if budget is None else budget.status.desired_healthy
        self._demand(name, replicas_count)
        return partial(self._demand, name, before)

    def _demand(self, name: str, healthy_count_min: int) -> None:
        budget = self._cluster.find(BUDGETS, NAMESPACE, name)
        if budget is not None:
            allowed = max(0, budget.status.current_healthy - healthy_count_min)
            status = replace(budget.status, desired_healthy=healthy_count_min, disruptions_allowed=allowed)
            self._cluster.put(BUDGETS, replace(budget, status=status))

    def evict(self, pod: wire.Pod) -> Eviction:
        """Answer an eviction like the API server."""
        budgets = self.budgets_of(pod)
        if len(budgets) > 1:
            return Eviction(answer="refused", message="more than one PodDisruptionBudget covers the pod")
        if budgets and is_ready(pod) and pod.metadata.deletion_timestamp is None:
            status = budgets[0].status
            if status.disruptions_allowed <= 0:
                return Eviction(answer="blocked", message=f"{budgets[0].metadata.name} allows no disruption now")
            # Counted at once, so that two evictions in one instant do not both succeed.
            spent = replace(
                status, disruptions_allowed=status.disruptions_allowed - 1, current_healthy=status.current_healthy - 1
            )
            self._cluster.put(BUDGETS, replace(budgets[0], status=spent))
        self._workloads.disrupt(pod)
        return Eviction(answer="accepted")

    def budgets_of(self, pod: wire.Pod) -> list[wire.PodDisruptionBudget]:
        """Return the budgets that cover the pod."""
        return [
            budget
            for budget in self._cluster.all(BUDGETS)
            if budget.metadata.namespace == pod.metadata.namespace
            and budget.spec.selector is not None
            and budget.spec.selector.match_labels.items() <= pod.metadata.labels.items()
        ]

    def _pods(self, group: Group) -> list[wire.Pod]:
        return [pod for pod in self._cluster.all(PODS) if controller_of(pod) == group.uid]

    def _heard(self, plural: str, entry: Entry) -> None:
        if plural == PODS.plural and entry.object.metadata.namespace == NAMESPACE and not self._is_counting:
            self._is_counting = True
            self._workloads.loop.call_later(NOTICED_SECONDS, self._count)

    def _count(self) -> None:
        self._is_counting = False
        self._fill()
        for group in self._groups.values():
            budget = self._cluster.find(BUDGETS, NAMESPACE, group.name)
            if budget is None:
                continue
            healthy = sum(is_ready(pod) and pod.metadata.deletion_timestamp is None for pod in self._pods(group))
            allowed = max(0, healthy - budget.status.desired_healthy)
            status = replace(budget.status, current_healthy=healthy, disruptions_allowed=allowed)
            if status != budget.status:
                self._cluster.put(BUDGETS, replace(budget, status=status))

    def _fill(self) -> None:
        for group in tuple(self._groups.values()):
            staying = [pod for pod in self._pods(group) if pod.metadata.deletion_timestamp is None]
            for _ in range(group.replicas_count - len(staying)):
                self._make(group)

    def _make(self, group: Group) -> None:
        group.made_count += 1
        owner = wire.OwnerReference(kind="ReplicaSet", name=group.name, uid=group.uid, controller=True)
        metadata = self._cluster.metadata(
            NAMESPACE,
            f"{group.name}-{group.made_count}",
            labels=group.labels,
            annotations=dict(group.annotations),
            owner_references=(owner,),
        )
        self._cluster.put(PODS, wire.Pod(metadata=metadata, spec=group.pod))
