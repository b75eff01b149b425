"""Facts that a plan depends on, for skipping ticks that would publish nothing new.

State is compared by identity, as `fold` keeps unchanged parts; telemetry by what a plan derives from it, as every
window differs. When time alone changes a plan is noted by the plan itself (`core/next_change.py`). Differential runs
with and without skipping verify equal facts (`simulation.run_differential`) and reveal forgotten inputs.
"""

from abc import ABC
from collections.abc import Hashable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from operator import attrgetter, is_
from typing import Any, ClassVar, Self, cast

from gpu_autoscaler.core.disruption.gpu_health import gpu_evidence, is_suspect
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.limits.spend import spend_caps
from gpu_autoscaler.core.next_change import TrackedInstant, has_lasted
from gpu_autoscaler.core.nodes.correlation import INSTANCE_MISSING_SECONDS_MAX
from gpu_autoscaler.core.nodes.fleet_utilization import fleet_utilization
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.placement.measured_use import measured_use
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.forecast_step import forecast_targets
from gpu_autoscaler.core.state.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, JobRecord, OrderRecord
from gpu_autoscaler.core.state.telemetry_history import since_at_most
from gpu_autoscaler.core.upkeep import due_upkeep
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import ActionId, JobId, ProviderId
from gpu_autoscaler.runtime.projection import StateView


def instances_missing(state: ClusterState) -> frozenset[str]:
    """Return the instances missing from the cloud's lists for longer than lists may lag."""
    if state.instances_listed_at is None:
        return frozenset()
    return _missing_instances(state.instances_seen_at, state.orders, state.instances_listed_at)


@cached_by_identity(8)
def _missing_instances(
    seen: Mapping[ProviderId, datetime], orders: Mapping[ActionId, OrderRecord], listed_at: datetime
) -> frozenset[str]:
    since = listed_at - timedelta(seconds=INSTANCE_MISSING_SECONDS_MAX)
    missing = {provider_id for provider_id, seen_at in seen.items() if seen_at < since}
    return frozenset(
        missing.union(provider_id for provider_id, at in _launched(orders) if at < since and provider_id not in seen)
    )


@cached_by_identity(8)
def _launched(orders: Mapping[ActionId, OrderRecord]) -> tuple[tuple[ProviderId, datetime], ...]:
    launches = (order.launched for order in orders.values())
    return tuple((launched.provider_id, launched.launched_at) for launched in launches if launched is not None)


# Fields of the state that are not compared by identity; a new field is. What a plan derives from them is compared
# below, or decides nothing by itself: what is gone, signs of life, and the places of plans in their stream.
APART = frozenset({
    "jobs", "telemetry", "telemetry_history", "offers", "demand_history", "forecast_scores", "durations",
    "spent", "charges", "spent_by_job", "ledger_reported_at", "instances_seen_at", "instances_listed_at",
    "pods_synced", "nodes_synced", "budgets_synced", "quotas_synced", "provisioning_synced", "newest",
    "pods_gone", "budgets_gone", "quotas_gone", "provisioning_gone", "last_plan_sequence", "last_plan_at",
})  # fmt: skip
_OF_JOBS = tuple(name for name in JobRecord.__struct_fields__ if name not in ("estimated", "scored", "run_scored"))


def plan_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """Return the inputs of a plan: state, freshness, and what telemetry shows."""
    return (_PlanInputs(view.state, policy, now),)


def queue_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """Return the inputs of the schedule: the queue, capacity and offers, without spend and utilization."""
    return (_QueueInputs(view.state, policy, now),)


