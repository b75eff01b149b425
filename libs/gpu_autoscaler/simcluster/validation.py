"""Which objects the server takes: JSON types (400), rules of a new object (422), what may not change (422, 403).

Rules are here when a client of ours could break them. Messages as kube-apiserver 1.36 writes them, from recorded
answers and `pkg/apis/*/validation` (read 2026-11-21).
"""

import re
from collections.abc import Callable

from gpu_autoscaler.simcluster.answers import Cause, bad_request, invalid
from gpu_autoscaler.simcluster.kinds import BUDGETS, JOBS, PODS, Kind
from gpu_autoscaler.simcluster.objects import Json, clone, condition, is_true, quantity_milli

_NAME_LENGTH_MAX = 253
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_QUANTITY_RULE = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"

# path, JSON type, and how Go names the field and its type. "*" walks a list.
_Typed = tuple[str, type, str, str]
_METADATA: tuple[_Typed, ...] = (
    ("metadata", dict, "metadata", "v1.ObjectMeta"),
    ("metadata.name", str, "ObjectMeta.metadata.name", "string"),
    ("metadata.labels", dict, "ObjectMeta.metadata.labels", "map[string]string"),
    ("metadata.annotations", dict, "ObjectMeta.metadata.annotations", "map[string]string"),
    ("metadata.finalizers", list, "ObjectMeta.metadata.finalizers", "[]string"),
    ("metadata.ownerReferences", list, "ObjectMeta.metadata.ownerReferences", "[]v1.OwnerReference"),
)


def _pod_spec_types(path: str) -> tuple[_Typed, ...]:
    return (
        (path, dict, path, "v1.PodSpec"),
        (f"{path}.containers", list, f"PodSpec.{path}.containers", "[]v1.Container"),
        (f"{path}.containers.*", dict, f"PodSpec.{path}.containers", "v1.Container"),
        (f"{path}.containers.*.resources", dict, "Container.resources", "v1.ResourceRequirements"),
        (f"{path}.nodeSelector", dict, f"PodSpec.{path}.nodeSelector", "map[string]string"),
        (f"{path}.tolerations", list, f"PodSpec.{path}.tolerations", "[]v1.Toleration"),
        (f"{path}.affinity", dict, f"PodSpec.{path}.affinity", "v1.Affinity"),
        (f"{path}.nodeName", str, f"PodSpec.{path}.nodeName", "string"),
        (f"{path}.priority", int, f"PodSpec.{path}.priority", "int32"),
        (f"{path}.terminationGracePeriodSeconds", int, f"PodSpec.{path}.terminationGracePeriodSeconds", "int64"),
    )


_TYPES: dict[str, tuple[_Typed, ...]] = {
    "Pod": _pod_spec_types("spec"),
    "Job": (
        ("spec", dict, "Job.spec", "v1.JobSpec"),
        ("spec.suspend", bool, "JobSpec.spec.suspend", "bool"),
        ("spec.parallelism", int, "JobSpec.spec.parallelism", "int32"),
        ("spec.completions", int, "JobSpec.spec.completions", "int32"),
        ("spec.backoffLimit", int, "JobSpec.spec.backoffLimit", "int32"),
        ("spec.ttlSecondsAfterFinished", int, "JobSpec.spec.ttlSecondsAfterFinished", "int32"),
        ("spec.template", dict, "JobSpec.spec.template", "v1.PodTemplateSpec"),
        *_pod_spec_types("spec.template.spec"),
    ),
    "Node": (
        ("spec", dict, "Node.spec", "v1.NodeSpec"),
        ("spec.unschedulable", bool, "NodeSpec.spec.unschedulable", "bool"),
        ("spec.taints", list, "NodeSpec.spec.taints", "[]v1.Taint"),
        ("status", dict, "Node.status", "v1.NodeStatus"),
    ),
}
_GO_WORD = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object"}


