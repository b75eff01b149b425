"""Disruption budgets as facts. Source: Kubernetes API reference v1.36, "PodDisruptionBudget" (read 2026-11-21)."""

from gpu_autoscaler.events.pod import PodBudgetGone, PodBudgetObserved
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.translate.requirements import requirements
from gpu_autoscaler.model.scheduling import LabelRequirement

# No label has an empty key: a condition that never holds.
_SELECTS_NOTHING = LabelRequirement("", "Exists")


def budget_observed(budget: wire.PodDisruptionBudget, *, epoch: int) -> PodBudgetObserved:
    """Return the budget as a fact. A status that lags behind its spec allows nothing, as the eviction itself has it."""
    status = budget.status
    is_current = status.observed_generation >= budget.metadata.generation
    return PodBudgetObserved(
        epoch=epoch,
        version=budget.version,
        budget_uid=budget.metadata.uid,
        namespace=budget.metadata.namespace,
        name=budget.metadata.name,
        match_labels=_selector(budget.spec.selector),
        disruptions_allowed=status.disruptions_allowed if is_current else 0,
        pods_healthy_count=status.current_healthy,
        pods_healthy_count_min=status.desired_healthy,
    )


def budget_gone(budget: wire.PodDisruptionBudget, *, epoch: int) -> PodBudgetGone:
    """Return the budget's end as a fact."""
    return PodBudgetGone(
        epoch=epoch,
        version=budget.version,
        budget_uid=budget.metadata.uid,
        namespace=budget.metadata.namespace,
        name=budget.metadata.name,
    )


def _selector(selector: wire.LabelSelector | None) -> tuple[LabelRequirement, ...]:
    if selector is None:
        return (_SELECTS_NOTHING,)
    equal = tuple(LabelRequirement(key, "In", (value,)) for key, value in sorted(selector.match_labels.items()))
    return equal + requirements(selector.match_expressions)
