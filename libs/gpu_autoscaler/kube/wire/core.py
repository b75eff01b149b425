"""The parts of Kubernetes' objects that we read, as they are on the wire. Everything else is skipped while decoding.

Source: Kubernetes API reference v1.36, the kinds of these names (read 2026-11-21), held against recorded answers."""

from datetime import datetime
from typing import Literal

import msgspec

ConditionStatus = Literal["True", "False", "Unknown"]


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of all wire structs: camelCase names, unknown fields ignored."""


class OwnerReference(_Wire, frozen=True, kw_only=True):
    """Who made the object."""

    kind: str
    name: str
    uid: str
    controller: bool = False


class Metadata(_Wire, frozen=True, kw_only=True):
    """What every object carries."""

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


class Condition(_Wire, frozen=True, kw_only=True):
    """One condition of a status."""

    type: str
    status: ConditionStatus
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class Object(_Wire, frozen=True, kw_only=True):
    """Any object, as far as all are alike."""

    metadata: Metadata

    @property
    def version(self) -> int:
        """The resourceVersion as a number (comparable within a kind: KEP-5504, read 2026-11-21)."""
        return int(self.metadata.resource_version)


# ---- pods


class ResourceList(_Wire, frozen=True, kw_only=True):
    """What a container asks for and may use, as quantities."""

    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class Container(_Wire, frozen=True, kw_only=True):
    """A container, or an init container; one that restarts always is a sidecar."""

    name: str = ""
    resources: ResourceList = ResourceList()
    restart_policy: str | None = None


class Requirement(_Wire, frozen=True, kw_only=True):
    """A condition on labels."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class SelectorTerm(_Wire, frozen=True, kw_only=True):
    """Conditions on a node that hold together."""

    match_expressions: tuple[Requirement, ...] = ()
    match_fields: tuple[Requirement, ...] = ()


class NodeSelector(_Wire, frozen=True, kw_only=True):
    """Alternatives."""

    node_selector_terms: tuple[SelectorTerm, ...] = ()


class PreferredTerm(_Wire, frozen=True, kw_only=True):
    """Conditions on a node that count for so much."""

    weight: int
    preference: SelectorTerm = SelectorTerm()


