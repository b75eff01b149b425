"""A plan in the making: what the steps of `plan` hand on to each other.

Frozen, except for the two scratch pads of one planning run: `room`, which steps fill so that later steps see what is
left, and `numbers`, which are given out once.
"""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem
from gpu_autoscaler.core.demand.sources import demand
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.intake.directives import NO_ACTIVE_DIRECTIVES, ActiveDirectives, active_directives
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.placement.bins import current_bins
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, Deferred, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.directives import PERMANENT, AnyDirective, Override, PausePool
from gpu_autoscaler.model.ids import ActionId, NodeUid, derive_id
from gpu_autoscaler.model.labels import ACTION_ID
from gpu_autoscaler.model.reasons.drain import DrainReason, NodeDeleted, SpotReclaim

# Which purchases of a plan are one for the cloud: nodes of one gang that are alike. Called by
# `core/draft.py`. Whether they are made all at once or one by one is the cloud's to say
# (`providers/protocol.py: LaunchesGroups`); that they belong together is decided here, so that whoever
# carries it out, or does so again, finds the same ones.


def assign_launch_groups(decisions: Iterable[BuyNode]) -> tuple[BuyNode, ...]:
    """Return the purchases, in their order; two or more of one gang that are alike name the first of them."""
    bought = tuple(decisions)
    alike: dict[Hashable, list[BuyNode]] = {}
    for decision in bought:
        if decision.gang is not None:
            alike.setdefault(_likeness(decision), []).append(decision)
    first = {one.action_id: each[0].action_id for each in alike.values() if len(each) > 1 for one in each}
    return tuple(
        msgspec.structs.replace(one, transaction=first[one.action_id]) if one.action_id in first else one
        for one in bought
    )


def _likeness(decision: BuyNode) -> Hashable:
    """What nodes of one call share: all that is ordered but the name of the order, which each node's labels have."""
    labels = tuple(pair for pair in decision.labels if pair[0] != ACTION_ID)
    return (
        decision.gang, decision.pool, decision.offer, labels, decision.taints, decision.startup_taints,
        decision.slices, decision.deadline_at,
    )  # fmt: skip


# What a policy's pools want always, in the words of what people want for a while: a pause, at least so many
# nodes. Called by `core/draft.py`, so that whatever asks about directives knows of them. The second opinion
# reads the policy by itself (`core/check/directive_rules.py`).

_BY = "the policy"
_ALWAYS = datetime(1970, 1, 1, tzinfo=UTC)


@cached_by_identity(4)
def with_pool_directives(directives: ActiveDirectives, policy: ScalingPolicy) -> ActiveDirectives:
    """Return what is in force with the pools' own wants. Where a person speaks of a pool as well, the person's word is
    told; a person's most goes before a pool's least."""
    if not any(pool.is_paused or pool.nodes_count_min for pool in policy.pools):
        return directives
    paused = {
        pool.name: _word(PausePool(pool=pool.name), "the pool is switched off")
        for pool in policy.pools
        if pool.is_paused
    }
    return msgspec.structs.replace(
        directives,
        paused=paused | dict(directives.paused),
        overrides=(*directives.overrides, *_least(directives, policy)),
    )


def _least(directives: ActiveDirectives, policy: ScalingPolicy) -> Iterator[tuple[Override, PolicyDirectiveGiven]]:
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
            yield override, _word(override, f"the pool is to have {pool.nodes_count_min} at least")


def _word(directive: AnyDirective, why: str) -> PolicyDirectiveGiven:
    return PolicyDirectiveGiven(directive=directive, reason=why, given_by=_BY, given_at=_ALWAYS, until=PERMANENT)


