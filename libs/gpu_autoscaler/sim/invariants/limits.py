"""Invariants of limits: machines stay within the policy's limits, voluntary removals within its disruption budgets.

Independent of the plan's own counts and those of the plan check, which are thereby tested.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from math import ceil

from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import CancelDrain, DrainNode, Plan
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons.drain import NodeDrifted, NodeExpired, NodeIdle, NodeUnderused
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.invariants import LIMITS_KEPT, REMOVAL_PACE


class LimitsInvariant:
    """Counts machines by cluster, pool, zone and project."""

    def __init__(self, cloud: Cloud, policies: Policies, report: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._policies = policies
        self._report = report

    def on_launch(self, machine: Machine) -> None:
        """A machine was launched. Late launches of calls that timed out are not counted."""
        policy = self._policies.now
        machines = [
            machine
            for machine in self._cloud.machines
            if machine.is_ordered and not machine.was_delayed and machine.state != "terminated"
        ]
        self._check("the cluster", machines, policy.nodes_count_max, policy.gpu_count_max)
        for kind, limited in (
            ("pool", policy.pools),
            ("zone", policy.limits.zones),
            ("project", policy.limits.projects),
        ):
            for part in limited:
                if _part(machine, kind) == part.name:
                    counted = [machine for machine in machines if _part(machine, kind) == part.name]
                    self._check(f"{kind} {part.name}", counted, part.nodes_count_max, part.gpu_count_max)
        price_max = policy.price_micro_usd_per_hour_max
        price = sum(_price_micro_usd_per_hour(machine) for machine in machines)
        if price_max is not None and price > price_max:
            self._report(LIMITS_KEPT, f"{price} micro-dollars per hour, the policy allows {price_max}")

    def _check(self, where: str, counted: Sequence[Machine], nodes_max: int | None, gpus_max: int | None) -> None:
        if nodes_max is not None and len(counted) > nodes_max:
            self._report(LIMITS_KEPT, f"{len(counted)} machines in {where}, the policy allows {nodes_max}")
        gpu_count = sum(machine.offer.resources.gpu_count for machine in counted)
        if gpus_max is not None and gpu_count > gpus_max:
            self._report(LIMITS_KEPT, f"{gpu_count} GPUs in {where}, the policy allows {gpus_max}")


def _price_micro_usd_per_hour(machine: Machine) -> int:
    """Return the lower of the prices at the order and at the launch: a plan may know either."""
    return min(machine.offer.price_micro_usd_per_hour or 0, machine.price_micro_usd_per_hour)


def _part(machine: Machine, kind: str) -> str | None:
    parts = {"pool": machine.order.pool, "zone": machine.offer.zone}
    return parts.get(kind) or dict(machine.order.labels).get(labels.PROJECT_ID)


# Invariant: the number of voluntary removals at a time is within the policy's disruption budgets. Independent
# of the plan's own count and that of the plan check, which are thereby tested.

ENDED_RECENTLY = timedelta(seconds=60)  # until every process knows that a machine has ended
RECLAIMED_RECENTLY = timedelta(seconds=300)
_CAUSES: dict[type[object], RemovalCause] = {
    NodeIdle: RemovalCause.EMPTY,
    NodeUnderused: RemovalCause.UNDERUSED,
    NodeExpired: RemovalCause.EXPIRED,
    NodeDrifted: RemovalCause.DRIFTED,
}


class RemovalPaceInvariant:
    """Tracks nodes that are being removed voluntarily."""

    def __init__(self, cloud: Cloud, policies: Policies, report: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._policies = policies
        self._report = report
        self._draining: set[str] = set()  # node names
        self._bought: dict[ActionId, datetime] = {}  # and the launch deadline of each order

    def drain_ended(self, node_name: str) -> None:
        """The drain ended or was canceled."""
        self._draining.discard(node_name)

    def on_plan(self, plan: Plan, policy_digest: str, now: datetime, *, is_calm: bool) -> None:
        """A plan was published. With faults it may use stale data and is only recorded."""
        for decision in plan.decisions:
            if isinstance(decision, CancelDrain):
                self.drain_ended(decision.node_name)
        drains = [drain for drain in plan.drains if drain.is_voluntary]
        earlier = {drain for drain in self._draining if self._is_alive(drain)}
        self._draining = earlier | {drain.node_name for drain in drains if self._is_alive(drain.node_name)}
        policy = self._policies.by_digest[policy_digest]
        self._check_minimum(plan, policy, now, is_calm=is_calm)
        if is_calm:
            self._check_pace(drains, earlier, policy, plan.as_of, now)

    def _check_pace(
        self, drains: Sequence[DrainNode], earlier: set[str], policy: ScalingPolicy, as_of: datetime, now: datetime
    ) -> None:
        """Each removal respects the limits of its own cause; removals with the strictest limits are counted first."""
        nodes_count = sum(
            machine.is_ordered and (machine.terminated_at is None or now - machine.terminated_at < ENDED_RECENTLY)
            for machine in self._cloud.machines
        )
        causes = [cause for drain in drains if (cause := _CAUSES.get(type(drain.reason))) is not None]
        limits = sorted((min(_limits(policy, cause, nodes_count, as_of)), cause) for cause in causes)
        other_names = earlier - {drain.node_name for drain in drains}
        for draining_count, (limit, cause) in enumerate(limits, start=len(other_names) + 1):
            if draining_count > limit:
                self._report(
                    REMOVAL_PACE, f"{sorted(self._draining)} drain at once, one as {cause}; the policy allows {limit}"
                )
                return

    def _is_alive(self, node_name: str) -> bool:
        machine = self._cloud.of_node(node_name)
        return machine is not None and machine.is_alive

    def _check_minimum(self, plan: Plan, policy: ScalingPolicy, now: datetime, *, is_calm: bool) -> None:
        """No idle node is removed below the minimum, orders included."""
        self._bought |= {decision.action_id: decision.deadline_at for decision in plan.purchases}
        idle = [decision for decision in plan.drains if isinstance(decision.reason, NodeIdle)]
        if not idle or not is_calm:
            return
        alive = [
            decision
            for decision in self._cloud.machines
            if decision.is_ordered and (decision.is_alive or _is_reclaimed_recently(decision, now))
        ]
        on_launch = {decision.order.action_id for decision in self._cloud.machines}
        launching = [key for key, until in self._bought.items() if until > plan.as_of and key not in on_launch]
        remaining_count = sum(decision.node_name not in self._draining for decision in alive) + len(launching)
        if remaining_count < policy.nodes_count_min:
            what = (
                f"{idle[0].node_name} drains as idle, {remaining_count} remain; the minimum is {policy.nodes_count_min}"
            )
            self._report(REMOVAL_PACE, what)
        for pool in policy.pools:
            self._check_pool_minimum(pool, idle, alive, launching)

    def _check_pool_minimum(
        self, pool: NodePool, idle: Sequence[DrainNode], alive: Sequence[Machine], launching: Sequence[ActionId]
    ) -> None:
        """The same for one pool. Every order counts for each pool, as its pool is not known here."""
        pool_machines = [drain for drain in alive if drain.order.pool == pool.name]
        drained_names = {drain.node_name for drain in idle} & {drain.node_name for drain in pool_machines}
        remaining_count = sum(drain.node_name not in self._draining for drain in pool_machines) + len(launching)
        if drained_names and remaining_count < pool.nodes_count_min:
            what = f"{min(drained_names)} drains as idle, {remaining_count} remain in pool {pool.name}"
            self._report(REMOVAL_PACE, f"{what}; its minimum is {pool.nodes_count_min}")


def _is_reclaimed_recently(machine: Machine, now: datetime) -> bool:
    """True for a machine whose reclaim may not be known to every process yet."""
    return machine.reclaimed_at is not None and now - machine.reclaimed_at < RECLAIMED_RECENTLY


def _limits(policy: ScalingPolicy, cause: RemovalCause, nodes_count: int, as_of: datetime) -> Iterator[int]:
    yield ceil(round(policy.disruption_ratio_max * nodes_count, 6))
    for budget in policy.removal.disruption_budgets:
        if (not budget.causes or cause in budget.causes) and budget.is_active(as_of):
            yield nodes_count if budget.nodes_count_max is None else budget.nodes_count_max
            if budget.nodes_ratio_max is not None:
                yield ceil(round(budget.nodes_ratio_max * nodes_count, 6))
