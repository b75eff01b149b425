"""What the translations of all kinds share: amounts, labels, conditions."""

from collections.abc import Iterable, Mapping

from gpu_autoscaler.kube import wire
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


def amounts(quantities: Mapping[str, str], *, of: str) -> Resources:
    """Return quantities in our units; resources that we do not know are left out.

    Raises PermanentError naming `of` and the resource where a quantity is none.
    """
    try:
        return Resources(
            cpu_milli=parse_quantity_milli(quantities.get("cpu", "0")),
            memory_bytes=parse_quantity(quantities.get("memory", "0")),
            gpu_count=parse_quantity(quantities.get(GPU_RESOURCE, "0")),
            ephemeral_storage_bytes=parse_quantity(quantities.get("ephemeral-storage", "0")),
            pod_count=parse_quantity(quantities.get("pods", "0")),
            slices=tuple(
                (name, count)
                for name in sorted(filter(is_slice, quantities))
                if (count := parse_quantity(quantities[name]))
            ),
        )
    except ValueError as exc:
        raise PermanentError(f"{of}: {exc}") from exc


def group_name(metadata: wire.Metadata) -> str:
    """Return the name of the group that the pod says to be of, whoever's label or annotation says it; empty: none."""
    said = {**metadata.annotations, **metadata.labels}
    keys = (*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION)
    return next((said[key] for key in keys if said.get(key)), "")


def condition(conditions: Iterable[wire.Condition], condition_type: str) -> wire.Condition | None:
    """Return the condition of that type, None where the object has none yet."""
    return next((one for one in conditions if one.type == condition_type), None)
