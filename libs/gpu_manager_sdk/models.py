"""Types of the gateway's requests and answers. Generated from the OpenAPI document by `make schemas`; do not edit.

None means unknown or not yet, never zero. A newer gateway may send more fields, which are ignored, and more values of
an enumeration, which are kept.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct


class _OpenEnum(StrEnum):
    """An enumeration that keeps the values which a newer gateway adds."""

    @classmethod
    def _missing_(cls, value: object) -> "_OpenEnum | None":
        if not isinstance(value, str):
            return None
        member = str.__new__(cls, value)
        member._name_, member._value_ = value, value
        return member


class AuditItem(Struct, frozen=True, kw_only=True):
    """An entry of the audit trail with its hash: SHA-256 over the hash of the entry before it, a line feed, and the     entry as JSON with sorted keys and without spaces."""

    number: int
    entry: dict[str, Any]
    hash: str


class Link(Struct, frozen=True, kw_only=True):
    """A position in the chain."""

    number: int = 0
    hash: str = "0000000000000000000000000000000000000000000000000000000000000000"


class AuditPage(Struct, frozen=True, kw_only=True):
    """Entries of the audit trail, and where its chain begins and ends."""

    items: tuple[AuditItem, ...]
    next_cursor: str | None
    anchor: Link
    head: Link


class Budget(Struct, frozen=True, kw_only=True):
    """A spend budget and how much of it is used."""

    owner: str
    period: str
    limit_micro_usd: int
    spent_micro_usd: int
    reserved_micro_usd: int
    left_micro_usd: int
    is_hard: bool
    until: datetime
    unknown_reason: str


class BudgetList(Struct, frozen=True, kw_only=True):
    """Spend budgets of the policy, by owner and period, in pages."""

    as_of: datetime
    items: tuple[Budget, ...]
    next_cursor: str | None = None


class CapacityType(_OpenEnum):
    """How capacity is bought. One name for all clouds: preemptible and low-priority are spot."""

    ON_DEMAND = "on-demand"
    RESERVED = "reserved"
    SPOT = "spot"


class ContainerRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The container to run."""

    image: str
    command: Sequence[str] = ()
    env: Mapping[str, str] = {}


class CostSpan(Struct, frozen=True, kw_only=True):
    """Spend in one span; allocated and idle sum to the bill."""

    from_at: datetime
    allocated_micro_usd: int
    idle_micro_usd: int


class ProjectCost(Struct, frozen=True, kw_only=True):
    """Spend of one project over all spans. Projects add up to the allocated total."""

    project_id: str | None
    allocated_micro_usd: int


class Cost(Struct, frozen=True, kw_only=True):
    """Spend by time and by project, of at most 31 days of UTC; earlier days are further pages."""

    span_seconds: int
    from_at: datetime | None = None
    allocated_micro_usd: int
    idle_micro_usd: int
    spans: tuple[CostSpan, ...]
    projects: tuple[ProjectCost, ...]
    daily_before: datetime | None = None
    next_cursor: str | None = None


class Decision(Struct, frozen=True, kw_only=True):
    """A decision of a plan."""

    decision: str
    action_id: str
    subject: str
    reason: str
    sentence: str


class Deferred(Struct, frozen=True, kw_only=True):
    """An action that a plan deferred."""

    step: str
    subject: str
    reason: str
    sentence: str


class DeferredGroup(Struct, frozen=True, kw_only=True):
    """Objects of one kind and shape that a step of a plan deferred for one reason."""

    step: str
    kind: str
    reason: str
    sentence: str
    objects_count: int
    gpu_count: int
    shape: str
    subjects: tuple[str, ...]
    reasons_count: int


class Demand(Struct, frozen=True, kw_only=True):
    """Demand reported by a source."""

    source: str
    shape: dict[str, Any]
    count: int | None
    until: datetime
    priority: str | int
    preemptible: bool
    note: str
    message: str


class DemandList(Struct, frozen=True, kw_only=True):
    """Active demand reports, in pages."""

    as_of: datetime
    items: tuple[Demand, ...]
    next_cursor: str | None = None


