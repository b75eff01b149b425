"""Label requirements and tolerations of a pod against a node.

Semantics: Kubernetes documentation, "Assigning Pods to Nodes" and "Taints and Tolerations" (read 2026-11-21).
"""

from collections.abc import Sequence

from gpu_autoscaler.model.scheduling import LabelRequirement, Taint, Toleration


def holds(requirement: LabelRequirement, value: str | None) -> bool:
    """True if the requirement holds for the value; without the label (None) only NotIn and DoesNotExist hold."""
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
    """True if every taint that blocks scheduling is tolerated; PreferNoSchedule blocks nothing."""
    return all(
        taint.effect == "PreferNoSchedule" or any(_covers(toleration, taint) for toleration in tolerations)
        for taint in taints
    )


def avoided(tolerations: Sequence[Toleration], taints: Sequence[Taint]) -> tuple[Taint, ...]:
    """Return the PreferNoSchedule taints that the pod does not tolerate."""
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
    """Return value minus bound. Gt and Lt compare integers with one bound; anything else gives 0, so neither holds."""
    try:
        return int(value) - int(bounds[0]) if value is not None and len(bounds) == 1 else 0
    except ValueError:
        return 0
