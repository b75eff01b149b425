"""Validation of objects: rules of new objects, and immutable fields (422). Types are in `shapes`.

Only rules that a client of ours could break. Messages as kube-apiserver 1.36 writes them, from recorded answers and
`pkg/apis/*/validation` (read 2026-11-21).
"""

import re
from collections.abc import Callable

from gpu_autoscaler.simcluster.answers import Cause, invalid
from gpu_autoscaler.simcluster.kinds import BUDGETS, JOBS, NODES, PODS, Kind
from gpu_autoscaler.simcluster.objects import Json, clone, condition, is_true, quantity_milli

_NAME_LENGTH_MAX = 253
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)


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
        causes += _amounts(amounts, f"{path}.{side}")
    for name, text in requests.items():
        if name not in limits:
            if is_extended(name):
                message = "Required value: Limit must be set for non overcommitable resources"
                causes.append((f"{path}.limits", "FieldValueRequired", message))
        elif is_extended(name) and quantity_milli(str(text)) != quantity_milli(str(limits[name])):
            message = f'Invalid value: "{text}": must be equal to {name} limit of {limits[name]}'
            causes.append((f"{path}.requests", "FieldValueInvalid", message))
        elif quantity_milli(str(text)) > quantity_milli(str(limits[name])):
            message = f'Invalid value: "{text}": must be less than or equal to {name} limit of {limits[name]}'
            causes.append((f"{path}.requests", "FieldValueInvalid", message))
    return causes


def _amounts(amounts: Json, path: str) -> list[Cause]:
    """Yield violations: no amount is negative, and devices are whole."""
    causes: list[Cause] = []
    for name, text in amounts.items():
        milli, field = quantity_milli(str(text)), f"{path}[{name}]"
        if milli < 0:
            rule = "must be greater than or equal to 0"
            causes.append((field, "FieldValueInvalid", f'Invalid value: "{text}": {rule}'))
        elif is_extended(name) and milli % 1000:
            causes.append((field, "FieldValueInvalid", f'Invalid value: "{text}": must be an integer'))
    return causes


def is_extended(resource: str) -> bool:
    """Return whether a resource is counted in whole devices, as `nvidia.com/gpu`, and never overcommitted."""
    return "/" in resource and not resource.partition("/")[0].endswith("kubernetes.io")


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
    PODS.table: lambda pod: _pod_spec(pod["spec"], "spec"),
    JOBS.table: _new_job,
    BUDGETS.table: _new_budget,
}

# Mutable fields of a pod template before its job ran ("Jobs: Mutable Scheduling Directives", read 2026-11-21).
_SCHEDULING_FIELDS = ("nodeSelector", "tolerations", "schedulingGates")
_POD_MUTABLE = ("tolerations", "activeDeadlineSeconds", "terminationGracePeriodSeconds", "schedulingGates")
_POD_RULE = (
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
    "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def require_valid_update(kind: Kind, old: Json, new: Json) -> None:
    """Raise ApiRefusal 422 if an update changes an immutable field."""
    causes: list[Cause] = []
    added = set(new["metadata"].get("finalizers") or ()) - set(old["metadata"].get("finalizers") or ())
    if added and "deletionTimestamp" in old["metadata"]:
        rule = f"Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers {added}"
        raise invalid(kind, new["metadata"]["name"], [("metadata.finalizers", "FieldValueForbidden", rule)])
    if kind is PODS:
        gated = bool(old["spec"].get("schedulingGates"))
        if _fixed_pod_spec(old["spec"], gated=gated) != _fixed_pod_spec(new["spec"], gated=gated):
            causes.append(("spec", "FieldValueForbidden", _POD_RULE))
    elif kind is JOBS:
        causes = _job_update(old, new)
    if causes:
        raise invalid(kind, new["metadata"]["name"], causes)


def require_valid_status(kind: Kind, new: Json) -> None:
    """Raise ApiRefusal 422 if a node reports invalid amounts."""
    if kind is not NODES:
        return
    status = new.get("status") or {}
    causes = [
        amount for side in ("capacity", "allocatable") for amount in _amounts(status.get(side) or {}, f"status.{side}")
    ]
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
