"""Types of every JSON answer, which are the schemas of the OpenAPI document.

Field names of jobs are contracts (docs/decisions.md#job-fields). None means unknown or not yet, never zero.
"""

from typing import Annotated, Any, Literal, get_args

import msgspec

from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.model.audit import Link
from gpu_autoscaler.model.decisions import AnyDecision, AnyUpkeep
from gpu_autoscaler.model.jobs import JobState
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType

DecisionTag = Annotated[
    str,
    msgspec.Meta(
        description="Kind of the decision.",
        extra_json_schema={
            "enum": sorted(
                str(decision.__struct_config__.tag) for decision in (*get_args(AnyDecision), *get_args(AnyUpkeep))
            )
        },
    ),
]
SideOutcome = Annotated[
    str,
    msgspec.Meta(
        description="The decision about the subject, if any.",
        extra_json_schema={
            "enum": [
                *sorted(str(decision.__struct_config__.tag) for decision in get_args(AnyDecision)),
                "deferred",
                "nothing",
            ]
        },
    ),
]
EXPLAINED_KINDS = ("job", "node", "pod", "request")
ExplainedKind = Annotated[
    str, msgspec.Meta(description="Kind of the object.", extra_json_schema={"enum": list(EXPLAINED_KINDS)})
]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its state and estimates."""

    job_id: str
    status: JobState  # state of the job
    queue_position: int | None  # 1 is first; None: not waiting
    estimated_start_time: Instant | None  # None: unknown
    estimated_cost_usd: float | None  # for `expected_run_seconds`, else for the time limit
    created_at: Instant
    job_name: str
    project_id: str
    priority: int
    gpu_type: str | None  # alternatives separated by commas, in order of preference
    gpu_count: int  # per member
    members: int
    preemptible: bool
    min_members: int | None = None  # members sufficient to start and continue; None: all
    attempt: int = 0  # number of placements
    node_names: tuple[str, ...] = ()
    started_at: Instant | None = None
    finished_at: Instant | None = None
    message: str = ""  # why the job waits, or why it ended
    estimated_start_earliest: Instant | None = None  # 10th percentile
    estimated_start_latest: Instant | None = None  # 90th percentile
    estimated_cost_usd_max: float | None = None  # for the job time limit
    estimate_basis: str = ""  # basis of the estimate, or why there is none
    submitted_by: str = ""  # empty: unknown
    queue: str = ""  # where it waits or waited: the queue of its project in the policy
    expected_run_seconds: float | None = None  # median, from its start; None: unknown
    expected_run_seconds_low: float | None = None  # one job in ten runs for less
    expected_run_seconds_high: float | None = None  # one job in ten runs for longer
    expected_end_time: Instant | None = None  # of a running job, predicted again as it runs; None: unknown
    run_time_basis: str = ""  # where the expectation is from


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of jobs, newest first."""

    items: tuple[Job, ...]
    next_cursor: str | None  # None: last page


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand reported by a source."""

    source: str
    shape: dict[str, Any]  # per member, as reported
    count: int | None  # None: unknown to the source now; the previous report stays active
    until: Instant
    priority: str | int
    preemptible: bool
    note: str
    message: str  # why capacity is missing; empty: it is free, or not planned yet


class DemandList(msgspec.Struct, frozen=True, kw_only=True):
    """Active demand reports, in pages."""

    as_of: Instant
    items: tuple[Demand, ...]
    next_cursor: str | None = None  # None: last page


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """A temporary override of the policy."""

    key: str  # freeze, pause/<pool>, override/<scope>
    directive: dict[str, Any]  # as requested
    reason: str
    given_by: str
    given_at: Instant
    until: Instant


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of the gateway's process."""

    key: str  # as in the settings file: section.name
    value: Any  # tokens and passwords are hidden; None: not set
    is_default: bool  # whether it has the value that it has without any settings


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and policy that are in force."""

    items: tuple[Setting, ...]  # by section, as in the settings file
    policy: dict[str, Any]  # the policy file merged with the AutoscalingPolicy objects


class DirectiveList(msgspec.Struct, frozen=True, kw_only=True):
    """Active directives, in pages."""

    as_of: Instant
    items: tuple[Directive, ...]
    next_cursor: str | None = None  # None: last page


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An interruption notice of the cloud."""

    kind: str  # kind of the notice, as the cloud names it
    reclaim_at: Instant | None
    received_at: Instant