class Purchase(msgspec.Struct, frozen=True, kw_only=True):
    """A node to buy, with what it stands and falls with."""

    decision: BuyNode
    transaction: str  # purchases of one transaction are made together or not at all
    needs: frozenset[str] = frozenset()  # transactions whose nodes this one counts on


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """Everything decided and held back so far, and the picture it was decided on."""

    as_of: datetime
    state: ClusterState  # what it is decided on
    parent_sequence: int
    views: tuple[NodeView, ...]  # sorted by name
    pods: Mapping[str, tuple[PodObserved, ...]]  # unfinished, by node name
    demand: tuple[DemandItem, ...]  # in the order in which it is served
    free_capacity: FreeCapacity
    directives: ActiveDirectives = NO_ACTIVE_DIRECTIVES
    removals: tuple[DrainNode | ReleaseInstance, ...] = ()
    returns: tuple[CancelDrain, ...] = ()
    purchases: tuple[Purchase, ...] = ()
    deferred: tuple[Deferred, ...] = ()
    claimed: frozenset[str] = frozenset()  # keys of the bins on which waiting work is counted
    ahead: Mapping[str, str] = {}  # by key of each bin that is kept for what may come: headroom/<name>, forecast/<kind>
    is_demand_met: bool = True  # False where work waits for nodes, bought just now or held back
    numbers: Iterator[int] = msgspec.field(default_factory=itertools.count)

    @classmethod
    def start(cls, state: ClusterState, as_of: datetime, policy: ScalingPolicy = DEFAULT_POLICY) -> "Draft":
        """Nothing decided yet."""
        views, pods = node_views(state, as_of), pods_by_node(state)
        wanted = demand(state, views, as_of)
        return cls(
            as_of=as_of,
            state=state,
            parent_sequence=state.last_plan_sequence,
            views=views,
            pods=pods,
            demand=wanted,
            free_capacity=FreeCapacity(current_bins(views, pods), policy.placement, [item.shape for item in wanted]),
            directives=with_pool_directives(active_directives(state.directives, as_of), policy),
        )

    def next_action_id(self) -> ActionId:
        """The id of one more decision. Equal drafts give out equal ids in equal order."""
        return ActionId(derive_id("action", self.as_of.isoformat(), self.parent_sequence, next(self.numbers)))

    def drain(
        self, view: NodeView, reason: DrainReason, *, deadline_at: datetime, is_voluntary: bool = True
    ) -> DrainNode:
        """The drain of a registered node. An instance that is not ours is not named, so that nobody ends it."""
        assert view.node_uid is not None  # noqa: S101 - only what is registered can be drained
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
        returns: Iterable[CancelDrain] = (),
        purchases: Iterable[Purchase] = (),
        deferred: Iterable[Deferred] = (),
    ) -> "Draft":
        """The draft with more in it."""
        return msgspec.structs.replace(
            self,
            removals=(*self.removals, *removals),
            returns=(*self.returns, *returns),
            purchases=(*self.purchases, *purchases),
            deferred=(*self.deferred, *deferred),
        )

    def leaving(self) -> frozenset[str]:
        """Names of our counted nodes that are on their way out, by earlier plans or this one, for whatever reason."""
        node_uids = {each.node_uid for each in self.removals if isinstance(each, DrainNode)}
        orders = {each.order_action_id for each in self.removals if isinstance(each, ReleaseInstance)}
        return frozenset(
            view.name
            for view in self.views
            if view.is_ours
            and view.is_counted
            and (view.is_leaving or view.node_uid in node_uids or view.action_id in orders)
        )

    def disturbing(self) -> frozenset[NodeUid]:
        """Nodes whose pods are being told to go by our choice: drains not finished, and those of this draft."""
        drains = [view.drain.decision for view in self.views if view.drain is not None and view.drain.drained is None]
        stopped = {each.node_uid for each in self.returns}
        return frozenset(
            drain.node_uid
            for drain in (*drains, *self.removals)
            if isinstance(drain, DrainNode) and is_chosen(drain) and drain.node_uid not in stopped
        )

    def finished(self) -> Plan:
        """The plan: what saves nodes first, then what replaces and adds, then what removes."""
        decisions: tuple[AnyDecision, ...] = (
            *self.returns,
            *assign_launch_groups(purchase.decision for purchase in self.purchases),
            *self.removals,
        )
        return Plan(as_of=self.as_of, parent_sequence=self.parent_sequence, decisions=decisions, deferred=self.deferred)


def is_chosen(drain: DrainNode) -> bool:
    """True unless the cloud takes the node: ours to decide, be it with force in the end."""
    return not isinstance(drain.reason, SpotReclaim | NodeDeleted)
