"""Which labels and taints a pod accepts in its node. Called by placement; knows no amounts.

Semantics: Kubernetes documentation, "Assigning Pods to Nodes" and "Taints and Tolerations" (read 2026-11-21).
"""

from collections.abc import Sequence

from gpu_autoscaler.model.scheduling import LabelRequirement, Taint, Toleration


def holds(requirement: LabelRequirement, value: str | None) -> bool:
    """True when one condition holds on its label's value; without the label (None) only NotIn and DoesNotExist do."""
    match requirement.operator:
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return _difference(value, requirement.values) > 0
        case "Lt":
            return _difference(value, requirement.values) < 0


def tolerates(tolerations: Sequence[Toleration], taints: Sequence[Taint]) -> bool:
    """True when every taint that keeps pods away is tolerated; PreferNoSchedule keeps nobody away."""
    return all(
        taint.effect == "PreferNoSchedule" or any(_covers(toleration, taint) for toleration in tolerations)
        for taint in taints
    )


def avoided(tolerations: Sequence[Toleration], taints: Sequence[Taint]) -> tuple[Taint, ...]:
    """Return the taints by which a node would rather not have the pod: PreferNoSchedule that it does not tolerate."""
    return tuple(
        taint
        for taint in taints
        if taint.effect == "PreferNoSchedule" and not any(_covers(toleration, taint) for toleration in tolerations)
    )


def _covers(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect not in ("", taint.effect):
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", taint.key)
    return (toleration.key, toleration.value) == (taint.key, taint.value)


def _difference(value: str | None, bounds: Sequence[str]) -> int:
    """Gt and Lt compare integers with one bound; anything else is as good as equal, so neither holds."""
    try:
        return int(value) - int(bounds[0]) if value is not None and len(bounds) == 1 else 0
    except ValueError:
        return 0
