"""Invariant: no more nodes with work are removed by force within an hour than the brake allows, without a resume.

Counted from the plans and the true machines; nothing is excused by faults, because each plan knows the earlier ones.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from math import ceil
from typing import NamedTuple

from gpu_autoscaler.core.policy.disruption_settings import BrakePolicy
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.policy import PolicyDirectiveLifted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import AnyDecision, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.drain import NodeDeleted, NodeLost, NodeOrphaned, SpotReclaim
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.invariants import BRAKE_HOLDS

_HOUR = timedelta(hours=1)
# A pod that started this long before the plan was known to it. Older knowledge is a matter of other invariants.
_KNOWN = timedelta(seconds=90)


class _Removal(NamedTuple):
    at: datetime
    name: str
    price_micro_usd_per_hour: int


class BrakeInvariant:
    """Tracks removals by force since the last resume."""

    def __init__(self, cloud: Cloud, policies: Policies, report: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._policies = policies
        self._report = report
        self._removals: list[_Removal] = []
        self._tripped_at: Instant | None = None
        self._resumed: set[Instant] = set()  # trips that somebody ended

    @property
    def is_tripped(self) -> bool:
        """True while removals by force wait for a person."""
        return self._tripped_at is not None

    def streams_lost(self) -> None:
        """The last plan may be lost before it is stored, and with it the trip and what it removed."""
        self._removals.clear()
        self._resumed.clear()
        self._tripped_at = None

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        fact = recorded.fact
        if isinstance(fact, PolicyDirectiveLifted) and fact.tripped_at is not None:
            self._resumed.add(fact.tripped_at)
            if fact.tripped_at == self._tripped_at:
                self._tripped_at = None
                self._removals.clear()
        elif isinstance(fact, ScalingPlanMade):
            self._on_plan(fact.plan, self._policies.by_digest[fact.policy_digest].removal.brake)

    def _on_plan(self, plan: Plan, rules: BrakePolicy) -> None:
        forced = [removal for decision in plan.decisions if (removal := self._forced(decision, plan.as_of)) is not None]
        if not rules.is_on:
            self._tripped_at = None
            return
        if forced and self._tripped_at is not None:
            self._report(BRAKE_HOLDS, f"{forced[0].name} is removed by force, and nobody has resumed")
        if plan.brake is not None and plan.brake.tripped_at not in self._resumed:
            self._tripped_at = plan.brake.tripped_at
        self._removals = [removal for removal in self._removals if removal.at > plan.as_of - _HOUR] + forced
        if not forced:
            return
        names = sorted(removal.name for removal in self._removals)
        price = sum(removal.price_micro_usd_per_hour for removal in self._removals)
        if len(names) > self._nodes_count_max(rules, plan.as_of):
            self._report(BRAKE_HOLDS, f"{', '.join(names)} are removed by force within an hour")
        if price > rules.price_micro_usd_per_hour_max:
            self._report(BRAKE_HOLDS, f"{', '.join(names)} of {price} micro-dollars an hour are removed by force")

    def _nodes_count_max(self, rules: BrakePolicy, as_of: datetime) -> int:
        """Return the limit for all machines that were there within the hour; a plan may know fewer."""
        there = sum(
            machine.is_ordered and (machine.terminated_at is None or machine.terminated_at > as_of - _HOUR)
            for machine in self._cloud.machines
        )
        return max(rules.nodes_ok_count, ceil(round(rules.nodes_ratio_max * there, 6)))

    def _forced(self, decision: AnyDecision, as_of: datetime) -> _Removal | None:
        """Return the removal if it ends work, and neither the cloud nor a user caused it."""
        match decision:
            case DrainNode(is_voluntary=False, reason=reason) if not isinstance(reason, SpotReclaim | NodeDeleted):
                machine = self._cloud.of_node(decision.node_name)
                if machine is None or not self._has_known_work(machine, as_of):
                    return None
                return _Removal(as_of, decision.node_name, machine.price_micro_usd_per_hour or 0)
            case ReleaseInstance(provider_id=provider_id, reason=NodeLost() | NodeOrphaned()) if provider_id:
                machine = self._cloud.of_id(provider_id)
                if machine is None or not machine.is_alive or not self._has_known_work(machine, as_of):
                    return None
                return _Removal(as_of, machine.node_name, machine.price_micro_usd_per_hour or 0)
            case _:
                return None

    def _has_known_work(self, machine: Machine, as_of: datetime) -> bool:
        return any(
            pod.status.start_time is not None and as_of - pod.status.start_time > _KNOWN
            for pod in self._cloud.pods_on(machine)
        )