def require_types(kind: Kind, item: Json) -> None:
    """Raise ApiRefusal 400 where a field has the wrong JSON type, as Go's decoder would."""
    for path, wanted, field, go_type in (*_METADATA, *_TYPES.get(kind.kind, ())):
        for value in _values_at(item, path.split(".")):
            if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
                raise bad_request(
                    f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: json: '
                    f"cannot unmarshal {_GO_WORD[type(value)]} into Go struct field {field} of type {go_type}"
                )


def _values_at(item: object, steps: list[str]) -> list[object]:
    """Return what stands at the path: nothing where it is missing or null on the way."""
    found = [item]
    for step in steps:
        if step == "*":
            found = [entry for value in found if isinstance(value, list) for entry in value]
        else:
            found = [value[step] for value in found if isinstance(value, dict) and value.get(step) is not None]
    return found


def require_valid_new(kind: Kind, item: Json) -> None:
    """Raise ApiRefusal 422 naming every rule that a new, defaulted object breaks."""
    name = item["metadata"]["name"]
    causes: list[Cause] = []
    if len(name) > _NAME_LENGTH_MAX or not _SUBDOMAIN.fullmatch(name):
        causes.append(("metadata.name", "FieldValueInvalid", f'Invalid value: "{name}": {_SUBDOMAIN_RULE}'))
    rules = _NEW_RULES.get(kind.table)
    if rules:
        causes += rules(item)
    if causes:
        raise invalid(kind, name, causes)


def _new_pod(pod: Json) -> list[Cause]:
    return _pod_spec(pod["spec"], "spec")


def _pod_spec(spec: Json, path: str) -> list[Cause]:
    containers = spec.get("containers") or []
    if not containers:
        return [(f"{path}.containers", "FieldValueRequired", "Required value")]
    causes: list[Cause] = []
    for index, container in enumerate(containers):
        at = f"{path}.containers[{index}]"
        causes += [
            (f"{at}.{field}", "FieldValueRequired", "Required value")
            for field in ("name", "image")
            if not container.get(field)
        ]
        causes += _resources(container.get("resources") or {}, f"{at}.resources")
    return causes


def _resources(resources: Json, path: str) -> list[Cause]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    causes: list[Cause] = []
    for side, amounts in (("limits", limits), ("requests", requests)):
        for name, text in amounts.items():
            milli, field = _milli(text), f"{path}.{side}[{name}]"
            if milli < 0:
                rule = "must be greater than or equal to 0"
                causes.append((field, "FieldValueInvalid", f'Invalid value: "{text}": {rule}'))
            elif is_extended(name) and milli % 1000:
                causes.append((field, "FieldValueInvalid", f'Invalid value: "{text}": must be an integer'))
    for name, text in requests.items():
        if name not in limits:
            if is_extended(name):
                message = "Required value: Limit must be set for non overcommitable resources"
                causes.append((f"{path}.limits", "FieldValueRequired", message))
        elif is_extended(name) and _milli(text) != _milli(limits[name]):
            message = f'Invalid value: "{text}": must be equal to {name} limit of {limits[name]}'
            causes.append((f"{path}.requests", "FieldValueInvalid", message))
        elif _milli(text) > _milli(limits[name]):
            message = f'Invalid value: "{text}": must be less than or equal to {name} limit of {limits[name]}'
            causes.append((f"{path}.requests", "FieldValueInvalid", message))
    return causes


def is_extended(resource: str) -> bool:
    """Return whether a resource is counted in whole devices, as `nvidia.com/gpu`, and never overcommitted."""
    return "/" in resource and not resource.partition("/")[0].endswith("kubernetes.io")


def _milli(text: object) -> int:
    try:
        return quantity_milli(str(text))
    except ValueError as exc:
        raise bad_request(f"unable to parse quantity's suffix or number: {_QUANTITY_RULE}") from exc