class NodePod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod on a node."""

    pod: str  # namespace/name
    gpu_count: int
    job_id: str | None


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node, from order to termination."""

    name: str  # of the Kubernetes node; before it exists, the id of the action that ordered it
    phase: NodePhase
    pool: str | None
    instance_type: str | None
    zone: str | None
    capacity_type: CapacityType | None
    gpu_model: str | None
    gpu_count: int
    gpu_busy_count: int
    gpu_utilization_ratio: float | None  # mean of the newest minute; None: unknown, or older than the last pod
    price_micro_usd_per_hour: int | None
    node_uid: str | None = None
    action_id: str | None = None
    provider_id: str | None = None
    since: Instant | None = None  # ordered, launched or created: the first known
    usable_by: Instant | None = None  # boot deadline: a booting node not usable by then is released
    notice: Notice | None = None
    pods: tuple[NodePod, ...] = ()
    reason: str = ""  # why it was bought


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that are not gone, by name, in pages."""

    as_of: Instant
    items: tuple[Node, ...]
    next_cursor: str | None = None  # None: last page


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of a plan."""

    decision: DecisionTag
    action_id: str
    subject: str  # the offer, the node, the job or the instance
    reason: str  # the reason's tag
    sentence: str


class Deferred(msgspec.Struct, frozen=True, kw_only=True):
    """An action that a plan deferred."""

    step: str
    subject: str
    reason: str
    sentence: str


class DeferredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of one kind and shape that a step of a plan deferred for one reason."""

    step: str
    kind: str  # pod, job, node, ...
    reason: str
    sentence: str
    objects_count: int
    gpu_count: int
    shape: str  # in words; empty: none, or different ones
    subjects: tuple[str, ...]  # the first of them
    reasons_count: int  # reasons that differ in values alone; the sentence is that of the first object


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its decisions and deferred actions."""

    plan_id: str
    sequence: int | None  # in the stream SCALING; None: of the store, which keeps plans for longer
    made_at: Instant  # when it was published
    as_of: Instant  # of the state that it was made from
    decisions: tuple[Decision, ...]
    deferred: tuple[Deferred, ...]  # of each group the first objects
    cut: dict[str, int]
    policy_digest: str
    core_digest: str
    deferred_groups: tuple[DeferredGroup, ...] = ()  # empty also for plans of 0.2
    deferred_unlisted: dict[str, int] = {}  # by reason: objects in no group
    upkeep: tuple[Decision, ...] = ()  # acts that buy and remove no capacity


