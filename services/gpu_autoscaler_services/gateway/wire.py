"""What the gateway says, as types: the JSON of every answer, and the schemas of the OpenAPI document.

Field names of jobs are contracts (S33). None means unknown or not yet, never zero.
"""

from typing import Any

import msgspec

from gpu_autoscaler.model.jobs import JobState
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job, its state and its outlook."""

    job_id: str
    status: JobState
    queue_position: int | None  # 1 is next; None: not waiting
    estimated_start_time: Instant | None  # None: nothing that is known says when
    estimated_cost_usd: float | None  # for as long as jobs of its name ran lately, else for the longest it may run
    created_at: Instant
    job_name: str
    project_id: str
    priority: int
    gpu_type: str | None  # several of which any will do are separated by commas, the best first
    gpu_count: int  # of each member
    members: int
    preemptible: bool
    min_members: int | None = None  # so many are enough to start and to go on; None: all of them
    attempt: int = 0  # placements so far
    node_names: tuple[str, ...] = ()
    started_at: Instant | None = None
    finished_at: Instant | None = None
    message: str = ""  # why it waits, or why it ended
    estimated_start_earliest: Instant | None = None  # a tenth of such jobs starts before
    estimated_start_latest: Instant | None = None  # a tenth of such jobs starts after it
    estimated_cost_usd_max: float | None = None  # for the longest it may run
    estimate_basis: str = ""  # what the estimate is made of, or why there is none


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some jobs, newest first, and where the next ones begin."""

    items: tuple[Job, ...]
    next_cursor: str | None  # None: these were the last


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Room that a source wants to be free."""

    source: str
    shape: dict[str, Any]  # of each member, as it was said
    count: int | None  # None: the source does not know now, and the word before it stands
    until: Instant
    priority: str | int
    preemptible: bool
    note: str
    message: str  # why there is no room for all of it yet; empty: there is, or no plan has spoken of it


class DemandList(msgspec.Struct, frozen=True, kw_only=True):
    """Every wish that stands."""

    as_of: Instant
    items: tuple[Demand, ...]


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """A word that overrules the policy for a while."""

    key: str  # freeze, pause/<pool>, override/<scope>
    directive: dict[str, Any]  # as it was said
    reason: str
    given_by: str
    given_at: Instant
    until: Instant


class DirectiveList(msgspec.Struct, frozen=True, kw_only=True):
    """What overrules the policy now."""

    as_of: Instant
    items: tuple[Directive, ...]


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud will take the node."""

    kind: str
    reclaim_at: Instant | None
    received_at: Instant


class NodePod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod on a node."""

    pod: str  # namespace/name
    gpu_count: int
    job_id: str | None


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node from its order to its end."""

    name: str  # of the Kubernetes node; before there is one, the action that ordered it
    phase: str
    pool: str | None
    instance_type: str | None
    zone: str | None
    capacity_type: CapacityType | None
    gpu_model: str | None
    gpu_count: int
    gpu_busy_count: int
    gpu_utilization_ratio: float | None  # mean of the last minute; None: no telemetry
    price_micro_usd_per_hour: int | None
    node_uid: str | None = None
    action_id: str | None = None
    provider_id: str | None = None
    since: Instant | None = None  # ordered, launched or made: the first instant that is known
    usable_by: Instant | None = None  # a booting node is given back when it is not usable by then
    notice: Notice | None = None
    pods: tuple[NodePod, ...] = ()
    reason: str = ""  # why it was bought, as a sentence


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes that are not gone."""

    as_of: Instant
    items: tuple[Node, ...]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a plan decided."""

    decision: str  # buy_node, drain_node, cancel_drain, release_instance
    action_id: str
    subject: str  # what is bought or which node it is about
    reason: str  # the reason's tag
    sentence: str


class Deferred(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a plan did not do."""

    step: str
    subject: str
    reason: str
    sentence: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with everything it decided and held back."""

    plan_id: str
    sequence: int
    as_of: Instant
    decisions: tuple[Decision, ...]
    deferred: tuple[Deferred, ...]
    cut: dict[str, int]
    policy_digest: str
    core_digest: str


class ShadowSide(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the two policies would do about a subject."""

    what: str  # buy_node, drain_node, cancel_drain, release_instance, deferred, nothing
    reason: str  # the reason's tag; empty: none was given
    sentence: str


class ShadowDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A subject about which the policy in shadow decides otherwise than the one in force."""

    subject: str
    name: str  # the same as people know it
    since_at: Instant
    until_at: Instant | None  # None: it is so now
    real: ShadowSide
    shadow: ShadowSide


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy in shadow would do of the real state. Nobody acts on it."""

    as_of: Instant
    said_at: Instant | None  # when that last changed; None: no policy in shadow has spoken
    policy_digest: str | None  # of the policy in shadow
    real_policy_digest: str | None  # of the one that it is compared with
    is_compared_with_scaler: bool | None  # the scaler's last plan was made with that one; None: not known
    now: tuple[ShadowDifference, ...]  # empty: both policies decide the same
    earlier: tuple[ShadowDifference, ...]  # what is no longer so, the newest first


class PlanList(msgspec.Struct, frozen=True, kw_only=True):
    """The newest plans, newest first."""

    items: tuple[Plan, ...]


class RecordedFact(msgspec.Struct, frozen=True, kw_only=True):
    """A fact as it was recorded."""

    place: str  # stream:sequence
    subject: str
    event: dict[str, Any]  # CloudEvent in structured JSON


class FactList(msgspec.Struct, frozen=True, kw_only=True):
    """The newest facts, newest first."""

    items: tuple[RecordedFact, ...]


class CostSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Money of one span of time; allocated and idle add up to what is billed."""

    from_at: Instant
    allocated_micro_usd: int
    idle_micro_usd: int


class ProjectCost(msgspec.Struct, frozen=True, kw_only=True):
    """Money of one project over all spans."""

    project_id: str | None  # None: pods without a job of ours
    allocated_micro_usd: int


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Money by time and by project."""

    span_seconds: int
    allocated_micro_usd: int
    idle_micro_usd: int
    spans: tuple[CostSpan, ...]  # oldest first
    projects: tuple[ProjectCost, ...]  # dearest first


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster in numbers."""

    as_of: Instant
    clock_factor: float
    is_broker_connected: bool
    active_scaler: str | None  # instance that holds the lease; None: nobody now, or the broker does not say
    nodes_by_phase: dict[str, int]
    nodes_by_capacity_type: dict[str, int]
    gpu_count: int  # of usable nodes
    gpu_busy_count: int
    gpu_booting_count: int
    jobs_by_status: dict[str, int]
    pods_unschedulable_count: int
    notices_count: int
    price_micro_usd_per_hour: int  # of all instances that cost money and whose price is known
    price_unknown_count: int  # instances without a known price
    last_plan_at: Instant | None
    directives: tuple[Directive, ...]  # what overrules the policy now: freezes, pauses, overrides
    cut: dict[str, int]  # last sequence of each stream that this answer knows


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """What a thing waits for or what keeps it, and its story back to its first cause."""

    kind: str
    name: str
    now: str  # a line or two: the one thing that would let it start, or why it is there; empty: it is gone
    sentences: tuple[str, ...]
