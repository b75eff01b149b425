"""One item of demand: members that want room, and where the wish comes from."""

import enum
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.buy import BelowOverride, CapacityBuffer, UtilizationHigh
from gpu_autoscaler.model.reasons.defer import DeferReason


class DemandSource(enum.StrEnum):
    """Where an item comes from, which says whether nodes are bought for it."""

    QUEUED_JOB = "queued_job"  # waits for a place
    ELASTIC_MEMBER = "elastic_member"  # beyond the gang of a job that starts, or has a place, without it
    PENDING_POD = "pending_pod"  # Kubernetes found no node for it
    AT_RISK_POD = "at_risk_pod"  # runs on a node that the cloud takes; comes back as another pod
    PLACED_JOB = "placed_job"  # released, but its pods do not exist yet
    ARRIVING_POD = "arriving_pod"  # new: Kubernetes has not said yet whether it fits
    MOVING_POD = "moving_pod"  # runs on a node that we drain by choice
    REPORTED = "reported"  # nobody yet: somebody wants room to be free (`demand.reported`)
    MINIMUM = "minimum"  # nobody yet: the policy wants a node
    OVERRIDE = "override"  # nobody yet: somebody wants so many for a while
    AHEAD = "ahead"  # nobody yet: headroom, or demand that is foreseen


_BOUGHT_FOR = frozenset(
    {
        DemandSource.QUEUED_JOB,
        DemandSource.ELASTIC_MEMBER,
        DemandSource.PENDING_POD,
        DemandSource.AT_RISK_POD,
        DemandSource.REPORTED,
    }
)


class BillingScope(NamedTuple):
    """Whom a node is bought for, as far as limits mind."""

    project: str | None = None
    work_seconds_max: float | None = None  # how long the work may take at most; None: nobody knows


class DemandItem(msgspec.Struct, frozen=True, kw_only=True):
    """Members of one shape. Items with one `gang` are placed all together or not at all; their shapes may differ."""

    key: str  # job/<id>, member/<job id>/<number>, pod/<uid>, or demand/<source>/<number>
    source: DemandSource
    shape: Shape  # of each member
    member_count: int
    priority: int  # 0..1000, higher goes first
    since: Instant
    created_at: Instant | None = None  # of a pod
    is_inferred_unschedulable: bool = (
        False  # Kubernetes found no node for one that asks for the same, and has not come to this one
    )
    job_id: JobId | None = None
    project: str | None = None
    work_seconds_max: float | None = None  # None: nobody knows
    gang: str | None = None  # job/<id> or group/<namespace>/<name>: its items are placed all together or not at all
    start_by_at: Instant | None = None  # of equal priority the earliest goes first; None: no hurry
    within: str | None = None  # label of nodes whose value all members of the gang share; None: they may be apart
    leaves: NodeUid | None = None  # the doomed or drained node that it has to leave
    prefers: tuple[str, ...] = ()  # keys of the bins that it was released for
    ahead: CapacityBuffer | BelowOverride | UtilizationHigh | None = None  # why nodes are bought before anybody waits
    blocked: DeferReason | None = None  # why no node would help: it takes no room, and none is bought for it

    @property
    def is_bought_for(self) -> bool:
        """False for work that only keeps room from others: it has a place, or may get one without us."""
        return self.source in _BOUGHT_FOR

    @property
    def first_seen_at(self) -> Instant:
        """When it was first heard of, whatever was said of it since."""
        return self.created_at or self.since

    @property
    def customer(self) -> BillingScope:
        """As limits see it."""
        return BillingScope(self.project, self.work_seconds_max)


def longest_scope(customer: BillingScope, item: DemandItem) -> BillingScope:
    """The same customer, for as long as the item's work takes as well; nobody knows where that of one is unknown."""
    if customer.work_seconds_max is None or item.work_seconds_max is None:
        return customer._replace(work_seconds_max=None)
    return customer._replace(work_seconds_max=max(customer.work_seconds_max, item.work_seconds_max))
