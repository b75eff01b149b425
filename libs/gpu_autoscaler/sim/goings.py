"""Invariant: the number of voluntary removals at a time is within the policy's disruption budgets.

Independent of the plan's own count and that of the plan check, which are thereby tested.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from math import ceil

from gpu_autoscaler.core.policies.removal import RemovalCause
from gpu_autoscaler.core.policy import NodePool, ScalingPolicy
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain, DrainNode, Plan
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons import NodeDrifted, NodeExpired, NodeIdle, NodeUnderused
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.policies import Policies

ENDED_LATELY = timedelta(seconds=60)  # until every process knows that a machine has ended
TAKEN_LATELY = timedelta(seconds=300)
REMOVAL_PACE = "removals keep their pace"
_CAUSES: dict[type[object], RemovalCause] = {
    NodeIdle: RemovalCause.EMPTY,
    NodeUnderused: RemovalCause.UNDERUSED,
    NodeExpired: RemovalCause.EXPIRED,
    NodeDrifted: RemovalCause.DRIFTED,
}


class Goings:
    """Tracks nodes that are being removed voluntarily."""

    def __init__(self, cloud: Cloud, policies: Policies, breaks: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._policies = policies
        self._breaks = breaks
        self._going: set[str] = set()  # node names
        self._bought: dict[ActionId, datetime] = {}  # and the launch deadline of each order

    def over(self, node_name: str) -> None:
        """The drain ended or was canceled."""
        self._going.discard(node_name)

    def planned(self, plan: Plan, policy_digest: str, now: datetime, *, is_calm: bool) -> None:
        """A plan was published. With faults it may use stale data and is only recorded."""
        for decision in plan.decisions:
            if isinstance(decision, CancelDrain):
                self.over(decision.node_name)
        chosen = [one for one in plan.decisions if isinstance(one, DrainNode) and one.is_voluntary]
        before = {one for one in self._going if self._is_alive(one)}
        self._going = before | {one.node_name for one in chosen if self._is_alive(one.node_name)}
        policy = self._policies.by_digest[policy_digest]
        self._see_minimum(plan, policy, now, is_calm=is_calm)
        if is_calm:
            self._see_pace(chosen, before, policy, plan.as_of, now)

    def _see_pace(
        self, chosen: Sequence[DrainNode], before: set[str], policy: ScalingPolicy, as_of: datetime, now: datetime
    ) -> None:
        """Each removal respects the limits of its own cause; removals with the strictest limits are counted first."""
        nodes_count = sum(
            machine.is_ordered and (machine.terminated_at is None or now - machine.terminated_at < ENDED_LATELY)
            for machine in self._cloud.machines
        )
        causes = [cause for one in chosen if (cause := _CAUSES.get(type(one.reason))) is not None]
        limits = sorted((min(_limits(policy, cause, nodes_count, as_of)), cause) for cause in causes)
        others = before - {one.node_name for one in chosen}
        for going_count, (most, cause) in enumerate(limits, start=len(others) + 1):
            if going_count > most:
                self._breaks(REMOVAL_PACE, f"{sorted(self._going)} go at once, one as {cause}; the policy allows {most}")
                return

    def _is_alive(self, node_name: str) -> bool:
        machine = self._cloud.of_node(node_name)
        return machine is not None and machine.is_alive

    def _see_minimum(self, plan: Plan, policy: ScalingPolicy, now: datetime, *, is_calm: bool) -> None:
        """No idle node is removed below the minimum, orders included."""
        self._bought |= {one.action_id: one.deadline_at for one in plan.decisions if isinstance(one, BuyNode)}
        idle = [one for one in plan.decisions if isinstance(one, DrainNode) and isinstance(one.reason, NodeIdle)]
        if not idle or not is_calm:
            return
        alive = [one for one in self._cloud.machines if one.is_ordered and (one.is_alive or _is_taken_lately(one, now))]
        launched = {one.order.action_id for one in self._cloud.machines}
        coming = [key for key, until in self._bought.items() if until > plan.as_of and key not in launched]
        left_count = sum(one.node_name not in self._going for one in alive) + len(coming)
        if left_count < policy.nodes_count_min:
            what = f"{idle[0].node_name} goes as idle, {left_count} are left; the policy wants {policy.nodes_count_min}"
            self._breaks(REMOVAL_PACE, what)
        for pool in policy.pools:
            self._see_minimum_of(pool, idle, alive, coming)

    def _see_minimum_of(
        self, pool: NodePool, idle: Sequence[DrainNode], alive: Sequence[Machine], coming: Sequence[ActionId]
    ) -> None:
        """The same for one pool. Every order counts for each pool, as its pool is not known here."""
        own = [one for one in alive if one.order.pool == pool.name]
        goes = {one.node_name for one in idle} & {one.node_name for one in own}
        left_count = sum(one.node_name not in self._going for one in own) + len(coming)
        if goes and left_count < pool.nodes_count_min:
            what = f"{min(goes)} goes as idle, {left_count} are left of pool {pool.name}"
            self._breaks(REMOVAL_PACE, f"{what}; the policy wants {pool.nodes_count_min}")


def _is_taken_lately(machine: Machine, now: datetime) -> bool:
    """True for a machine whose reclaim may not be known to every process yet."""
    return machine.reclaimed_at is not None and now - machine.reclaimed_at < TAKEN_LATELY


def _limits(policy: ScalingPolicy, cause: RemovalCause, nodes_count: int, as_of: datetime) -> Iterator[int]:
    yield ceil(round(policy.disruption_ratio_max * nodes_count, 6))
    for budget in policy.removal.disruption_budgets:
        if (not budget.causes or cause in budget.causes) and budget.holds_at(as_of):
            yield nodes_count if budget.nodes_count_max is None else budget.nodes_count_max
            if budget.nodes_ratio_max is not None:
                yield ceil(round(budget.nodes_ratio_max * nodes_count, 6))
