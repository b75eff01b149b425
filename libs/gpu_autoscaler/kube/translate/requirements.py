"""Conditions on labels, of affinities and selectors."""

from collections.abc import Sequence
from typing import cast, get_args

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.scheduling import LabelRequirement, Operator


def requirements(conditions: Sequence[core.Requirement]) -> tuple[LabelRequirement, ...]:
    """Return the conditions with our names. Raises PermanentError for an operator that nobody knows."""
    for one in conditions:
        if one.operator not in get_args(Operator):
            raise PermanentError(f"condition on {one.key}: operator {one.operator!r} is none of {get_args(Operator)}")
    return tuple(LabelRequirement(one.key, cast("Operator", one.operator), one.values) for one in conditions)
