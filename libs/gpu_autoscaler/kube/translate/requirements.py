"""Translates label requirements of affinities and selectors."""

from collections.abc import Sequence
from typing import cast, get_args

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.scheduling import LabelRequirement, Operator


def requirements(conditions: Sequence[core.Requirement]) -> tuple[LabelRequirement, ...]:
    """Return the requirements. Raises PermanentError for an unknown operator."""
    for item in conditions:
        if item.operator not in get_args(Operator):
            raise PermanentError(
                f"requirement on {item.key}: unknown operator {item.operator!r}; use {get_args(Operator)}"
            )
    return tuple(LabelRequirement(item.key, cast("Operator", item.operator), item.values) for item in conditions)
