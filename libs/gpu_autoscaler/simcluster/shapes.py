"""JSON types of fields that are read: a wrong type is rejected with 400, as by Go's decoder.

Fields that no code here reads are not checked. So no controller finds a list where it expects text. Field names and
types: Kubernetes API reference 1.36 (read 2026-11-21).
"""

from collections.abc import Mapping
from datetime import datetime
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, defstruct

from gpu_autoscaler.simcluster.answers import bad_request
from gpu_autoscaler.simcluster.kinds import Kind
from gpu_autoscaler.simcluster.objects import Json

# What `parse_quantity_milli` reads. Numbers without quotes are taken, too, within what they write out plainly.
Quantity = (
    Annotated[str, Meta(pattern=r"^[+-]?(\d{1,30}\.?\d{0,12}|\.\d{1,12})(m|[KMGTPE]i|[kMGTPE]|e[+-]?\d)?$")]
    | Annotated[int, Meta(ge=-(10**18), le=10**18)]
    | Annotated[float, Meta(ge=0.001, le=1e15)]
)
Count = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Share = Count | Annotated[str, Meta(pattern=r"^\d{1,3}%$")]
Texts = dict[str, str]
Body = TypeVar("Body", bound=Struct)


_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


def _object(
    name: str,
    required: Mapping[str, Any] = _NO_FIELDS,
    never_null: Mapping[str, Any] = _NO_FIELDS,
    /,
    **optional: Any,  # noqa: ANN401 - a type that exists at run time only
) -> Any:  # noqa: ANN401 - as above
    """Return the type of a JSON object: fields that must be there, that may be missing, and that may be null, too."""
    fields: list[Any] = [*required.items(), *((key, kind, None) for key, kind in never_null.items())]
    return defstruct(name, [*fields, *((key, kind | None, None) for key, kind in optional.items())])


def _list(kind: Any) -> Any:  # noqa: ANN401 - as `_object`
    return GenericAlias(list, (kind,))


_OWNER = _object("Owner", {"apiVersion": str, "kind": str, "name": str, "uid": str}, controller=bool)
_METADATA = _object(
    "Metadata",
    name=str,
    generateName=str,
    namespace=str,
    uid=str,
    resourceVersion=str,
    labels=Texts,
    annotations=Texts,
    finalizers=list[str],
    ownerReferences=_list(_OWNER),
)
_CONDITIONS = _list(_object("Condition", {"type": str, "status": str}, lastTransitionTime=datetime))
_REQUIREMENTS = _list(_object("Requirement", {"key": str, "operator": str}, values=list[str]))
_RESOURCES = _object("Resources", limits=dict[str, Quantity], requests=dict[str, Quantity])
_CONTAINERS = _list(_object("Container", name=str, image=str, resources=_RESOURCES, env=list[Json]))
_TOLERATION = _object("Toleration", key=str, operator=str, value=str, effect=str, tolerationSeconds=Count)
_TERM = _object("Term", matchExpressions=_REQUIREMENTS, matchFields=_REQUIREMENTS)
_NODE_AFFINITY = _object(
    "NodeAffinity",
    requiredDuringSchedulingIgnoredDuringExecution=_object("Required", {"nodeSelectorTerms": _list(_TERM)}),
    preferredDuringSchedulingIgnoredDuringExecution=_list(_object("Preferred", {"weight": Count, "preference": _TERM})),
)
_POD_SPEC = _object(
    "PodSpec",
    containers=_CONTAINERS,
    initContainers=_CONTAINERS,
    nodeSelector=Texts,
    nodeName=str,
    schedulerName=str,
    priorityClassName=str,
    priority=Count,
    restartPolicy=str,
    tolerations=_list(_TOLERATION),
    affinity=_object("Affinity", nodeAffinity=_NODE_AFFINITY),
    schedulingGates=_list(_object("Gate", {"name": str})),
    terminationGracePeriodSeconds=Count,
)
_POD_STATUS = _object(
    "PodStatus",
    phase=str,
    startTime=datetime,
    conditions=_CONDITIONS,
    containerStatuses=_list(_object("ContainerStatus", {"name": str}, {"state": dict[str, Json]})),
)
_RULE = _object(
    "Rule",
    {"action": str},
    onExitCodes=_object("ExitCodes", {"operator": str, "values": list[Count]}, containerName=str),
    onPodConditions=_list(_object("PodCondition", {"type": str}, status=str)),
)
_JOB_SPEC = _object(
    "JobSpec",
    template=_object("Template", metadata=_METADATA, spec=_POD_SPEC),
    suspend=bool,
    parallelism=Count,
    completions=Count,
    backoffLimit=Count,
    activeDeadlineSeconds=Count,
    ttlSecondsAfterFinished=Count,
    completionMode=str,
    podReplacementPolicy=str,
    podFailurePolicy=_object("FailurePolicy", {"rules": _list(_RULE)}),
)
_TAINT = _object("Taint", {"key": str, "effect": str}, value=str)
_AMOUNTS = dict[str, Quantity]
_SELECTOR = _object("Selector", matchLabels=Texts, matchExpressions=_REQUIREMENTS)
_BUDGET_COUNTS = {
    "disruptionsAllowed": Count,
    "currentHealthy": Count,
    "desiredHealthy": Count,
    "observedGeneration": int,
}


