"""Demand items: members that need capacity, and their source."""

import enum
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.buy import BelowOverride, CapacityBuffer, UtilizationHigh
from gpu_autoscaler.model.reasons.defer import DeferReason


class DemandSource(enum.StrEnum):
    """Source of a demand item. It decides whether nodes are bought for it."""

    QUEUED_JOB = "queued_job"  # waits for capacity
    ELASTIC_MEMBER = "elastic_member"  # optional member beyond the gang of its job
    PENDING_POD = "pending_pod"  # unschedulable
    AT_RISK_POD = "at_risk_pod"  # runs on a node under interruption notice; its controller recreates it
    PLACED_JOB = "placed_job"  # unsuspended, its pods do not exist yet
    ARRIVING_POD = "arriving_pod"  # new: not scheduled yet
    MOVING_POD = "moving_pod"  # runs on a node with a voluntary drain
    PROVISIONING = "provisioning"  # a ProvisioningRequest without capacity
    CAPACITY_CHECK = "capacity_check"  # the same, and nothing is bought for it
    BOOKED = "booked"  # capacity of a ProvisioningRequest, kept for pods to come
    CHECKED_POD = "checked_pod"  # waits for capacity that such a check has found
    REPORTED = "reported"  # requested for work to come (`demand.reported`)
    MINIMUM = "minimum"  # minimum of the policy
    OVERRIDE = "override"  # minimum of an override
    BUFFER = "buffer"  # headroom or forecast


_BOUGHT_FOR = frozenset(
    {
        DemandSource.QUEUED_JOB,
        DemandSource.ELASTIC_MEMBER,
        DemandSource.PENDING_POD,
        DemandSource.AT_RISK_POD,
        DemandSource.PROVISIONING,
        DemandSource.REPORTED,
    }
)


class BillingScope(NamedTuple):
    """Who a node is bought for, as relevant for limits."""

    project: str | None = None
    work_seconds_max: float | None = None  # maximum run time of the work; None: unknown


class DemandItem(msgspec.Struct, frozen=True, kw_only=True):
    """Members of one shape. Items with one `gang` are placed all together or not at all; their shapes may differ."""

    # job/<id>, member/<job id>/<number>, pod/<uid>, demand/<source>/<number>, or provisioning/<uid>/<number>
    key: str
    source: DemandSource
    shape: Shape  # of each member
    member_count: int
    priority: int  # 0..1000, higher goes first
    since: Instant
    created_at: Instant | None = None  # of a pod
    is_inferred_unschedulable: bool = False  # an equal pod is unschedulable; the scheduler has not tried this one yet
    job_id: JobId | None = None
    project: str | None = None
    work_seconds_max: float | None = None  # None: unknown
    gang: str | None = None  # job/<id>, group/<namespace>/<name>, or provisioning/<uid>
    start_by_at: Instant | None = None  # of equal priority the earliest is served first; None: no deadline
    within: str | None = None  # node label whose value all members of the gang share; None: any nodes
    leaves: NodeUid | None = None  # node under notice or drain
    prefers: tuple[str, ...] = ()  # keys of the bins of its placement
    buy_reason: CapacityBuffer | BelowOverride | UtilizationHigh | None = None  # why nodes are bought without work
    strict_queue: str | None = None  # queue in which no later job passes this one; None: others may pass
    blocked: DeferReason | None = None  # why no node helps: it uses no capacity and none is bought

    @property
    def is_bought_for(self) -> bool:
        """False for work that only uses capacity: it has a node, or may get one without a purchase."""
        return self.source in _BOUGHT_FOR

    @property
    def is_whole(self) -> bool:
        """True if the members of its gang are placed all or not at all."""
        return self.is_bought_for or self.source is DemandSource.CAPACITY_CHECK

    @property
    def first_seen_at(self) -> Instant:
        """When the work was created."""
        return self.created_at or self.since

    @property
    def billing_scope(self) -> BillingScope:
        return BillingScope(self.project, self.work_seconds_max)


def longest_scope(scope: BillingScope, item: DemandItem) -> BillingScope:
    """Return the scope with the longer run time of scope and item; unknown if one of them is."""
    if scope.work_seconds_max is None or item.work_seconds_max is None:
        return scope._replace(work_seconds_max=None)
    return scope._replace(work_seconds_max=max(scope.work_seconds_max, item.work_seconds_max))
