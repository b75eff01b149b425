"""What a plan depends on, so that a tick that would say nothing new need not be computed.

Knowledge is compared by identity, as `fold` keeps what did not change; of telemetry only what a plan makes of it, as
every window is another one. Time goes in as the next instant at which a comparison turns (`turns.py`). That runs with
and without skipping say the same facts is tested (`both_ways.py`): what is forgotten here shows there.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from operator import is_
from typing import ClassVar

from gpu_autoscaler.core.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.gpu_health import gpu_evidence, is_suspect
from gpu_autoscaler.core.hours import hour
from gpu_autoscaler.core.idle_jobs import idle_jobs_cancelled
from gpu_autoscaler.core.nodes.life import node_views
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.spending.money import spend_caps, slot
from gpu_autoscaler.core.state import ClusterState, JobRecord
from gpu_autoscaler.core.trails import since_at_most
from gpu_autoscaler.core.use import use_of
from gpu_autoscaler.core.views import pods_by_node
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.sim.turns import (
    Turns,
    calendar_of,
    instances_missing,
    next_turn,
    telemetry_turns,
    turns_of_plans,
    turns_of_the_queue,
)

_OF_JOBS = tuple(name for name in JobRecord.__struct_fields__ if name not in ("estimated", "scored"))


def plan_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """What a plan depends on: what is known, what is fresh, and which deadlines have passed."""
    return (_PlanInputs(view.state, policy, now),)


def queue_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """What the order of the queue depends on, and who of it starts: room, and nothing of prices, money and use."""
    return (_QueueInputs(view.state, policy, now),)


class _Inputs(ABC):
    """What one tick saw; equal to what a later one sees where that has nothing else to say."""

    __hash__ = None  # type: ignore[assignment]  # never looked up
    known: ClassVar[tuple[str, ...]]  # fields of the state

    def __init__(self, state: ClusterState, policy: ScalingPolicy, now: datetime) -> None:
        self.state = state
        self.policy = policy
        self.now = now

    def __eq__(self, other: object) -> bool:
        """True where `other`, which is the earlier one, has said all that there is to say."""
        if not isinstance(other, _Inputs) or self.policy is not other.policy:
            return False
        return (
            all(map(is_, self.records, other.records))
            and _say_the_same(self.state.jobs, other.state.jobs)
            and self.now < other.until
            and self._seen == other._seen
            and self._is_missing_the_same(other)
        )

    @cached_property
    def records(self) -> tuple[object, ...]:
        """All that is compared by identity."""
        return tuple(getattr(self.state, name) for name in self.known)

    @cached_property
    def until(self) -> datetime:
        """When a comparison turns next, if nothing else is said."""
        return next_turn(self._turns(), self.now)

    @abstractmethod
    def _turns(self) -> Turns: ...

    @cached_property
    def _seen(self) -> tuple[object, ...]:
        """What is read of time, or compared by value."""
        stale = stale_watch(self.state, self.policy, self.now)
        return (None if stale is None else stale.source,)

    def _is_missing_the_same(self, other: "_Inputs") -> bool:
        mine, theirs = self.state, other.state
        if (
            mine.instances_listed_at is theirs.instances_listed_at
            and mine.instances_seen_at is theirs.instances_seen_at
        ):
            return True
        return instances_missing(mine) == instances_missing(theirs)


class _QueueInputs(_Inputs):
    known = (
        "pods", "nodes", "nodes_gone", "usable", "orders", "drains", "instances", "notices", "rebalance_recommended_at", "reported_demand",
    )  # fmt: skip

    def _turns(self) -> Turns:
        return turns_of_the_queue(self.state, self.policy)


class _PlanInputs(_Inputs):
    known = (
        "pods", "nodes", "busy_until", "usable", "unhealthy_since", "orders", "drains", "instances",
        "budgets", "nodes_gone", "notices", "rebalance_recommended_at", "spot_terminations", "directives", "policy_documents", "gangs", "observed_allocatable",
        "reported_demand", "demand_history", "forecast_scores",
    )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        """As above; with telemetry that says what it said before, the earlier one has seen that as well."""
        if not isinstance(other, _PlanInputs) or not super().__eq__(other):
            return False
        if not _sell_the_same(self.state.offers, other.state.offers):
            return False
        if self.state.telemetry_history is other.state.telemetry_history and self.state.telemetry is other.state.telemetry:
            return self.now < other._telemetry_until
        if self._use is None or self._use != other._use:
            return False
        other.state, other.now = self.state, self.now  # as if it had been seen then: nothing has turned since
        other.__dict__.pop("_telemetry_until", None)
        return True

    __hash__ = None

    def _turns(self) -> Turns:
        return turns_of_plans(self.state, self.policy, self.now)

    @cached_property
    def _telemetry_until(self) -> datetime:
        return next_turn(telemetry_turns(self.state, self.policy), self.now)

    @cached_property
    def _seen(self) -> tuple[object, ...]:
        state, policy, now = self.state, self.policy, self.now
        stale = stale_watch(state, policy, now)
        return (
            None if stale is None else stale.source,
            stale_instances(state, policy, now) is None,
            state.last_plan_sequence,
            state.restored_at,
            calendar_of(policy).at(now),
            hour(now) if state.spot_terminations else None,  # what ended weighs less with each hour
            _money(state, now) if spend_caps(policy) else None,
        )

    @cached_property
    def _use(self) -> object:
        """What telemetry says that a plan may act on; None: a job is to end for it now."""
        state, policy, now = self.state, self.policy, self.now
        if not state.telemetry_history:
            return ()
        if idle_jobs_cancelled(state, policy, now):
            return None
        rules, health = policy.utilization, policy.removal.gpu_health
        use = use_of(node_views(state, now), pods_by_node(state), state, rules, now)
        is_high = use.busy_ratio is not None and use.busy_ratio > rules.high_ratio
        low_from = now - timedelta(seconds=rules.low_seconds)
        lows = {uid: since_at_most(trail.busy, rules.low_ratio * 100) for uid, trail in use.trusted.items()}
        suspects = {uid: trail for uid, trail in state.telemetry_history.items() if is_suspect(trail, health)}
        return (
            use.fault,
            is_high,
            use.busiest_model if is_high else None,
            {uid for uid, since in lows.items() if since and since <= low_from and use.trusted[uid].busy_ratio},
            {uid: gpu_evidence(trail, health, now) for uid, trail in suspects.items()},
        )


def _money(state: ClusterState, now: datetime) -> tuple[object, ...]:
    """What runs is spent, and charged later; both states live while they are compared, so no two share an identity."""
    return (slot(now), id(state.spent), id(state.charges), state.ledger_reported_at)


def _say_the_same(jobs: Mapping[JobId, JobRecord], before: Mapping[JobId, JobRecord]) -> bool:
    """True where the records differ in nothing but what was expected of jobs, which decides nothing."""
    if jobs is before:
        return True
    pairs = zip(jobs.values(), before.values(), strict=False)
    return len(jobs) == len(before) and all(
        one is other or all(getattr(one, name) is getattr(other, name) for name in _OF_JOBS) for one, other in pairs
    )


def _sell_the_same(offers: SpotOffersSampled | None, before: SpotOffersSampled | None) -> bool:
    """True where a new sample has the offers and prices of the last one."""
    if offers is None or before is None:
        return offers is before
    return offers.offers is before.offers or offers.offers == before.offers
