"""What the OpenAPI document says about requests beyond the types of their fields.

Types of facts leave limits out, since a fact that breaks one is answered and not undecodable. A schema states what it
can of the rules of admission: all that it refuses is refused, and more is. Fields that are unknown are refused too.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpu_autoscaler.core.intake.admission import (
    DNS_LABEL,
    IMAGE_LENGTH_MAX,
    JOB_ID_LENGTH_MAX,
    JOB_MEMBERS_COUNT_MAX,
    JOB_NAME_LENGTH_MAX,
    LABEL_KEY,
    LABEL_VALUE,
    PRIORITY_MAX,
    SUBMITTER_LENGTH_MAX,
)
from gpu_autoscaler.core.intake.directives import COUNT_MAX
from gpu_autoscaler.core.intake.reported_demand import MEMBERS_COUNT_MAX

Schema = Mapping[str, Any]


def _pattern(rule: re.Pattern[str]) -> Schema:
    return {"pattern": f"^{rule.pattern}$"}


_ABOVE_ZERO, _FROM_ZERO = {"exclusiveMinimum": 0}, {"minimum": 0}
_MEMBERS = {"minimum": 1, "maximum": JOB_MEMBERS_COUNT_MAX}
_PRIORITY = {"minimum": 0, "maximum": PRIORITY_MAX}  # of a number
_COUNT = {"minimum": 0, "maximum": COUNT_MAX}
_BOUNDS = ("nodes_count_min", "nodes_count_max", "gpu_count_min", "gpu_count_max")
# By type and field.
_LIMITS: Mapping[str, Mapping[str, Schema]] = {
    "JobRequested": {
        "job_name": {"minLength": 1, "maxLength": JOB_NAME_LENGTH_MAX},
        "project_id": _pattern(LABEL_VALUE),
        "job_id": {**_pattern(DNS_LABEL), "maxLength": JOB_ID_LENGTH_MAX},
        "workload_type": _pattern(LABEL_VALUE),
        "within": _pattern(LABEL_KEY),
        "submitted_by": {"maxLength": SUBMITTER_LENGTH_MAX},
        "priority": _PRIORITY,
        "members": _MEMBERS,
        "min_members": _MEMBERS,
        "budget_limit_usd": _ABOVE_ZERO,
        "max_duration_hours": _ABOVE_ZERO,
        "run_seconds": _FROM_ZERO,
        "dangerous_fields_allowed": {"const": False},
        "pod_template_digest": {"type": "null"},
    },
    "GpuRequirements": {"gpu_count": _FROM_ZERO, "gpu_memory_gb": _ABOVE_ZERO, "gpu_fraction": _ABOVE_ZERO},
    "ContainerRequest": {"image": {"maxLength": IMAGE_LENGTH_MAX}},
    "DemandReported": {"source": _pattern(LABEL_VALUE), "count": {"minimum": 0, "maximum": MEMBERS_COUNT_MAX}},
    "DemandShape": {"gpu_count": _FROM_ZERO, "gpu_memory_gb": _ABOVE_ZERO},
    "DirectiveRequest": {"reason": {"minLength": 1}},
    "Override": dict.fromkeys(_BOUNDS, _COUNT),
}


def limited(schemas: Mapping[str, Schema], bodies: Iterable[str]) -> dict[str, Schema]:
    """Return the schemas with the limits of requests; `bodies` names those of whole requests."""
    requests: set[str] = set()
    waiting = list(bodies)
    while waiting:
        name = waiting.pop()
        if name not in requests:
            requests.add(name)
            waiting += re.findall(r"#/components/schemas/(\w+)", repr(schemas[name]))
    return {name: _limited(name, schema) if name in requests else schema for name, schema in schemas.items()}


def _limited(name: str, schema: Schema) -> Schema:
    if schema.get("type") != "object":
        return schema
    limits = _LIMITS.get(name, {})
    missing = limits.keys() - schema["properties"].keys()
    assert not missing, f"{name} has no fields {missing}"  # noqa: S101 - a bug of ours
    properties = {field: _with(shown, limits.get(field, {})) for field, shown in schema["properties"].items()}
    return {**schema, "properties": properties, "additionalProperties": False}


def _with(shown: Schema, limits: Schema) -> Schema:
    """Add the limits to the type of a field, or to the one of an optional field that is not null."""
    if not limits or "anyOf" not in shown or limits.get("type") == "null":
        return {**{key: value for key, value in shown.items() if not limits.get("type") or key != "anyOf"}, **limits}
    parts = [part if part.get("type") == "null" else {**part, **limits} for part in shown["anyOf"]]
    return {**shown, "anyOf": parts}