class NodeAffinity(_Wire, frozen=True, kw_only=True):
    """What is required, and what would be liked."""

    required: NodeSelector | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")
    preferred: tuple[PreferredTerm, ...] = msgspec.field(
        default=(), name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class LabelSelector(_Wire, frozen=True, kw_only=True):
    """Conditions on labels that hold together; none at all selects everything."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()


class PodAffinityTerm(_Wire, frozen=True, kw_only=True):
    """Pods to be near to, or far from. Without a label selector it is about no pod."""

    topology_key: str
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = ()
    mismatch_label_keys: tuple[str, ...] = ()


class WeightedPodAffinityTerm(_Wire, frozen=True, kw_only=True):
    """Pods to be near to, or far from, that count for so much."""

    weight: int
    pod_affinity_term: PodAffinityTerm


class PodAffinity(_Wire, frozen=True, kw_only=True):
    """What is required, and what would be liked, of affinity and of anti-affinity."""

    required: tuple[PodAffinityTerm, ...] = msgspec.field(
        default=(), name="requiredDuringSchedulingIgnoredDuringExecution"
    )
    preferred: tuple[WeightedPodAffinityTerm, ...] = msgspec.field(
        default=(), name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(_Wire, frozen=True, kw_only=True):
    """What is asked of the node, and of the pods near it."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class TopologySpreadConstraint(_Wire, frozen=True, kw_only=True):
    """How evenly pods are spread."""

    topology_key: str
    max_skew: int = 1
    when_unsatisfiable: str = "DoNotSchedule"
    label_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = ()


class WireToleration(_Wire, frozen=True, kw_only=True):
    """A taint that does not keep the pod away."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: str = ""


class Present(_Wire, frozen=True, kw_only=True):
    """Something of which only matters that it is there."""


class ClaimSource(_Wire, frozen=True, kw_only=True):
    """A volume by its claim."""

    claim_name: str


class Volume(_Wire, frozen=True, kw_only=True):
    """The kinds that die with the node, and those that are claimed."""

    name: str = ""
    empty_dir: Present | None = None
    host_path: Present | None = None
    persistent_volume_claim: ClaimSource | None = None
    ephemeral: Present | None = None  # claimed for this pod alone, under its name and the volume's


class SchedulingGate(_Wire, frozen=True, kw_only=True):
    """Somebody else's hold on the pod."""

    name: str = ""


class PodSpec(_Wire, frozen=True, kw_only=True):
    """What the pod wants."""

    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    overhead: dict[str, str] = {}
    node_name: str | None = None
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    topology_spread_constraints: tuple[TopologySpreadConstraint, ...] = ()
    tolerations: tuple[WireToleration, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    priority: int = 0
    priority_class_name: str = ""
    termination_grace_period_seconds: float = 30.0
    volumes: tuple[Volume, ...] = ()
    resource_claims: tuple[dict[str, str], ...] = ()  # each by its own name, and that of its claim or template


class Terminated(_Wire, frozen=True, kw_only=True):
    """How a container ended."""

    finished_at: datetime | None = None


class ContainerState(_Wire, frozen=True, kw_only=True):
    """Only the end is read."""

    terminated: Terminated | None = None


class ContainerStatus(_Wire, frozen=True, kw_only=True):
    """One container's state."""

    state: ContainerState = ContainerState()


class PodStatus(_Wire, frozen=True, kw_only=True):
    """How the pod is."""

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


class WireTaint(_Wire, frozen=True, kw_only=True):
    """A mark that keeps pods away."""

    key: str
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
    value: str = ""


class NodeSpec(_Wire, frozen=True, kw_only=True):
    """What the node is told to be."""

    provider_id: str | None = msgspec.field(default=None, name="providerID")
    unschedulable: bool = False
    taints: tuple[WireTaint, ...] = ()


class NodeAddress(_Wire, frozen=True, kw_only=True):
    """Where the node is reached."""

    type: str
    address: str


class NodeStatus(_Wire, frozen=True, kw_only=True):
    """How the node is."""

    allocatable: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()
    addresses: tuple[NodeAddress, ...] = ()


class Node(Object, frozen=True, kw_only=True):
    """A node."""

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


# ---- disruption budgets and jobs


class BudgetSpec(_Wire, frozen=True, kw_only=True):
    """Whom the budget protects. No selector selects no pod; an empty one selects all."""

    selector: LabelSelector | None = None


class BudgetStatus(_Wire, frozen=True, kw_only=True):
    """How many pods may go now."""

    observed_generation: int = 0
    disruptions_allowed: int = 0
    current_healthy: int = 0
    desired_healthy: int = 0


class PodDisruptionBudget(Object, frozen=True, kw_only=True):
    """A budget."""

    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()


class JobSpecification(_Wire, frozen=True, kw_only=True):
    """What a Job wants."""

    parallelism: int = 1
    suspend: bool = False


class JobStatus(_Wire, frozen=True, kw_only=True):
    """How a Job is."""

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


# ---- lists, watches, refusals


class ListMetadata(_Wire, frozen=True, kw_only=True):
    """Version and next page of a list."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(_Wire, frozen=True, kw_only=True):
    """One page of a list, its items still encoded."""

    metadata: ListMetadata = ListMetadata()
    items: tuple[msgspec.Raw, ...] | None = None


class WatchEvent(_Wire, frozen=True, kw_only=True):
    """One line of a watch, its object still encoded."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Cause(_Wire, frozen=True, kw_only=True):
    """One reason of a refusal."""

    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(_Wire, frozen=True, kw_only=True):
    """What a refusal is about."""

    name: str = ""
    kind: str = ""
    causes: tuple[Cause, ...] = ()
    retry_after_seconds: int | None = None


class Status(_Wire, frozen=True, kw_only=True):
    """The server's answer when it is not the object."""

    status: str = ""
    code: int = 0
    reason: str = ""
    message: str = ""
    details: StatusDetails = StatusDetails()
