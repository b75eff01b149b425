"""What the translations of all kinds share: amounts, labels, conditions."""

from collections.abc import Callable, Iterable, Mapping

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.resources import (
    GPU_RESOURCE,
    Resources,
    is_slice,
    parse_quantity,
    parse_quantity_milli,
)

# Labels that name a GPU model, ours first.
GPU_MODEL_LABELS = (
    labels.GPU_MODEL,
    labels.GPU_PRODUCT,
    "karpenter.k8s.aws/instance-gpu-name",  # Karpenter AWS provider, "Well-Known Labels" (read 2026-11-21)
    "gpu-type",  # what people write by hand
)

_ANNOTATIONS_HONOURED = frozenset(
    {
        labels.KARPENTER_DO_NOT_DISRUPT,
        labels.SAFE_TO_EVICT,
        labels.SCALE_DOWN_DISABLED,
        labels.POD_GROUP_ANNOTATION,
        labels.POD_GROUP_TOTAL_COUNT,
        *labels.GANG_WITHIN,
    }
)


def pairs(mapping: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return a mapping as facts carry it: sorted by key."""
    return tuple(sorted(mapping.items()))


def honoured(annotations: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the annotations that decisions read; the rest is other people's and often large."""
    return tuple(
        (key, value)
        for key, value in sorted(annotations.items())
        if key.startswith(f"{labels.PREFIX}/") or key in _ANNOTATIONS_HONOURED
    )


def amounts(quantities: Mapping[str, str], *, of: str, is_room: bool = False) -> Resources:
    """Return quantities in our units; resources that we do not know are left out. What is room is rounded down.

    Raises PermanentError naming `of` and the resource where a quantity is none, or below nothing.
    """

    def whole(name: str) -> int:
        return _amount(quantities, name, lambda text: _floor(text) if is_room else parse_quantity(text), of)

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
        raise PermanentError(f"{of}: {name}: {quantities[name]} is less than nothing")
    return amount


def _floor(text: str) -> int:
    return parse_quantity_milli(text) // 1000


def group_name(metadata: core.Metadata) -> str:
    """Return the name of the group that the pod says to be of, whoever's label or annotation says it; empty: none."""
    said = {**metadata.annotations, **metadata.labels}
    keys = (*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION)
    return next((said[key] for key in keys if said.get(key)), "")


def condition(conditions: Iterable[core.Condition], condition_type: str) -> core.Condition | None:
    """Return the condition of that type, None where the object has none yet."""
    return next((one for one in conditions if one.type == condition_type), None)
