"""The fields of Kubernetes objects that we read. Decoding skips all others.

Source: Kubernetes API reference v1.36, the kinds of these names (read 2026-11-21), verified with recorded answers."""

from datetime import datetime
from typing import Literal

import msgspec

ConditionStatus = Literal["True", "False", "Unknown"]


class Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """Base of all wire structs: camelCase names, unknown fields ignored.

    Decoded objects have no reference cycles. With `gc=False` the garbage collector does not visit them: its passes over
    the objects of 10,000 pods would block the event loop for 150 ms.
    """


class OwnerReference(Wire, frozen=True, kw_only=True):
    """The owner of an object."""

    kind: str
    name: str
    uid: str
    controller: bool = False


class Metadata(Wire, frozen=True, kw_only=True):
    """The metadata of an object."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[OwnerReference, ...] = ()


class Condition(Wire, frozen=True, kw_only=True):
    """One condition of a status."""

    type: str
    status: ConditionStatus
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class Object(Wire, frozen=True, kw_only=True):
    """Any object: the fields common to all kinds."""

    metadata: Metadata

    @property
    def version(self) -> int:
        """The resourceVersion as a number (comparable within a kind: KEP-5504, read 2026-11-21)."""
        return int(self.metadata.resource_version)


# ---- pods


class ResourceList(Wire, frozen=True, kw_only=True):
    """Requests and limits of a container, as quantities."""

    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class Container(Wire, frozen=True, kw_only=True):
    """A container or init container; an init container with restartPolicy Always is a sidecar."""

    name: str = ""
    resources: ResourceList = ResourceList()
    restart_policy: str | None = None


class Requirement(Wire, frozen=True, kw_only=True):
    """A label selector requirement."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class SelectorTerm(Wire, frozen=True, kw_only=True):
    """Node requirements that must all hold."""

    match_expressions: tuple[Requirement, ...] = ()
    match_fields: tuple[Requirement, ...] = ()


class NodeSelector(Wire, frozen=True, kw_only=True):
    """Alternative node selector terms."""

    node_selector_terms: tuple[SelectorTerm, ...] = ()


class PreferredTerm(Wire, frozen=True, kw_only=True):
    """A weighted node preference."""

    weight: int
    preference: SelectorTerm = SelectorTerm()