class _Inputs(ABC):
    """Inputs of one tick; equal to those of a later tick that would publish nothing new, unless time changes it."""

    __hash__ = None  # type: ignore[assignment]  # never looked up
    fields_apart: ClassVar[frozenset[str]]  # fields of the state that are not compared by identity
    _compared: ClassVar["attrgetter[Any]"]
    # What time alone changes in the planned state, the plan has noted; in later states, it is noted by the comparison.
    _until: datetime | None = None

    def __init_subclass__(cls) -> None:
        """Determine the fields that are compared once: they are read at each tick."""
        cls._compared = attrgetter(*(name for name in ClusterState.__struct_fields__ if name not in cls.fields_apart))

    def __init__(self, state: ClusterState, policy: ScalingPolicy, now: datetime) -> None:
        self.state = self._covered = state  # `_covered`: the last state for which the tick has published all
        self.policy = policy
        self.now = now
        self._as_of = TrackedInstant.of(now)

    def __eq__(self, earlier: object) -> bool:
        """True if the earlier tick `other` has published all that this one would."""
        if not isinstance(earlier, _Inputs) or self.policy is not earlier.policy:
            return False
        if self.state is not earlier._covered or not self._is_before(earlier._until):
            if not self._equals(earlier):
                return False
            earlier._covered, earlier._until = self.state, self._as_of.next_change_at
        return True

    def _is_before(self, until: datetime | None) -> bool:
        return until is None or self.now < until

    def _equals(self, earlier: Self) -> bool:
        return (
            all(map(is_, self.state_values, earlier.state_values))
            and _jobs_equal(self.state.jobs, earlier._covered.jobs)
            and self._seen == earlier._seen
            and self._missing_equal(earlier)
        )

    @cached_property
    def state_values(self) -> tuple[object, ...]:
        """State compared by identity."""
        return cast("tuple[object, ...]", self._compared(self.state))

    @cached_property
    def _seen(self) -> tuple[object, ...]:
        """Inputs compared by value."""
        stale = stale_watch(self.state, self.policy, self._as_of)
        return (None if stale is None else stale.source,)

    def _missing_equal(self, earlier: Self) -> bool:
        ours, theirs = self.state, earlier._covered
        if (
            ours.instances_listed_at is theirs.instances_listed_at
            and ours.instances_seen_at is theirs.instances_seen_at
        ):
            return True
        return instances_missing(ours) == instances_missing(theirs)


class _QueueInputs(_Inputs):
    fields_apart = APART | {
        "busy_until", "unhealthy_since", "budgets", "spot_terminations", "directives", "policy_documents", "gangs",
        "rejections", "brake", "brake_releases",
    }  # fmt: skip

    def _equals(self, earlier: Self) -> bool:
        return super()._equals(earlier) and _offers_equal(self.state.offers, earlier.state.offers)


class _PlanInputs(_Inputs):
    fields_apart = APART

    def _equals(self, earlier: Self) -> bool:
        if not super()._equals(earlier) or not _offers_equal(self.state.offers, earlier.state.offers):
            return False
        covered = earlier._covered
        is_same = (
            self.state.telemetry_history is covered.telemetry_history and self.state.telemetry is covered.telemetry
        )
        if is_same and self._is_before(earlier._until):
            if earlier._until is not None:
                self._as_of.note(earlier._until)
            return True
        return bool(self._telemetry_findings == earlier._telemetry_findings)

    @cached_property
    def _seen(self) -> tuple[object, ...]:
        state, policy, as_of = self.state, self.policy, self._as_of
        stale = stale_watch(state, policy, as_of)
        return (
            None if stale is None else stale.source,
            stale_instances(state, policy, as_of) is None,
            _spend_inputs(state) if spend_caps(policy) else None,
            due_upkeep(state, policy, as_of),
            tuple(forecast_targets(state, policy, as_of)),
        )

    @cached_property
    def _telemetry_findings(self) -> object:
        """What a plan derives from telemetry."""
        state, policy, now = self.state, self.policy, self._as_of
        if not state.telemetry_history:
            return ()
        rules, health = policy.utilization, policy.removal.gpu_health
        utilization = fleet_utilization(
            node_views(state, now), pods_by_node(state), state.telemetry_history, rules, now
        )
        is_high = utilization.busy_ratio is not None and utilization.busy_ratio > rules.high_ratio
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
                if since and has_lasted(since, rules.low_seconds, now) and utilization.trusted[uid].busy_ratio
            },
            {uid: gpu_evidence(trail, health, now) for uid, trail in suspects.items()},
            measured_use(state, node_views(state, now), policy, now),
        )


def _spend_inputs(state: ClusterState) -> tuple[object, ...]:
    """Identify the spend inputs. Both states are alive while compared, so ids are unique."""
    return (id(state.spent), id(state.charges), state.ledger_reported_at)


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