class ShadowSide(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the two policies decides about a subject."""

    outcome: SideOutcome
    reason: str  # the reason's tag; empty: none
    sentence: str


class ShadowDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A subject about which the shadow policy and the active policy decide differently."""

    subject: str
    name: str  # the subject's display name
    since_at: Instant
    until_at: Instant | None  # None: current
    real: ShadowSide
    shadow: ShadowSide


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """Differences of the shadow policy on the real state; it is never executed."""

    as_of: Instant
    changed_at: Instant | None  # last change; None: no shadow plan was published
    policy_digest: str | None  # of the shadow policy
    real_policy_digest: str | None  # of the policy that it is compared with
    is_compared_with_scaler: bool | None  # the scaler's last plan used the compared policy; None: unknown
    now: tuple[ShadowDifference, ...]  # current; empty: both policies decide the same
    earlier: tuple[ShadowDifference, ...]  # past, newest first, in pages
    next_cursor: str | None = None  # of earlier ones; None: last page


class PlanList(msgspec.Struct, frozen=True, kw_only=True):
    """Plans, newest first, in pages."""

    items: tuple[Plan, ...]
    next_cursor: str | None = None  # None: last page


class RecordedFact(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded fact."""

    position: str  # stream:sequence
    subject: str
    event: dict[str, Any]  # CloudEvent in structured JSON


class FactList(msgspec.Struct, frozen=True, kw_only=True):
    """Recent facts, newest first, in pages."""

    items: tuple[RecordedFact, ...]
    next_cursor: str | None = None  # None: last page


class CostSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Spend in one span; allocated and idle sum to the bill."""

    from_at: Instant
    allocated_micro_usd: int
    idle_micro_usd: int


class ProjectCost(msgspec.Struct, frozen=True, kw_only=True):
    """Spend of one project over all spans. Projects add up to the allocated total."""

    project_id: str | None  # None: pods that belong to no job
    allocated_micro_usd: int


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Spend by time and by project, of at most 31 days of UTC; earlier days are further pages."""

    span_seconds: int
    from_at: Instant | None = None  # first minute with a charge; None: there are no charges
    allocated_micro_usd: int  # sum of all spans, and of all projects
    idle_micro_usd: int  # sum of all spans
    spans: tuple[CostSpan, ...]  # oldest first
    projects: tuple[ProjectCost, ...]  # most expensive first
    # Of days before it only sums are known, whose spend is spread evenly over the day; None: there are none.
    daily_before: Instant | None = None
    next_cursor: str | None = None  # None: there are no earlier charges


class AuditItem(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the audit trail with its hash: SHA-256 over the hash of the entry before it, a line feed, and the
    entry as JSON with sorted keys and without spaces."""

    number: int
    entry: dict[str, Any]  # as stored: docs/audit.md has its fields
    hash: str


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of the audit trail, and where its chain begins and ends."""

    items: tuple[AuditItem, ...]
    next_cursor: str | None  # None: the last page
    anchor: Link  # the last entry that retention has removed; number 0: none
    head: Link  # the last entry; number 0: there is none


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster in numbers."""

    as_of: Instant
    clock_factor: float
    is_broker_connected: bool
    active_scaler: str | None  # holder of the lease; None: none, or unknown
    nodes_by_phase: dict[str, int]
    nodes_by_capacity_type: dict[str, int]
    gpu_count: int  # of usable nodes
    gpu_busy_count: int
    gpu_booting_count: int
    jobs_by_status: dict[str, int]
    pods_unschedulable_count: int
    notices_count: int
    price_micro_usd_per_hour: int  # of all billed instances with a known price
    price_unknown_count: int  # instances without a known price
    spread_micro_usd_per_month: int  # what present nodes cost more because a capacity pool had its share of spot
    last_plan_at: Instant | None
    directives: tuple[Directive, ...]  # active freezes, pauses, overrides
    cut: dict[str, int]  # last sequence of each stream included in this answer


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why an object waits or exists, and its history back to the first cause."""

    kind: ExplainedKind
    name: str
    now: str  # what would let it start, or why it exists; empty: it is gone
    sentences: tuple[str, ...]


SimulatedOutcome = Literal["existing_capacity", "purchase", "deferred"]


class SimulatedPurchase(msgspec.Struct, frozen=True, kw_only=True):
    """Equal nodes that would be bought."""

    pool: str
    instance_type: str
    zone: str
    capacity_type: CapacityType
    count: int
    price_micro_usd_per_hour: int | None  # of one node; None: unknown


class SimulatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan would decide for one job."""

    job_id: str
    job_name: str
    project_id: str
    outcome: SimulatedOutcome
    message: str  # why nodes are bought, which existing or ordered node takes the job, or why it has to wait
    purchases: tuple[SimulatedPurchase, ...]  # also for other jobs, where a node holds several


class PlanSide(msgspec.Struct, frozen=True, kw_only=True):
    """What one of two plans decides about a subject."""

    outcome: SideOutcome
    reason: str  # the reason's tag; empty: none
    sentence: str


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    """A subject about which the plan with the jobs decides differently."""

    subject: str
    name: str  # the subject's display name
    without_jobs: PlanSide
    with_jobs: PlanSide


class SimulatedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the next plan would decide if the jobs were queued now. Nothing is recorded or done."""

    as_of: Instant
    jobs: tuple[SimulatedJob, ...]  # in the order of the request
    purchases: tuple[SimulatedPurchase, ...]  # for all of the jobs, each node once
    price_micro_usd_per_hour: int | None  # of all purchases; None: one price is unknown
    others: tuple[PlanChange, ...] | None  # None: the caller may not read the cluster