class DemandShape(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capacity for one member. Quantities as in Kubernetes: `8`, `500m`, `64Gi`."""

    gpu_count: int
    gpu_type: str | None = None
    gpu_memory_gb: float | None = None
    cpu: str = "1"
    memory: str = "4Gi"
    ephemeral_storage: str = "10Gi"


class DemandReported(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A source reports demand for work that does not exist yet. The latest report of a source replaces earlier ones."""

    source: str
    shape: DemandShape
    count: int | None
    until: datetime
    priority: str | int = 500
    preemptible: bool = True
    note: str = ""


class Directive(Struct, frozen=True, kw_only=True):
    """A temporary override of the policy."""

    key: str
    directive: dict[str, Any]
    reason: str
    given_by: str
    given_at: datetime
    until: datetime


class DirectiveList(Struct, frozen=True, kw_only=True):
    """Active directives, in pages."""

    as_of: datetime
    items: tuple[Directive, ...]
    next_cursor: str | None = None


class Freeze(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="directive", tag="freeze"):
    """Suspend purchases and voluntary removals."""


class PausePool(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="directive", tag="pause"):
    """Suspend purchases and voluntary removals of one pool; other pools may be bought from."""

    pool: str


class Override(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="directive", tag="override"):
    """Set a minimum or maximum of our nodes or GPUs: in all, of one pool, of one GPU model, or of both."""

    pool: str | None = None
    gpu_model: str | None = None
    nodes_count_min: int | None = None
    nodes_count_max: int | None = None
    gpu_count_min: int | None = None
    gpu_count_max: int | None = None


class DirectiveRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A directive with its reason and end."""

    directive: Freeze | PausePool | Override
    reason: str
    until: datetime
    given_by: str = ""


class RecordedFact(Struct, frozen=True, kw_only=True):
    """A recorded fact."""

    position: str
    subject: str
    event: dict[str, Any]


class FactList(Struct, frozen=True, kw_only=True):
    """Recent facts, newest first, in pages."""

    items: tuple[RecordedFact, ...]
    next_cursor: str | None = None


class GpuRequirements(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The GPUs that each member of the job needs. Source: docs/decisions.md#job-fields."""

    gpu_count: int
    gpu_type: str | Sequence[str] | None = None
    gpu_memory_gb: float | None = None
    gpu_fraction: float | None = None
    is_shared: bool = False


class JobState(_OpenEnum):
    """The states of a job. `preempted` is transient: the job is queued again until its retries are used up."""

    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"
    PENDING = "pending"
    PREEMPTED = "preempted"
    PROVISIONING = "provisioning"
    QUEUED = "queued"
    RUNNING = "running"


class Job(Struct, frozen=True, kw_only=True):
    """A job with its state and estimates."""

    job_id: str
    status: JobState
    queue_position: int | None
    estimated_start_time: datetime | None
    estimated_cost_usd: float | None
    created_at: datetime
    job_name: str
    project_id: str
    priority: int
    gpu_type: str | None
    gpu_count: int
    members: int
    preemptible: bool
    min_members: int | None = None
    attempt: int = 0
    node_names: tuple[str, ...] = ()
    started_at: datetime | None = None
    finished_at: datetime | None = None
    message: str = ""
    estimated_start_earliest: datetime | None = None
    estimated_start_latest: datetime | None = None
    estimated_cost_usd_max: float | None = None
    estimate_basis: str = ""
    submitted_by: str = ""
    queue: str = ""
    expected_run_seconds: float | None = None
    expected_run_seconds_low: float | None = None
    expected_run_seconds_high: float | None = None
    expected_end_time: datetime | None = None
    run_time_basis: str = ""


class JobPage(Struct, frozen=True, kw_only=True):
    """A page of jobs, newest first."""

    items: tuple[Job, ...]
    next_cursor: str | None


class ResourceRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """CPU, memory and disk of each member, as Kubernetes quantities: `8`, `64Gi`."""

    cpu: str = "1"
    memory: str = "4Gi"
    ephemeral_storage: str = "10Gi"


class JobRequested(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to run a job, the public input. Accepted only once `job.queued` follows."""

    job_name: str
    project_id: str
    gpu_requirements: GpuRequirements
    container: ContainerRequest = ContainerRequest(image='')
    priority: str | int = "medium"
    resources: ResourceRequest = ResourceRequest()
    budget_limit_usd: float | None = None
    max_duration_hours: float | None = None
    preemptible: bool = True
    members: int = 1
    min_members: int | None = None
    start_by_at: datetime | None = None
    finish_by_at: datetime | None = None
    within: str | None = None
    workload_type: str | None = None
    pod_labels: Mapping[str, str] = {}
    pod_annotations: Mapping[str, str] = {}
    checkpoint_interval_minutes: float | str | None = None
    runtime: str = "job"
    job_id: str | None = None
    expected_duration_seconds: float | None = None
    run_seconds: float | None = None
    submitted_by: str = ""
    pod_template: Mapping[str, Any] | None = None
    dangerous_fields_allowed: bool = False
    pod_template_digest: None = None


class NodePhase(_OpenEnum):
    """Lifecycle phase of a node."""

    CORDONED = "cordoned"
    DRAINED = "drained"
    DRAINING = "draining"
    FAILED = "failed"
    GONE = "gone"
    LAUNCHED = "launched"
    LOST = "lost"
    ORDERED = "ordered"
    PLANNED = "planned"
    READY = "ready"
    REGISTERED = "registered"
    TERMINATING = "terminating"


class Notice(Struct, frozen=True, kw_only=True):
    """An interruption notice of the cloud."""

    kind: str
    reclaim_at: datetime | None
    received_at: datetime


class NodePod(Struct, frozen=True, kw_only=True):
    """A pod on a node."""

    pod: str
    gpu_count: int
    job_id: str | None


class Node(Struct, frozen=True, kw_only=True):
    """A node, from order to termination."""

    name: str
    phase: NodePhase
    pool: str | None
    instance_type: str | None
    zone: str | None
    capacity_type: CapacityType | None
    gpu_model: str | None
    gpu_count: int
    gpu_busy_count: int
    gpu_utilization_ratio: float | None
    price_micro_usd_per_hour: int | None
    node_uid: str | None = None
    action_id: str | None = None
    provider_id: str | None = None
    since: datetime | None = None
    usable_by: datetime | None = None
    notice: Notice | None = None
    pods: tuple[NodePod, ...] = ()
    reason: str = ""


class NodeList(Struct, frozen=True, kw_only=True):
    """Nodes that are not gone, by name, in pages."""

    as_of: datetime
    items: tuple[Node, ...]
    next_cursor: str | None = None


class OfferStatus(Struct, frozen=True, kw_only=True):
    """An offer, and whether it is available now."""

    name: str
    instance_type: str
    zone: str
    capacity_type: CapacityType
    gpu_count: int
    gpu_model: str | None
    price_micro_usd_per_hour: int | None
    price_source: str | None
    priced_at: datetime | None
    is_price_stale: bool
    unavailable_until: datetime | None
    unavailable_reason: str


class OfferList(Struct, frozen=True, kw_only=True):
    """Offers by name, in pages."""

    as_of: datetime
    sampled_at: datetime | None
    items: tuple[OfferStatus, ...]
    next_cursor: str | None = None


class Plan(Struct, frozen=True, kw_only=True):
    """A plan with its decisions and deferred actions."""

    plan_id: str
    sequence: int | None
    made_at: datetime
    as_of: datetime
    decisions: tuple[Decision, ...]
    deferred: tuple[Deferred, ...]
    cut: dict[str, int]
    policy_digest: str
    core_digest: str
    deferred_groups: tuple[DeferredGroup, ...] = ()
    deferred_unlisted: dict[str, int] = {}
    upkeep: tuple[Decision, ...] = ()


class PlanSide(Struct, frozen=True, kw_only=True):
    """What one of two plans decides about a subject."""

    outcome: str
    reason: str
    sentence: str


class PlanChange(Struct, frozen=True, kw_only=True):
    """A subject about which the plan with the jobs decides differently."""

    subject: str
    name: str
    without_jobs: PlanSide
    with_jobs: PlanSide


class PlanList(Struct, frozen=True, kw_only=True):
    """Plans, newest first, in pages."""

    items: tuple[Plan, ...]
    next_cursor: str | None = None


class PlanQuestion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Jobs that would be queued together."""

    jobs: Sequence[JobRequested]


class Violation(Struct, frozen=True, kw_only=True):
    """One invalid field of a request: its path, and the reason in a sentence."""

    field: str
    reason: str
    kind: str = "invalid"


class RequiredRight(Struct, frozen=True, kw_only=True):
    """The right that a caller lacks, as Kubernetes RBAC grants it."""

    verb: str
    resource: str
    group: str
    namespace: str
    grant: str


class ProblemDocument(Struct, frozen=True, kw_only=True):
    """The body of every error."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    instance: str = ""
    violations: tuple[Violation, ...] = ()
    required: RequiredRight | None = None


class Setting(Struct, frozen=True, kw_only=True):
    """A setting of the gateway's process."""

    key: str
    value: Any
    is_default: bool


class Settings(Struct, frozen=True, kw_only=True):
    """Settings and policy that are in force."""

    items: tuple[Setting, ...]
    policy: dict[str, Any]


class ShadowSide(Struct, frozen=True, kw_only=True):
    """What one of the two policies decides about a subject."""

    outcome: str
    reason: str
    sentence: str


class ShadowDifference(Struct, frozen=True, kw_only=True):
    """A subject about which the shadow policy and the active policy decide differently."""

    subject: str
    name: str
    since_at: datetime
    until_at: datetime | None
    real: ShadowSide
    shadow: ShadowSide


class Shadow(Struct, frozen=True, kw_only=True):
    """Differences of the shadow policy on the real state; it is never executed."""

    as_of: datetime
    changed_at: datetime | None
    policy_digest: str | None
    real_policy_digest: str | None
    is_compared_with_scaler: bool | None
    now: tuple[ShadowDifference, ...]
    earlier: tuple[ShadowDifference, ...]
    next_cursor: str | None = None


class SimulatedPurchase(Struct, frozen=True, kw_only=True):
    """Equal nodes that would be bought."""

    pool: str
    instance_type: str
    zone: str
    capacity_type: CapacityType
    count: int
    price_micro_usd_per_hour: int | None


class SimulatedJob(Struct, frozen=True, kw_only=True):
    """What the plan would decide for one job."""

    job_id: str
    job_name: str
    project_id: str
    outcome: str
    message: str
    purchases: tuple[SimulatedPurchase, ...]


class SimulatedPlan(Struct, frozen=True, kw_only=True):
    """What the next plan would decide if the jobs were queued now. Nothing is recorded or done."""

    as_of: datetime
    jobs: tuple[SimulatedJob, ...]
    purchases: tuple[SimulatedPurchase, ...]
    price_micro_usd_per_hour: int | None
    others: tuple[PlanChange, ...] | None


class Status(Struct, frozen=True, kw_only=True):
    """The cluster in numbers."""

    as_of: datetime
    clock_factor: float
    is_broker_connected: bool
    active_scaler: str | None
    nodes_by_phase: dict[str, int]
    nodes_by_capacity_type: dict[str, int]
    gpu_count: int
    gpu_busy_count: int
    gpu_booting_count: int
    jobs_by_status: dict[str, int]
    pods_unschedulable_count: int
    notices_count: int
    price_micro_usd_per_hour: int
    price_unknown_count: int
    spread_micro_usd_per_month: int
    last_plan_at: datetime | None
    directives: tuple[Directive, ...]
    cut: dict[str, int]


class Why(Struct, frozen=True, kw_only=True):
    """Why an object waits or exists, and its history back to the first cause."""

    kind: str
    name: str
    now: str
    sentences: tuple[str, ...]
