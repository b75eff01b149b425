"""Inputs of a plan, for skipping ticks that would publish nothing new.

State is compared by identity, as `fold` keeps unchanged parts; telemetry by what a plan derives from it, as every
window differs. Time is compared by the next instant at which a comparison changes (`deadlines.py`). Differential runs
with and without skipping verify equal facts (`simulation.run_differential`) and reveal forgotten inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from operator import is_
from typing import ClassVar

from gpu_autoscaler.core.disruption.gpu_health import gpu_evidence, is_suspect
from gpu_autoscaler.core.disruption.idle_jobs import idle_job_cancellations
from gpu_autoscaler.core.disruption.utilization import fleet_utilization
from gpu_autoscaler.core.limits.spend import slot, spend_caps
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.core.state.telemetry_history import since_at_most
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.sim.tick_skipping.deadlines import (
    Deadlines,
    instances_missing,
    next_deadline,
    plan_deadlines,
    schedule_deadlines,
    schedules_of,
    telemetry_deadlines,
)

_OF_JOBS = tuple(name for name in JobRecord.__struct_fields__ if name not in ("estimated", "scored"))


def plan_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """Return the inputs of a plan: state, freshness, and deadlines."""
    return (_PlanInputs(view.state, policy, now),)


def queue_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """Return the inputs of the schedule: the queue and capacity, without prices, spend and utilization."""
    return (_QueueInputs(view.state, policy, now),)


class _Inputs(ABC):
    """Inputs of one tick; equal to those of a later tick that would publish nothing new."""

    __hash__ = None  # type: ignore[assignment]  # never looked up
    state_fields: ClassVar[tuple[str, ...]]  # fields of the state

    def __init__(self, state: ClusterState, policy: ScalingPolicy, now: datetime) -> None:
        self.state = state
        self.policy = policy
        self.now = now

    def __eq__(self, earlier: object) -> bool:
        """True if the earlier tick `other` has published all that this one would."""
        if not isinstance(earlier, _Inputs) or self.policy is not earlier.policy:
            return False
        return (
            all(map(is_, self.state_values, earlier.state_values))
            and _jobs_equal(self.state.jobs, earlier.state.jobs)
            and self.now < earlier.until
            and self._seen == earlier._seen
            and self._missing_equal(earlier)
        )

    @cached_property
    def state_values(self) -> tuple[object, ...]:
        """State compared by identity."""
        return tuple(getattr(self.state, name) for name in self.state_fields)

    @cached_property
    def until(self) -> datetime:
        """The next instant at which a comparison changes."""
        return next_deadline(self._turns(), self.now)

    @abstractmethod
    def _turns(self) -> Deadlines: ...

    @cached_property
    def _seen(self) -> tuple[object, ...]:
        """Inputs derived from time, or compared by value."""
        stale = stale_watch(self.state, self.policy, self.now)
        return (None if stale is None else stale.source,)

    def _missing_equal(self, earlier: "_Inputs") -> bool:
        ours, theirs = self.state, earlier.state
        if (
            ours.instances_listed_at is theirs.instances_listed_at
            and ours.instances_seen_at is theirs.instances_seen_at
        ):
            return True
        return instances_missing(ours) == instances_missing(theirs)


class _QueueInputs(_Inputs):
    state_fields = (
        "pods", "nodes", "nodes_gone", "usable", "orders", "drains", "instances", "notices",
        "rebalance_recommended_at", "reported_demand",
    )  # fmt: skip

    def _turns(self) -> Deadlines:
        return schedule_deadlines(self.state, self.policy)


class _PlanInputs(_Inputs):
    state_fields = (
        "pods", "nodes", "busy_until", "usable", "unhealthy_since", "orders", "drains", "instances",
        "budgets", "nodes_gone", "notices", "rebalance_recommended_at", "spot_terminations", "directives",
        "policy_documents", "gangs", "observed_allocatable", "reported_demand", "demand_history", "forecast_scores",
    )  # fmt: skip

    def __eq__(self, earlier: object) -> bool:
        """See `_Inputs`; with equal telemetry findings the earlier tick also covers the new telemetry."""
        if not isinstance(earlier, _PlanInputs) or not super().__eq__(earlier):
            return False
        if not _offers_equal(self.state.offers, earlier.state.offers):
            return False
        if (
            self.state.telemetry_history is earlier.state.telemetry_history
            and self.state.telemetry is earlier.state.telemetry
        ):
            return self.now < earlier._telemetry_until
        if self._telemetry_findings is None or self._telemetry_findings != earlier._telemetry_findings:
            return False
        earlier.state, earlier.now = self.state, self.now  # the comparison moves on: nothing has changed since
        earlier.__dict__.pop("_telemetry_until", None)
        return True

    __hash__ = None

    def _turns(self) -> Deadlines:
        return plan_deadlines(self.state, self.policy, self.now)

    @cached_property
    def _telemetry_until(self) -> datetime:
        return next_deadline(telemetry_deadlines(self.state, self.policy), self.now)

    @cached_property
    def _seen(self) -> tuple[object, ...]:
        state, policy, now = self.state, self.policy, self.now
        stale = stale_watch(state, policy, now)
        return (
            None if stale is None else stale.source,
            stale_instances(state, policy, now) is None,
            state.last_plan_sequence,
            state.restored_at,
            schedules_of(policy).at(now),
            hour(now) if state.spot_terminations else None,  # the weight of a lost spot node falls with each hour
            _spend_inputs(state, now) if spend_caps(policy) else None,
        )

    @cached_property
    def _telemetry_findings(self) -> object:
        """What a plan derives from telemetry; None: an idle job must be canceled now."""
        state, policy, now = self.state, self.policy, self.now
        if not state.telemetry_history:
            return ()
        if idle_job_cancellations(state, policy, now):
            return None
        rules, health = policy.utilization, policy.removal.gpu_health
        utilization = fleet_utilization(node_views(state, now), pods_by_node(state), state, rules, now)
        is_high = utilization.busy_ratio is not None and utilization.busy_ratio > rules.high_ratio
        low_from = now - timedelta(seconds=rules.low_seconds)
        low_since = {
            uid: since_at_most(trail.utilization, rules.low_ratio * 100) for uid, trail in utilization.trusted.items()
        }
        suspects = {uid: trail for uid, trail in state.telemetry_history.items() if is_suspect(trail, health)}
        return (
            utilization.fault,
            is_high,
            utilization.busiest_model if is_high else None,
            {
                uid
                for uid, since in low_since.items()
                if since and since <= low_from and utilization.trusted[uid].busy_ratio
            },
            {uid: gpu_evidence(trail, health, now) for uid, trail in suspects.items()},
        )


def _spend_inputs(state: ClusterState, now: datetime) -> tuple[object, ...]:
    """Identify the spend inputs. Both states are alive while compared, so ids are unique."""
    return (slot(now), id(state.spent), id(state.charges), state.ledger_reported_at)


def _jobs_equal(jobs: Mapping[JobId, JobRecord], before: Mapping[JobId, JobRecord]) -> bool:
    """True if the records differ only in estimates and scores, which decide nothing."""
    if jobs is before:
        return True
    pairs = zip(jobs.values(), before.values(), strict=False)
    return len(jobs) == len(before) and all(
        job is earlier or all(getattr(job, name) is getattr(earlier, name) for name in _OF_JOBS)
        for job, earlier in pairs
    )


def _offers_equal(offers: SpotOffersSampled | None, before: SpotOffersSampled | None) -> bool:
    """True if a new sample has the offers and prices of the last one."""
    if offers is None or before is None:
        return offers is before
    return offers.offers is before.offers or offers.offers == before.offers
