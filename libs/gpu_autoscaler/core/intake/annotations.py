"""Annotations of pods that users set: how each has to be written, and every violation.

Jobs with an invalid one are refused. Other pods are created without us: `why` and a Kubernetes Event name the
annotation, and decisions go on without its value.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import PRIORITY_NAMES, Violation
from gpu_autoscaler.model.observed import aware_instant, go_duration

_COUNT = re.compile(r"[1-9]\d{0,5}")


class _Value(NamedTuple):
    is_valid: Callable[[str], bool]
    rule: str


def _is_instant(value: str) -> bool:
    return aware_instant(value) is not None


_INSTANT = _Value(_is_instant, "must be a time with its zone, such as 2026-11-27T18:00:00Z")
_SWITCH = _Value(lambda value: value in ("true", "false"), 'must be "true" or "false"')
_PROTECTED = _Value(
    lambda value: value in ("true", "false") or go_duration(value) is not None,
    'must be "true", "false" or a duration such as 1h30m; it protects the pod until it is corrected',
)
_FORMS: Mapping[str, _Value] = {
    labels.CHECKPOINTED_AT: _Value(lambda value: not value or _is_instant(value), f"{_INSTANT.rule}, or empty"),
    labels.CHECKPOINT_HOOK: _Value(
        lambda value: labels.CHECKPOINT_HOOK_FORM.fullmatch(value) is not None,
        "must be a port and path of the pod, such as :8080/checkpoint",
    ),
    labels.DO_NOT_DISRUPT: _PROTECTED,
    labels.KARPENTER_DO_NOT_DISRUPT: _PROTECTED,
    labels.EVICTION_PRIORITY: _Value(lambda value: value in PRIORITY_NAMES, f"use {', '.join(PRIORITY_NAMES)}"),
    labels.EXPECTED_END: _INSTANT,
    labels.IDLE_ALLOWED: _SWITCH,
    labels.POD_GROUP_TOTAL_COUNT: _Value(
        lambda value: _COUNT.fullmatch(value) is not None, "must be the number of pods of the group, at least 1"
    ),
    labels.SAFE_TO_EVICT: _SWITCH,
    labels.START_BY: _INSTANT,
}


def annotation_violations(annotations: Iterable[tuple[str, str]]) -> Iterator[Violation]:
    """Yield the annotations whose value has another form than their key demands. Unknown keys are not checked."""
    for key, value in annotations:
        form = _FORMS.get(key)
        if form is not None and not form.is_valid(value):
            shown = value if len(value) <= 60 else f"{value[:57]}..."
            yield Violation(key, f"is {shown!r}; {form.rule}")