def _resource(spec: Any, status: Any) -> Any:  # noqa: ANN401 - as `_object`
    return _object("Resource", {"metadata": _METADATA}, spec=spec, status=status)


class _Shape(Struct, rename="camel"):
    """Python field names here, Kubernetes field names in JSON."""


class _Named(_Shape):
    name: str | None = None


class Preconditions(_Shape):
    """Preconditions of a deletion."""

    uid: str | None = None
    resource_version: str | None = None


class DeleteBody(_Shape):
    """The supported parts of a `metav1.DeleteOptions`."""

    grace_period_seconds: Count | None = None
    preconditions: Preconditions | None = None
    propagation_policy: str | None = None


class EvictionBody(_Shape):
    """A policy/v1 Eviction."""

    metadata: _Named | None = None
    kind: str | None = None
    delete_options: DeleteBody | None = None


class BindingTarget(_Shape):
    """Target of a binding."""

    name: str | None = None
    kind: str | None = None


class BindingBody(_Shape):
    """A v1 Binding."""

    metadata: _Named | None = None
    target: BindingTarget | None = None


_OTHER = _resource(Json, Json)
_SHAPES = {
    "pods": _resource(_POD_SPEC, _POD_STATUS),
    "jobs.batch": _resource(_JOB_SPEC, _object("JobStatus", startTime=datetime, conditions=_CONDITIONS)),
    "nodes": _resource(
        _object("NodeSpec", unschedulable=bool, taints=_list(_TAINT)),
        _object("NodeStatus", allocatable=_AMOUNTS, capacity=_AMOUNTS, conditions=_CONDITIONS),
    ),
    "poddisruptionbudgets.policy": _resource(
        _object("BudgetSpec", selector=_SELECTOR, minAvailable=Share, maxUnavailable=Share),
        _object("BudgetStatus", _NO_FIELDS, _BUDGET_COUNTS, conditions=_CONDITIONS),
    ),
    "events": _object("Event", {"metadata": _METADATA}, lastTimestamp=datetime, count=Count),
    "priorityclasses.scheduling.k8s.io": _object(
        "PriorityClass", {"metadata": _METADATA}, {"value": Count, "globalDefault": bool}
    ),
}


def require_types(kind: Kind, item: Json) -> None:
    """Raise ApiRefusal 400 if a field that is read has the wrong JSON type."""
    try:
        msgspec.convert(item, type=_SHAPES.get(kind.table, _OTHER))
    except msgspec.ValidationError as exc:
        message = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: json: {exc}'
        raise bad_request(message) from exc


def read_as(body: object, wanted: type[Body], what: str) -> Body:
    """Return the body of a request as `wanted`. Raises ApiRefusal 400 naming the field."""
    try:
        return msgspec.convert(body, type=wanted)
    except msgspec.ValidationError as exc:
        raise bad_request(f"the request body is no {what}: json: {exc}") from exc
