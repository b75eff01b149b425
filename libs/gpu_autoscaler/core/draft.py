"""The draft of a plan, passed from step to step.

Frozen except `free_capacity`, which steps use up, and `numbers`, from which ids are derived.
"""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem
from gpu_autoscaler.core.demand.queue_order import in_queue_order
from gpu_autoscaler.core.demand.quotas import with_quota
from gpu_autoscaler.core.demand.sources import demand
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.intake.directives import NO_ACTIVE_DIRECTIVES, ActiveDirectives, active_directives
from gpu_autoscaler.core.next_change import plain
from gpu_autoscaler.core.nodes.views import NodeIndex, NodeView, Selected, node_views
from gpu_autoscaler.core.placement.bins import CURRENT_BINS
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.measured_use import measured_use
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.core.state.forced_removals import tripped_brake
from gpu_autoscaler.core.state.rejections import set_aside_now
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.model.decisions import (
    NO_UPKEEP,
    AnyDecision,
    BuyNode,
    CancelDrain,
    Deferred,
    DrainNode,
    Plan,
    ReleaseInstance,
    RequestPreemptionCheckpoint,
    Upkeep,
    upkeep_key,
)
from gpu_autoscaler.model.directives import PERMANENT, AnyDirective, Override, PausePool
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, derive_id
from gpu_autoscaler.model.labels import ACTION_ID
from gpu_autoscaler.model.reasons.defer import DeferReason, PlanRejected
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped
from gpu_autoscaler.model.reasons.drain import DrainReason, NodeDeleted, SpotReclaim
from gpu_autoscaler.model.reasons.preempt import PreemptReason

# ---- launch groups: equal nodes of one gang. They are decided here, so that a repeated execution finds the same
# groups; whether a group is one call is up to the cloud (`providers/protocol.py: LaunchesGroups`).


def assign_launch_groups(decisions: Iterable[BuyNode]) -> tuple[BuyNode, ...]:
    """Return the purchases in their order; equal nodes of one gang get the id of the first one as launch group."""
    bought = tuple(decisions)
    groups: dict[Hashable, list[BuyNode]] = {}
    for decision in bought:
        if decision.gang is not None:
            groups.setdefault(_launch_group(decision), []).append(decision)
    first = {buy.action_id: group[0].action_id for group in groups.values() if len(group) > 1 for buy in group}
    return tuple(
        msgspec.structs.replace(buy, transaction=first[buy.action_id]) if buy.action_id in first else buy
        for buy in bought
    )


def _launch_group(decision: BuyNode) -> Hashable:
    """Everything that nodes of one launch share, which is all but the action id in their labels."""
    labels = tuple(pair for pair in decision.labels if pair[0] != ACTION_ID)
    return (
        decision.gang, decision.pool, decision.offer, labels, decision.taints, decision.startup_taints,
        decision.slices, decision.deadline_at,
    )  # fmt: skip


# ---- pools of the policy as directives: paused pools and their minimums

_BY = "the policy"
_ALWAYS = datetime(1970, 1, 1, tzinfo=UTC)


@cached_by_identity(4)
def with_pool_directives(directives: ActiveDirectives, policy: ScalingPolicy) -> ActiveDirectives:
    """Return the directives with pauses and minimums of the pools. A directive of a user takes precedence over the
    pause of its pool, and its maximum over the minimum."""
    if not any(pool.is_paused or pool.nodes_count_min for pool in policy.pools):
        return directives
    paused = {
        pool.name: _directive(PausePool(pool=pool.name), "the pool is paused in the policy")
        for pool in policy.pools
        if pool.is_paused
    }
    return msgspec.structs.replace(
        directives,
        paused=paused | dict(directives.paused),
        overrides=(*directives.overrides, *_pool_minimums(directives, policy)),
    )


def _pool_minimums(
    directives: ActiveDirectives, policy: ScalingPolicy
) -> Iterator[tuple[Override, PolicyDirectiveGiven]]:
    for pool in policy.pools:
        allowed = [
            override.nodes_count_max
            for override, _ in directives.overrides
            if override.nodes_count_max is not None
            and override.gpu_model is None
            and override.pool in (None, pool.name)
        ]
        if least := min([pool.nodes_count_min, *allowed]):
            override = Override(pool=pool.name, nodes_count_min=least)
            yield override, _directive(override, f"nodes_count_min of the pool is {pool.nodes_count_min}")