class NodeAffinity(Wire, frozen=True, kw_only=True):
    """Required and preferred node affinity."""

    required: NodeSelector | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")
    preferred: tuple[PreferredTerm, ...] = msgspec.field(
        default=(), name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class LabelSelector(Wire, frozen=True, kw_only=True):
    """Label requirements that must all hold; an empty selector selects everything."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()


class PodAffinityTerm(Wire, frozen=True, kw_only=True):
    """A term of pod (anti-)affinity. Without a label selector it matches no pod."""

    topology_key: str
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = ()
    mismatch_label_keys: tuple[str, ...] = ()


class WeightedPodAffinityTerm(Wire, frozen=True, kw_only=True):
    """A weighted term of pod (anti-)affinity."""

    weight: int
    pod_affinity_term: PodAffinityTerm


class PodAffinity(Wire, frozen=True, kw_only=True):
    """Required and preferred terms of pod (anti-)affinity."""

    required: tuple[PodAffinityTerm, ...] = msgspec.field(
        default=(), name="requiredDuringSchedulingIgnoredDuringExecution"
    )
    preferred: tuple[WeightedPodAffinityTerm, ...] = msgspec.field(
        default=(), name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(Wire, frozen=True, kw_only=True):
    """Node affinity, pod affinity and pod anti-affinity."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class TopologySpreadConstraint(Wire, frozen=True, kw_only=True):
    """A topology spread constraint."""

    topology_key: str
    max_skew: int = 1
    min_domains: int | None = None
    when_unsatisfiable: str = "DoNotSchedule"
    label_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = ()
    node_taints_policy: str = "Ignore"


class WireToleration(Wire, frozen=True, kw_only=True):
    """A toleration."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: str = ""


class Marker(Wire, frozen=True, kw_only=True):
    """An object whose presence alone matters."""


class EmptyDir(Wire, frozen=True, kw_only=True):
    """A volume that is deleted with its pod."""

    medium: str = ""  # Memory: such as /dev/shm


class ClaimSource(Wire, frozen=True, kw_only=True):
    """A volume's PersistentVolumeClaim."""

    claim_name: str


class ClaimSpec(Wire, frozen=True, kw_only=True):
    """The spec of a PersistentVolumeClaim."""

    storage_class_name: str | None = None  # None: the cluster's default class; empty: none
    volume_name: str = ""


class ClaimTemplate(Wire, frozen=True, kw_only=True):
    """The claim that is created for a pod."""

    spec: ClaimSpec = ClaimSpec()


class EphemeralVolume(Wire, frozen=True, kw_only=True):
    """A volume with a claim of the pod's own, which is named after pod and volume."""

    volume_claim_template: ClaimTemplate = ClaimTemplate()


class Volume(Wire, frozen=True, kw_only=True):
    """A volume: the types that are lost with the node, and those with a claim."""

    name: str = ""
    empty_dir: EmptyDir | None = None
    host_path: Marker | None = None
    persistent_volume_claim: ClaimSource | None = None
    ephemeral: EphemeralVolume | None = None


class PodSpec(Wire, frozen=True, kw_only=True):
    """The spec of a pod."""

    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    overhead: dict[str, str] = {}
    node_name: str | None = None
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    topology_spread_constraints: tuple[TopologySpreadConstraint, ...] = ()
    tolerations: tuple[WireToleration, ...] = ()
    scheduling_gates: tuple[Marker, ...] = ()
    priority: int = 0
    priority_class_name: str = ""
    termination_grace_period_seconds: float = 30.0
    volumes: tuple[Volume, ...] = ()
    resource_claims: tuple[dict[str, str], ...] = ()  # each with its name and that of its claim or template


class Terminated(Wire, frozen=True, kw_only=True):
    """The terminated state of a container."""

    finished_at: datetime | None = None


class ContainerState(Wire, frozen=True, kw_only=True):
    """The state of a container; only its end is read."""

    terminated: Terminated | None = None


class ContainerStatus(Wire, frozen=True, kw_only=True):
    """The status of a container."""

    state: ContainerState = ContainerState()


class PodStatus(Wire, frozen=True, kw_only=True):
    """The status of a pod."""

    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"] = "Pending"
    conditions: tuple[Condition, ...] = ()
    start_time: datetime | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Object, frozen=True, kw_only=True):
    """A pod."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


# ---- nodes


class WireTaint(Wire, frozen=True, kw_only=True):
    """A taint."""

    key: str
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
    value: str = ""
    time_added: datetime | None = None  # of NoExecute: how long pods tolerate it counts from then


class NodeSpec(Wire, frozen=True, kw_only=True):
    """The spec of a node."""

    provider_id: str | None = msgspec.field(default=None, name="providerID")
    unschedulable: bool = False
    taints: tuple[WireTaint, ...] = ()


class NodeAddress(Wire, frozen=True, kw_only=True):
    """An address of a node."""

    type: str
    address: str


class NodeStatus(Wire, frozen=True, kw_only=True):
    """The status of a node."""

    allocatable: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()
    addresses: tuple[NodeAddress, ...] = ()


class Node(Object, frozen=True, kw_only=True):
    """A node."""

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


# ---- disruption budgets


class BudgetSpec(Wire, frozen=True, kw_only=True):
    """The spec of a PodDisruptionBudget. Without a selector it selects no pod; an empty one selects all."""

    selector: LabelSelector | None = None


class BudgetStatus(Wire, frozen=True, kw_only=True):
    """The status of a PodDisruptionBudget."""

    observed_generation: int = 0
    disruptions_allowed: int = 0
    current_healthy: int = 0
    desired_healthy: int = 0


class PodDisruptionBudget(Object, frozen=True, kw_only=True):
    """A PodDisruptionBudget."""

    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()


# ---- resource quotas


class ScopeRequirement(Wire, frozen=True, kw_only=True):
    """One expression of a scope selector."""

    scope_name: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class ScopeSelector(Wire, frozen=True, kw_only=True):
    """Which pods count against the quota: all expressions hold."""

    match_expressions: tuple[ScopeRequirement, ...] | None = None


class QuotaSpec(Wire, frozen=True, kw_only=True):
    """The spec of a ResourceQuota."""

    hard: dict[str, str] = {}
    scopes: tuple[str, ...] = ()
    scope_selector: ScopeSelector | None = None


class QuotaStatus(Wire, frozen=True, kw_only=True):
    """The status of a ResourceQuota."""

    used: dict[str, str] = {}


class ResourceQuota(Object, frozen=True, kw_only=True):
    """A ResourceQuota."""

    spec: QuotaSpec = QuotaSpec()
    status: QuotaStatus = QuotaStatus()


# ---- jobs


class JobSpecification(Wire, frozen=True, kw_only=True):
    """The spec of a Job."""

    parallelism: int = 1
    suspend: bool = False


class JobStatus(Wire, frozen=True, kw_only=True):
    """The status of a Job."""

    active: int = 0
    terminating: int = 0
    ready: int = 0
    succeeded: int = 0
    conditions: tuple[Condition, ...] = ()
    completion_time: datetime | None = None


class Job(Object, frozen=True, kw_only=True):
    """A Job."""

    spec: JobSpecification = JobSpecification()
    status: JobStatus = JobStatus()


# ---- lists, watches, errors


class ListMetadata(Wire, frozen=True, kw_only=True):
    """Version and continuation of a list."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(Wire, frozen=True, kw_only=True):
    """One page of a list, with encoded items."""

    metadata: ListMetadata = ListMetadata()
    items: tuple[msgspec.Raw, ...] | None = None


class WatchEvent(Wire, frozen=True, kw_only=True):
    """One line of a watch, with an encoded object."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Cause(Wire, frozen=True, kw_only=True):
    """One cause of an error."""

    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(Wire, frozen=True, kw_only=True):
    """The details of an error."""

    name: str = ""
    kind: str = ""
    causes: tuple[Cause, ...] = ()
    retry_after_seconds: int | None = None


class Status(Wire, frozen=True, kw_only=True):
    """The server's answer instead of an object."""

    status: str = ""
    code: int = 0
    reason: str = ""
    message: str = ""
    details: StatusDetails = StatusDetails()
