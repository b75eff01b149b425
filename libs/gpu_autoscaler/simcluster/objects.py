"""Kubernetes objects as plain JSON: copies, times, conditions, and common fields.

Stored objects are never changed in place: clone before changing. Independent of the store.
"""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from gpu_autoscaler.model.resources import parse_quantity_milli

Json = dict[str, Any]
JsonValue = Any  # any JSON value

ANNOTATION_PREFIX = "simcluster.gpu-autoscaler.io/"
DISRUPTION_TARGET = "DisruptionTarget"

# Quantities repeat (all pods of a job request the same), so each text is parsed once.
quantity_milli = lru_cache(maxsize=4096)(parse_quantity_milli)


def clone(value: JsonValue) -> JsonValue:
    """Return an equal value that shares no dict or list with `value`; several times faster than deepcopy."""
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clone(item) for item in value]
    return value


def without_nulls(value: JsonValue) -> JsonValue:
    """Return a copy in which no object has a null field: null means left out, as Go's decoder reads it."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def stamp(moment: datetime) -> str:
    """Return the API's `metav1.Time`: UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def stamp_micro(moment: datetime) -> str:
    """Return the API's `metav1.MicroTime`: UTC, six decimals, as leases and events carry."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def moment_of(text: str) -> datetime:
    """Return the aware datetime of a `Time` or `MicroTime`. Raises ValueError."""
    return datetime.fromisoformat(text)


def key_of(item: Json) -> str:
    """Return `namespace/name`, or the name alone of a cluster-wide object: the key it is stored under."""
    metadata = item["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])


def labels_of(item: Json) -> dict[str, str]:
    """Return the labels, {} where there are none."""
    return item["metadata"].get("labels") or {}


def annotation(item: Json, name: str) -> str | None:
    """Return one of simcluster's own annotations by its short name, as `run-seconds`."""
    value = (item["metadata"].get("annotations") or {}).get(ANNOTATION_PREFIX + name)
    return None if value is None else str(value)


def seconds_in_annotation(item: Json, name: str) -> float | None:
    """Return the annotation as non-negative seconds; None where it is missing or no such number."""
    text = annotation(item, name)
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        return None
    return seconds if seconds is not None and seconds >= 0 else None


def controller_uid(item: Json) -> str | None:
    """Return the uid of the owner that controls the object, None where nobody does."""
    for owner in item["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return None


def phase_of(pod: Json) -> str:
    """Return the pod's phase, `Pending` where none was written yet."""
    return str(pod.get("status", {}).get("phase") or "Pending")


def is_finished(pod: Json) -> bool:
    """Return whether the pod's containers have ended for good."""
    return phase_of(pod) in ("Succeeded", "Failed")


def is_terminating(item: Json) -> bool:
    """Return whether the object's deletion has begun."""
    return "deletionTimestamp" in item["metadata"]


def condition(item: Json, condition_type: str) -> Json | None:
    """Return the condition of that type, None where it is missing."""
    for entry in item.get("status", {}).get("conditions") or ():
        if entry["type"] == condition_type:
            return dict(entry)
    return None


def is_true(item: Json, condition_type: str) -> bool:
    """Return whether the condition is there and `True`."""
    entry = condition(item, condition_type)
    return entry is not None and entry["status"] == "True"


def set_condition(item: Json, now: datetime, condition_type: str, *, status: str, **fields: object) -> None:
    """Write one condition in place; its transition time moves only when its status does."""
    conditions = item.setdefault("status", {}).get("conditions") or []
    item["status"]["conditions"] = conditions
    at = stamp(now)
    for index, entry in enumerate(conditions):
        if entry["type"] == condition_type:
            if entry["status"] == status:
                at = entry.get("lastTransitionTime", at)
            conditions[index] = {**fields, "type": condition_type, "status": status, "lastTransitionTime": at}
            return
    conditions.append({**fields, "type": condition_type, "status": status, "lastTransitionTime": at})


def set_pod_condition(pod: Json, now: datetime, condition_type: str, *, status: str, **fields: object) -> None:
    """Write one pod condition in place, with the empty probe time that every pod condition carries."""
    set_condition(pod, now, condition_type, status=status, lastProbeTime=None, **fields)


def mark_disrupted(pod: Json, now: datetime, reason: str, message: str) -> None:
    """Write in place that the pod ends through no fault of its own."""
    set_pod_condition(pod, now, DISRUPTION_TARGET, status="True", reason=reason, message=message)


def requests_milli(pod: Json) -> dict[str, int]:
    """Return what the pod asks for in thousandths of each resource, one pod of `pods` included.

    The largest init container counts where it asks for more than all containers together
    (Kubernetes documentation, "Init Containers: Resource sharing within containers", read 2026-11-21).
    """
    spec = pod["spec"]
    total: dict[str, int] = {"pods": 1000}
    for container in spec.get("containers") or ():
        for name, text in ((container.get("resources") or {}).get("requests") or {}).items():
            total[name] = total.get(name, 0) + quantity_milli(str(text))
    for container in spec.get("initContainers") or ():
        for name, text in ((container.get("resources") or {}).get("requests") or {}).items():
            total[name] = max(total.get(name, 0), quantity_milli(str(text)))
    return total