def _directive(directive: AnyDirective, reason: str) -> PolicyDirectiveGiven:
    return PolicyDirectiveGiven(directive=directive, reason=reason, given_by=_BY, given_at=_ALWAYS, until=PERMANENT)


DRAINED = Selected(lambda view: view.drain is not None)
_LEAVING = Selected(lambda view: view.is_ours and view.is_counted and view.is_leaving)


class Purchase(msgspec.Struct, frozen=True, kw_only=True):
    """A node to buy, and the purchases that it depends on."""

    decision: BuyNode
    transaction: str  # purchases of one transaction are all made or all dropped
    depends_on: frozenset[str] = frozenset()  # transactions whose nodes this one relies on


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that is to end as a whole, and why."""

    job_id: JobId
    attempt: int
    retries_used_count: int  # before this end, which uses none
    reason: PreemptReason
    pods: tuple[PodObserved, ...]  # unfinished, ordered by uid


SAVE_PREFIX = upkeep_key(RequestPreemptionCheckpoint.tag(), "job/")  # of the names of all such acts


def save_key(job_id: JobId, attempt: int) -> str:
    """Return the name of the act that asks this attempt to save before it ends as a whole."""
    return upkeep_key(RequestPreemptionCheckpoint.tag(), f"job/{job_id}", str(attempt))


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan found for the members of a ProvisioningRequest."""

    missing: DeferReason | None = None  # why some have no place; None: all have one
    is_ready: bool = True  # all places are on usable nodes
    is_ordered: bool = True  # none of them is on a node that this very plan buys
    expected_at: datetime | None = None  # when the last of the ordered nodes is usable; None: unknown, or all are

    def joined(self, other: "Served") -> "Served":
        """Return both together."""
        instants = [at for at in (self.expected_at, other.expected_at) if at is not None]
        return Served(
            missing=self.missing or other.missing,
            is_ready=self.is_ready and other.is_ready,
            is_ordered=self.is_ordered and other.is_ordered,
            expected_at=max(instants, default=None),
        )


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions and deferrals so far, and the state they are based on."""

    as_of: datetime
    state: ClusterState
    parent_sequence: int
    views: NodeIndex  # sorted by name
    pods: Mapping[str, tuple[PodObserved, ...]]  # unfinished, by node name
    demand: tuple[DemandItem, ...]  # in the order in which it is served
    free_capacity: FreeCapacity
    directives: ActiveDirectives = NO_ACTIVE_DIRECTIVES
    rejected: Mapping[str, PlanRejected] = {}  # set aside because the plan check refused it, by subject
    removals: tuple[DrainNode | ReleaseInstance, ...] = ()
    canceled_drains: tuple[CancelDrain, ...] = ()
    purchases: tuple[Purchase, ...] = ()
    deferred: tuple[Deferred, ...] = ()
    claimed: frozenset[str] = frozenset()  # keys of the bins with waiting work
    served: Mapping[str, Served] = {}  # open and booked ProvisioningRequests, by key
    buffers: Mapping[str, str] = {}  # by key of each bin kept as buffer: headroom/<name> or forecast/<kind>
    is_demand_met: bool = True  # False if work waits for nodes
    returning: Preemption | None = None  # a job that goes back to spot once it has saved
    brake: BrakeTripped | None = None  # nothing is removed by force
    upkeep: Upkeep = NO_UPKEEP
    numbers: Iterator[int] = msgspec.field(default_factory=itertools.count)

    @classmethod
    def start(
        cls,
        state: ClusterState,
        as_of: datetime,
        policy: ScalingPolicy = DEFAULT_POLICY,
        rejected: Mapping[str, PlanRejected] | None = None,
    ) -> "Draft":
        """Return a draft without decisions. `rejected`: set aside in addition to what the state knows."""
        views = node_views(state, as_of)
        bins = views.table(CURRENT_BINS)
        set_aside = {**set_aside_now(state, as_of), **(rejected or {})}
        wanted = in_queue_order(demand(state, views, as_of), state, policy, as_of)
        wanted, _ = with_quota(_without_rejected(wanted, set_aside), state, policy, as_of)
        return cls(
            as_of=as_of,
            state=state,
            parent_sequence=state.last_plan_sequence,
            views=views,
            pods=views.pods,
            demand=wanted,
            free_capacity=FreeCapacity(
                bins, policy.placement, [item.shape for item in wanted], measured_use(state, views, policy, as_of)
            ),
            rejected=set_aside,
            brake=tripped_brake(state) if policy.removal.brake.is_on else None,
            directives=with_pool_directives(active_directives(state.directives, as_of), policy),
        )

    def next_action_id(self) -> ActionId:
        """Return the id of the next decision. Equal drafts return equal ids in equal order."""
        return ActionId(derive_id("action", self.as_of.isoformat(), self.parent_sequence, next(self.numbers)))

    def drain(
        self, view: NodeView, reason: DrainReason, *, deadline_at: datetime, is_voluntary: bool = True
    ) -> DrainNode:
        """Return a drain of a registered node; `provider_id` only if we bought it, else it is not terminated."""
        assert view.node_uid is not None  # noqa: S101 - only registered nodes are drained
        return DrainNode(
            action_id=self.next_action_id(),
            node_uid=view.node_uid,
            node_name=view.name,
            provider_id=view.provider_id if view.is_ours else None,
            is_voluntary=is_voluntary,
            deadline_at=deadline_at,
            reason=reason,
        )

    def adding(
        self,
        *,
        removals: Iterable[DrainNode | ReleaseInstance] = (),
        canceled_drains: Iterable[CancelDrain] = (),
        purchases: Iterable[Purchase] = (),
        deferred: Iterable[Deferred] = (),
    ) -> "Draft":
        return msgspec.structs.replace(
            self,
            removals=(*self.removals, *removals),
            canceled_drains=(*self.canceled_drains, *canceled_drains),
            purchases=(*self.purchases, *purchases),
            deferred=(*self.deferred, *deferred),
        )

    def deferring(self, step: str, subject: str, reason: DeferReason) -> "Draft":
        return self.adding(deferred=[Deferred(step=step, subject=subject, reason=reason)])

    def leaving_nodes(self) -> frozenset[str]:
        """Return the names of counted nodes that are being removed, by earlier plans or this one, for any reason."""
        node_uids = {removal.node_uid for removal in self.removals if isinstance(removal, DrainNode)}
        orders = {removal.order_action_id for removal in self.removals if isinstance(removal, ReleaseInstance)}
        leaving = frozenset(view.name for view in self.views.table(_LEAVING))
        if not self.removals:
            return leaving
        return leaving.union(
            view.name
            for view in self.views
            if view.is_ours and view.is_counted and (view.node_uid in node_uids or view.action_id in orders)
        )

    def disrupted_nodes(self) -> frozenset[NodeUid]:
        """Return nodes with discretionary drains: unfinished ones, and those of this draft."""
        drained = self.views.table(DRAINED)
        if not drained and not self.removals:
            return frozenset()
        drains = [view.drain.decision for view in drained if view.drain is not None and view.drain.drained is None]
        canceled = {drain.node_uid for drain in self.canceled_drains}
        return frozenset(
            drain.node_uid
            for drain in (*drains, *self.removals)
            if isinstance(drain, DrainNode) and is_discretionary(drain) and drain.node_uid not in canceled
        )

    def to_plan(self) -> Plan:
        """Return the plan: canceled drains first, then purchases, then removals."""
        decisions: tuple[AnyDecision, ...] = (
            *self.canceled_drains,
            *assign_launch_groups(purchase.decision for purchase in self.purchases),
            *self.removals,
        )
        return Plan(
            as_of=plain(self.as_of),
            parent_sequence=self.parent_sequence,
            decisions=decisions,
            deferred=self.deferred,
            brake=self.brake,
            upkeep=self.upkeep,
        )


def _without_rejected(items: tuple[DemandItem, ...], rejected: Mapping[str, PlanRejected]) -> tuple[DemandItem, ...]:
    """Return the items; those that are set aside use no capacity and are deferred."""
    if not rejected:
        return items
    reasons = [rejected.get(item.key) or (None if item.gang is None else rejected.get(item.gang)) for item in items]
    return tuple(
        item if reason is None else msgspec.structs.replace(item, blocked=reason)
        for item, reason in zip(items, reasons, strict=True)
    )


def is_discretionary(drain: DrainNode) -> bool:
    """True unless the cloud or a user removes the node."""
    return not isinstance(drain.reason, SpotReclaim | NodeDeleted)
