"""Status of PodDisruptionBudgets: healthy pods, required ones, and allowed disruptions.

Source: `pkg/controller/disruption` of Kubernetes 1.36 (read 2026-11-21). One intended deviation: for percentages and
maxUnavailable the real controller asks the pods' owner for its scale, and allows nothing if the owner (a Job, or
none) has none; here the matching pods are the expected ones.
"""

import math
from dataclasses import dataclass, field
from datetime import datetime

from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.kinds import BUDGETS, PODS
from gpu_autoscaler.simcluster.objects import (
    Json,
    is_finished,
    is_terminating,
    is_true,
    key_of,
    labels_of,
    set_condition,
)
from gpu_autoscaler.simcluster.selectors import selector_matches
from gpu_autoscaler.simcluster.store import Change


@dataclass(slots=True)
class _Members:
    """The pods selected by one budget."""

    selector: Json | None
    healthy_by_key: dict[str, bool] = field(default_factory=dict)


class Budgets:
    """Counts the pods of each budget as they change, and writes its status."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._members: dict[str, dict[str, _Members]] = {}  # namespace -> budget key -> pods
        self._stale: dict[str, None] = {}

    def on_change(self, change: Change) -> None:
        namespace = change.record.key.partition("/")[0]
        if change.table == PODS.table:
            pod = None if change.type == "DELETED" else change.record.object
            for key, members in self._members.get(namespace, {}).items():
                if self._count(members, change.record.key, pod):
                    self._stale[key] = None
        elif change.table == BUDGETS.table:
            self._budget_changed(change, namespace)

    def step(self, now: datetime) -> None:
        stale, self._stale = self._stale, {}
        for key in stale:
            members = self._members.get(key.partition("/")[0], {}).get(key)
            if members is not None:
                self._api.modify(BUDGETS, key, lambda new, members=members: _write(new, members, now))  # type: ignore[misc]

    def _budget_changed(self, change: Change, namespace: str) -> None:
        key, budget = change.record.key, change.record.object
        budgets = self._members.setdefault(namespace, {})
        if change.type == "DELETED":
            budgets.pop(key, None)
            return
        selector = budget.get("spec", {}).get("selector")
        if key not in budgets or budgets[key].selector != selector:
            members = budgets[key] = _Members(selector)
            for pod in self._api.objects(PODS, namespace):
                self._count(members, key_of(pod), pod)
        elif budget["status"].get("observedGeneration") == budget["metadata"]["generation"]:
            return  # our own write, or an eviction's: the pod's change will follow
        self._stale[key] = None

    @staticmethod
    def _count(members: _Members, key: str, pod: Json | None) -> bool:
        """Update the pod's count; return whether it changed anything."""
        if pod is None or is_finished(pod) or not selector_matches(members.selector, labels_of(pod)):
            return members.healthy_by_key.pop(key, None) is not None
        healthy = is_true(pod, "Ready") and not is_terminating(pod)
        if members.healthy_by_key.get(key) is healthy:
            return False
        members.healthy_by_key[key] = healthy
        return True


def _write(budget: Json, members: _Members, now: datetime) -> None:
    expected = len(members.healthy_by_key)
    healthy = sum(members.healthy_by_key.values())
    desired = _desired(budget.get("spec") or {}, expected)
    allowed = max(0, healthy - desired) if expected else 0
    generation = budget["metadata"]["generation"]
    budget["status"].update(
        currentHealthy=healthy,
        desiredHealthy=desired,
        expectedPods=expected,
        disruptionsAllowed=allowed,
        observedGeneration=generation,
    )
    set_condition(
        budget,
        now,
        "DisruptionAllowed",
        status="True" if allowed else "False",
        reason="SufficientPods" if allowed else "InsufficientPods",
        message="",
        observedGeneration=generation,
    )


def _desired(spec: Json, expected: int) -> int:
    """Return how many healthy pods the budget needs. Percentages round up, as the real controller's do."""
    if spec.get("maxUnavailable") is not None:
        return max(0, expected - _share(spec["maxUnavailable"], expected))
    return _share(spec.get("minAvailable", 1), expected)


def _share(amount: object, expected: int) -> int:
    text = str(amount)
    return math.ceil(int(text[:-1]) * expected / 100) if text.endswith("%") else int(text)
