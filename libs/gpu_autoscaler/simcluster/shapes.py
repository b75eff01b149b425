"""JSON types of fields that are read: a wrong type is rejected with 400, as by Go's decoder.

Fields that no code here reads are not checked. So no controller finds a list where it expects text. Field names and
types: Kubernetes API reference 1.36 (read 2026-11-21).
"""

from datetime import datetime
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

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


class _Shape(Struct, rename="camel"):
    """Python field names here, Kubernetes field names in JSON."""


class _Owner(_Shape):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class _Metadata(_Shape):
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    labels: Texts | None = None
    annotations: Texts | None = None
    finalizers: list[str] | None = None
    owner_references: list[_Owner] | None = None


class _Condition(_Shape):
    type: str
    status: str
    last_transition_time: datetime | None = None


class _Requirement(_Shape):
    key: str
    operator: str
    values: list[str] | None = None


class _Selector(_Shape):
    match_labels: Texts | None = None
    match_expressions: list[_Requirement] | None = None


class _Resources(_Shape):
    limits: dict[str, Quantity] | None = None
    requests: dict[str, Quantity] | None = None


class _Container(_Shape):
    name: str | None = None
    image: str | None = None
    resources: _Resources | None = None
    env: list[Json] | None = None


class _Toleration(_Shape):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None
    toleration_seconds: Count | None = None


class _Term(_Shape):
    match_expressions: list[_Requirement] | None = None
    match_fields: list[_Requirement] | None = None


class _Required(_Shape):
    node_selector_terms: list[_Term]


class _Preferred(_Shape):
    weight: Count
    preference: _Term


class _NodeAffinity(_Shape):
    required_during_scheduling_ignored_during_execution: _Required | None = None
    preferred_during_scheduling_ignored_during_execution: list[_Preferred] | None = None


class _Affinity(_Shape):
    node_affinity: _NodeAffinity | None = None


class _Gate(_Shape):
    name: str


class _PodSpec(_Shape):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    node_selector: Texts | None = None
    node_name: str | None = None
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    priority: Count | None = None
    restart_policy: str | None = None
    tolerations: list[_Toleration] | None = None
    affinity: _Affinity | None = None
    scheduling_gates: list[_Gate] | None = None
    termination_grace_period_seconds: Count | None = None


class _ContainerStatus(_Shape):
    name: str
    state: dict[str, Json] = {}


class _PodStatus(_Shape):
    phase: str | None = None
    start_time: datetime | None = None
    conditions: list[_Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = None


class _Pod(_Shape):
    metadata: _Metadata
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


class _ExitCodes(_Shape):
    operator: str
    values: list[Count]
    container_name: str | None = None


class _PodCondition(_Shape):
    type: str
    status: str | None = None


class _Rule(_Shape):
    action: str
    on_exit_codes: _ExitCodes | None = None
    on_pod_conditions: list[_PodCondition] | None = None


class _FailurePolicy(_Shape):
    rules: list[_Rule]


class _Template(_Shape):
    metadata: _Metadata | None = None
    spec: _PodSpec | None = None


class _JobSpec(_Shape):
    template: _Template | None = None
    suspend: bool | None = None
    parallelism: Count | None = None
    completions: Count | None = None
    backoff_limit: Count | None = None
    active_deadline_seconds: Count | None = None
    ttl_seconds_after_finished: Count | None = None
    completion_mode: str | None = None
    pod_replacement_policy: str | None = None
    pod_failure_policy: _FailurePolicy | None = None


class _JobStatus(_Shape):
    start_time: datetime | None = None
    conditions: list[_Condition] | None = None


class _Job(_Shape):
    metadata: _Metadata
    spec: _JobSpec | None = None
    status: _JobStatus | None = None


class _Taint(_Shape):
    key: str
    effect: str
    value: str | None = None


class _NodeSpec(_Shape):
    unschedulable: bool | None = None
    taints: list[_Taint] | None = None


class _NodeStatus(_Shape):
    allocatable: dict[str, Quantity] | None = None
    capacity: dict[str, Quantity] | None = None
    conditions: list[_Condition] | None = None


class _Node(_Shape):
    metadata: _Metadata
    spec: _NodeSpec | None = None
    status: _NodeStatus | None = None


class _BudgetSpec(_Shape):
    selector: _Selector | None = None
    min_available: Share | None = None
    max_unavailable: Share | None = None


class _BudgetStatus(_Shape):
    disruptions_allowed: Count = 0
    current_healthy: Count = 0
    desired_healthy: Count = 0
    observed_generation: int = 0
    conditions: list[_Condition] | None = None


class _Budget(_Shape):
    metadata: _Metadata
    spec: _BudgetSpec | None = None
    status: _BudgetStatus | None = None


class _Event(_Shape):
    metadata: _Metadata
    last_timestamp: datetime | None = None
    count: Count | None = None


class _PriorityClass(_Shape):
    metadata: _Metadata
    value: Count = 0
    global_default: bool = False


class _Other(_Shape):
    metadata: _Metadata
    spec: Json | None = None
    status: Json | None = None


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

    metadata: _Metadata | None = None
    kind: str | None = None
    delete_options: DeleteBody | None = None


class BindingTarget(_Shape):
    """Target of a binding."""

    name: str | None = None
    kind: str | None = None


class BindingBody(_Shape):
    """A v1 Binding."""

    metadata: _Metadata | None = None
    target: BindingTarget | None = None


_SHAPES: dict[str, type[Struct]] = {
    "pods": _Pod,
    "jobs.batch": _Job,
    "nodes": _Node,
    "poddisruptionbudgets.policy": _Budget,
    "events": _Event,
    "priorityclasses.scheduling.k8s.io": _PriorityClass,
}


def require_types(kind: Kind, item: Json) -> None:
    """Raise ApiRefusal 400 if a field that is read has the wrong JSON type."""
    try:
        msgspec.convert(item, type=_SHAPES.get(kind.table, _Other))
    except msgspec.ValidationError as exc:
        message = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: json: {exc}'
        raise bad_request(message) from exc


def read_as(body: object, wanted: type[Body], what: str) -> Body:
    """Return the body of a request as `wanted`. Raises ApiRefusal 400 naming the field."""
    try:
        return msgspec.convert(body, type=wanted)
    except msgspec.ValidationError as exc:
        raise bad_request(f"the request body is no {what}: json: {exc}") from exc
