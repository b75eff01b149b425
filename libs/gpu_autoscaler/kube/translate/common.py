"""Common parts of all translations: quantities, labels, conditions, requirements."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast, get_args

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.resources import GPU_RESOURCE, Resources, is_slice, parse_quantity, parse_quantity_milli
from gpu_autoscaler.model.scheduling import LabelRequirement, Operator

# Labels that name a GPU model, ours first.
GPU_MODEL_LABELS = (
    labels.GPU_MODEL,
    labels.GPU_PRODUCT,
    "karpenter.k8s.aws/instance-gpu-name",  # Karpenter AWS provider, "Well-Known Labels" (read 2026-11-21)
    "gpu-type",  # common hand-written label
)

_ANNOTATIONS_HONORED = frozenset(
    {
        labels.KARPENTER_DO_NOT_DISRUPT,
        labels.SAFE_TO_EVICT,
        labels.SCALE_DOWN_DISABLED,
        labels.POD_GROUP_ANNOTATION,
        labels.POD_GROUP_TOTAL_COUNT,
        *labels.GANG_WITHIN,
        *labels.CONSUME_PROVISIONING_REQUEST,
        *labels.PROVISIONING_CLASS,
    }
)


def pairs(mapping: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return a mapping as in facts: pairs sorted by key."""
    return tuple(sorted(mapping.items()))


def honored(annotations: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the annotations that decisions read; the others are often large."""
    return tuple(
        (key, value)
        for key, value in sorted(annotations.items())
        if key.startswith(f"{labels.PREFIX}/") or key in _ANNOTATIONS_HONORED
    )


def amounts(quantities: Mapping[str, str], *, of: str, is_capacity: bool = False) -> Resources:
    """Return quantities in our units, without unknown resources. Capacity is rounded down. Raises PermanentError naming
    `of` and the resource for an invalid or negative quantity."""

    def whole(name: str) -> int:
        return _amount(quantities, name, lambda text: _floor(text) if is_capacity else parse_quantity(text), of)

    return Resources(
        cpu_milli=_amount(quantities, "cpu", parse_quantity_milli, of),
        memory_bytes=whole("memory"),
        gpu_count=whole(GPU_RESOURCE),
        ephemeral_storage_bytes=whole("ephemeral-storage"),
        pod_count=whole("pods"),
        slices=tuple((name, count) for name in sorted(filter(is_slice, quantities)) if (count := whole(name))),
    )


def _amount(quantities: Mapping[str, str], name: str, read: Callable[[str], int], of: str) -> int:
    try:
        amount = read(quantities.get(name, "0"))
    except ValueError as exc:
        raise PermanentError(f"{of}: {name}: {exc}") from exc
    if amount < 0:
        raise PermanentError(f"{of}: {name}: {quantities[name]} is negative")
    return amount


def _floor(text: str) -> int:
    return parse_quantity_milli(text) // 1000


def group_name(metadata: core.Metadata) -> str:
    """Return the pod group of the pod, from any supported label or annotation; empty: none."""
    values = {**metadata.annotations, **metadata.labels}
    keys = (*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION)
    return next((values[key] for key in keys if values.get(key)), "")


def condition(conditions: Iterable[core.Condition], condition_type: str) -> core.Condition | None:
    """Return the condition of this type, None without one."""
    return next((item for item in conditions if item.type == condition_type), None)


def requirements(conditions: Sequence[core.Requirement]) -> tuple[LabelRequirement, ...]:
    """Return the requirements. Raises PermanentError for an unknown operator."""
    for item in conditions:
        if item.operator not in get_args(Operator):
            raise PermanentError(
                f"requirement on {item.key}: unknown operator {item.operator!r}; use {get_args(Operator)}"
            )
    return tuple(LabelRequirement(item.key, cast("Operator", item.operator), item.values) for item in conditions)