def _new_job(job: Json) -> list[Cause]:
    spec = job["spec"]
    policy = spec["template"]["spec"].get("restartPolicy")
    at = "spec.template.spec.restartPolicy"
    causes = _pod_spec(spec["template"]["spec"], "spec.template.spec")
    if policy not in ("Never", "OnFailure"):
        rule = f'Unsupported value: "{policy}": supported values: "OnFailure", "Never"'
        causes.append((at, "FieldValueNotSupported", rule))
    elif spec.get("podFailurePolicy") and policy != "Never":
        rule = f'Invalid value: "{policy}": only "Never" is supported when podFailurePolicy is specified'
        causes.append((at, "FieldValueInvalid", rule))
    for field in ("parallelism", "completions", "backoffLimit", "ttlSecondsAfterFinished"):
        if (spec.get(field) or 0) < 0:
            rule = f"Invalid value: {spec[field]}: must be greater than or equal to 0"
            causes.append((f"spec.{field}", "FieldValueInvalid", rule))
    if spec["completionMode"] == "Indexed" and spec.get("completions") is None:
        rule = "Required value: when completion mode is Indexed"
        causes.append(("spec.completions", "FieldValueRequired", rule))
    return causes


def _new_budget(budget: Json) -> list[Cause]:
    spec = budget.get("spec") or {}
    if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
        rule = f"Invalid value: {spec}: minAvailable and maxUnavailable cannot be both set"
        return [("spec", "FieldValueInvalid", rule)]
    return []


_NEW_RULES: dict[str, Callable[[Json], list[Cause]]] = {
    PODS.table: _new_pod,
    JOBS.table: _new_job,
    BUDGETS.table: _new_budget,
}

# What a pod template may change before its job ever ran ("Jobs: Mutable Scheduling Directives", read 2026-11-21).
_SCHEDULING_FIELDS = ("nodeSelector", "tolerations", "schedulingGates")
_POD_MUTABLE = ("tolerations", "activeDeadlineSeconds", "terminationGracePeriodSeconds", "schedulingGates")
_POD_RULE = (
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
    "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def require_valid_update(kind: Kind, old: Json, new: Json) -> None:
    """Raise ApiRefusal 422 where an update changes what may not change."""
    causes: list[Cause] = []
    if kind is PODS:
        gated = bool(old["spec"].get("schedulingGates"))
        if _fixed_pod_spec(old["spec"], gated=gated) != _fixed_pod_spec(new["spec"], gated=gated):
            causes.append(("spec", "FieldValueForbidden", _POD_RULE))
    elif kind is JOBS:
        causes = _job_update(old, new)
    if causes:
        raise invalid(kind, new["metadata"]["name"], causes)


def _fixed_pod_spec(spec: Json, *, gated: bool) -> Json:
    free = (*_POD_MUTABLE, "nodeSelector", "affinity") if gated else _POD_MUTABLE
    fixed = {key: value for key, value in spec.items() if key not in free}
    fixed["containers"] = [{**container, "image": ""} for container in spec.get("containers") or ()]
    return fixed


def _job_update(old: Json, new: Json) -> list[Cause]:
    never_started = is_true(old, "Suspended") or condition(old, "Suspended") is None
    may_move = bool(old["spec"].get("suspend")) and never_started and "startTime" not in old["status"]
    templates = old["spec"]["template"], new["spec"]["template"]
    fixed = tuple(map(_without_scheduling, templates)) if may_move else templates
    causes: list[Cause] = []
    if fixed[0] != fixed[1]:
        causes.append(("spec.template", "FieldValueInvalid", f"Invalid value: {templates[1]}: field is immutable"))
    for field in ("selector", "completionMode", "completions"):
        if old["spec"].get(field) != new["spec"].get(field):
            value = new["spec"].get(field)
            causes.append((f"spec.{field}", "FieldValueInvalid", f"Invalid value: {value}: field is immutable"))
    return causes


def _without_scheduling(template: Json) -> Json:
    fixed: Json = clone(template)
    for field in ("labels", "annotations"):
        fixed.get("metadata", {}).pop(field, None)
    for field in _SCHEDULING_FIELDS:
        fixed["spec"].pop(field, None)
    (fixed["spec"].get("affinity") or {}).pop("nodeAffinity", None)
    if not fixed["spec"].get("affinity"):
        fixed["spec"].pop("affinity", None)
    return fixed
