"""Inputs of a plan, for skipping ticks that would publish nothing new.

State is compared by identity, as `fold` keeps unchanged parts; telemetry by what a plan derives from it, as every
window differs. Time is compared by the next instant at which a comparison changes (`Deadlines`). Differential runs
with and without skipping verify equal facts (`simulation.run_differential`) and reveal forgotten inputs.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cached_property
from operator import is_
from typing import ClassVar

from gpu_autoscaler.core.disruption.drift import expires_at
from gpu_autoscaler.core.disruption.eligibility import expected_end, reason_to_wait
from gpu_autoscaler.core.disruption.emptiness import idle_seconds_allowed
from gpu_autoscaler.core.disruption.gpu_health import gpu_evidence, is_suspect
from gpu_autoscaler.core.disruption.idle_jobs import idle_job_cancellations
from gpu_autoscaler.core.disruption.protection import protected_until
from gpu_autoscaler.core.disruption.utilization import fleet_utilization
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.limits.spend import slot, spend_caps
from gpu_autoscaler.core.nodes.correlation import INSTANCE_MISSING_SECONDS_MAX
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.pools import removal_cooldown_seconds
from gpu_autoscaler.core.provisioning.batching import BRAKED_PLAN_INTERVAL_MAX, PLAN_INTERVAL_MAX
from gpu_autoscaler.core.provisioning.expected_capacity import certain_ends as ends_of_work
from gpu_autoscaler.core.provisioning.gangs import retried_at
from gpu_autoscaler.core.provisioning.unavailable_offers import unavailable_scopes
from gpu_autoscaler.core.state.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.node_shortfalls import RETENTION_SECONDS
from gpu_autoscaler.core.state.queries import counts_for_idleness, is_waiting, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, GangRecord, JobRecord, OrderRecord, Usable
from gpu_autoscaler.core.state.telemetry_history import (
    GAP_SECONDS_MAX,
    GpuTelemetryHistory,
    NodeTelemetryHistory,
    since_at_most,
)
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PodUid, ProviderId
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.runtime.projection import StateView

Deadlines = tuple[list[datetime], ...]  # each list sorted

_NEVER = datetime.max.replace(tzinfo=UTC)
_FIRST = datetime.min.replace(tzinfo=UTC)
_LAST = _NEVER - timedelta(days=1)  # durations can be added to it
_AFTER = timedelta(microseconds=1)


def next_deadline(deadlines: Deadlines, now: datetime) -> datetime:
    """Return the next instant. An instant equal to now is still ahead: some comparisons change right after it."""
    result = _NEVER
    for instants in deadlines:
        place = bisect_left(instants, now)
        if place < len(instants) and instants[place] < result:
            result = instants[place]
    return max(result, now + _AFTER)


def schedule_deadlines(state: ClusterState, policy: ScalingPolicy) -> Deadlines:
    """Return the deadlines of the schedule: late orders, expired hints, and the end of spot back-offs."""
    recommended_at = state.rebalance_recommended_at.values()
    return (
        _deadlines(state.orders),
        sorted(at + timedelta(seconds=policy.spot.rebalance_avoid_seconds) for at in recommended_at),
        sorted(record.reported.until for record in state.reported_demand.values()),
        _spot_backoffs(policy, state.jobs),
    )


def plan_deadlines(state: ClusterState, policy: ScalingPolicy, now: datetime) -> Deadlines:
    """Return the deadlines of a plan, without those of telemetry."""
    retention = timedelta(seconds=RETENTION_SECONDS)
    return (
        *schedule_deadlines(state, policy),
        _idle(policy, node_views(state, now), state.usable),
        _orders(policy, state.orders, state.instances, state.gangs),
        _removals(policy, state.drains),
        _renewals(policy, state.nodes, state.usable, state.unhealthy_since),
        sorted(record.given.until for record in state.directives.values()),
        _periods(policy, state.offers),
        _waits(policy, state.pods, state.jobs),
        _moves(policy, state.pods, state.jobs, state.nodes),
        sorted(shortfall.gone_at + retention for shortfall in state.observed_allocatable.values()),
        sorted({record.retry_at for record in state.rejections.values()}),
        [] if state.last_plan_at is None else [state.last_plan_at + _plan_interval_max(state)],
    )


def _plan_interval_max(state: ClusterState) -> timedelta:
    return PLAN_INTERVAL_MAX if state.brake is None else BRAKED_PLAN_INTERVAL_MAX


def telemetry_deadlines(state: ClusterState, policy: ScalingPolicy) -> Deadlines:
    """Return the deadlines at which telemetry may change a plan or end a job."""
    return (_telemetry(policy, state.usable, state.telemetry_history),)


def instances_missing(state: ClusterState) -> frozenset[str]:
    """Return the instances missing from the cloud's lists for longer than lists may lag."""
    if state.instances_listed_at is None:
        return frozenset()
    return _missing_instances(state.instances_seen_at, state.orders, state.instances_listed_at)


class PolicySchedules:
    """The schedules of a policy. They start and end at whole minutes."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._last: tuple[int, object] = (-1, None)  # the last minute and its result

    def at(self, now: datetime) -> object:
        """Return the schedules active in this minute; with a forecast every minute differs."""
        minute = int(now.timestamp()) // 60
        if self._last[0] != minute:
            self._last = (minute, self._active(now.replace(second=0, microsecond=0), minute))
        return self._last[1]

    def _active(self, now: datetime, minute: int) -> object:
        policy = self._policy
        return (
            minute if policy.forecast.is_on else None,
            tuple(headroom.is_active(now, timedelta(seconds=headroom.lead_seconds)) for headroom in policy.headrooms),
            tuple(limit.is_active(now, timedelta(seconds=limit.lead_seconds)) for limit in policy.scheduled_limits),
            tuple(limit.is_active(now) for limit in policy.scheduled_limits),
            tuple(rule.is_active(now) for rule in policy.removal.disruption_budgets if not any(rule.violations())),
        )


schedules_of = cached_by_identity(8)(PolicySchedules)


# ---- of plans and of the queue


@cached_by_identity(8)
def _deadlines(orders: Mapping[ActionId, OrderRecord]) -> list[datetime]:
    """Return the deadlines of orders."""
    orders_known = (order.decision or order.ordered for order in orders.values() if order.terminated is None)
    return sorted(order.deadline_at for order in orders_known if order is not None)


@cached_by_identity(8)
def _spot_backoffs(policy: ScalingPolicy, jobs: Mapping[JobId, JobRecord]) -> list[datetime]:
    """Return when interrupted jobs may run on spot again."""
    waits = timedelta(seconds=policy.spot.on_demand_wait_seconds)
    lost = (job.preempted for job in jobs.values() if job.finished is None)
    return sorted(preempted.preempted_at + waits for preempted in lost if preempted is not None)


# ---- of plans only


@cached_by_identity(8)
def _idle(policy: ScalingPolicy, views: tuple[NodeView, ...], usables: Mapping[NodeUid, Usable]) -> list[datetime]:
    """Return when empty nodes reach their idle time, and nodes the minimum age of a voluntary removal."""
    minimum_age = timedelta(seconds=policy.scale_down_cooldown_seconds)
    return_age = timedelta(seconds=max(policy.spot.return_to_spot_seconds_min, policy.scale_down_cooldown_seconds))
    deadlines = [usable.since + after for usable in usables.values() for after in (minimum_age, return_age)]
    for view in views:
        if view.empty_since is not None:
            idle_seconds = {policy.idle_seconds_max, idle_seconds_allowed(view, policy)}
            deadlines += [view.empty_since + timedelta(seconds=seconds) for seconds in idle_seconds]
    return sorted(deadlines)


@cached_by_identity(8)
def _orders(
    policy: ScalingPolicy,
    orders: Mapping[ActionId, OrderRecord],
    instances: Mapping[ProviderId, NodeInstanceObserved],
    gangs: Mapping[str, GangRecord],
) -> list[datetime]:
    """Return when refusals end, the next purchase is allowed, a node may be replaced again, and gangs are retried or
    time out.
    """
    cooldown = timedelta(seconds=policy.limits.scale_up_cooldown_seconds)
    deadlines = [refusal.until for refusal in unavailable_scopes(orders, instances).values()]
    deadlines += [retried_at(record, policy.gangs) for record in gangs.values()]
    for order in orders.values():
        if order.planned_at is None:
            continue
        if cooldown:
            deadlines.append(order.planned_at + cooldown)
        if order.decision is not None and isinstance(order.decision.reason, ReplacesNodes):
            deadlines.append(order.planned_at + timedelta(seconds=policy.removal.replacement_cooldown_seconds))
        if order.decision is not None and order.decision.gang is not None:
            deadlines.append(order.planned_at + timedelta(seconds=policy.gangs.complete_seconds_max))
        if policy.utilization_trigger == "direct":
            deadlines.append(order.planned_at + timedelta(seconds=policy.utilization.cooldown_seconds))
    return sorted(deadlines)


@cached_by_identity(8)
def _removals(policy: ScalingPolicy, drains: Mapping[ActionId, DrainRecord]) -> list[datetime]:
    """Return when a canceled drain may be retried, and when the scale-down cool-down ends."""
    retry_after = timedelta(seconds=policy.removal.drain_retry_seconds)
    cooldown = timedelta(seconds=policy.scale_down_cooldown_seconds)
    pool_cooldowns = {timedelta(seconds=removal_cooldown_seconds(policy, pool.name)) for pool in policy.pools}
    planned = [drain.planned_at for drain in drains.values() if drain.planned_at is not None]
    retries = (drain.cancelled.cancelled_at + retry_after for drain in drains.values() if drain.cancelled is not None)
    return sorted([*retries, *(at + pause for at in planned for pause in (cooldown, *pool_cooldowns))])


@cached_by_identity(8)
def _renewals(
    policy: ScalingPolicy,
    nodes: Mapping[NodeUid, NodeObserved],
    usables: Mapping[NodeUid, Usable],
    unhealthy_since: Mapping[NodeUid, datetime],
) -> list[datetime]:
    """Return when a node is due for replacement: by age, health or price."""
    rules = policy.removal
    deadlines = [since + timedelta(seconds=rules.unhealthy_seconds_max) for since in unhealthy_since.values()]
    for node in nodes.values():
        due_at = expires_at(node.name, node.created_at, policy)
        if due_at is not None:
            deadlines += [due_at, due_at + timedelta(seconds=rules.expire_grace_seconds)]
    minimum_age = timedelta(seconds=max(rules.replacement_payback_hours * 3600.0, policy.scale_down_cooldown_seconds))
    return sorted([*deadlines, *(usable.since + minimum_age for usable in usables.values())])


@cached_by_identity(8)
def _periods(policy: ScalingPolicy, sampled: SpotOffersSampled | None) -> list[datetime]:
    """Return when paid periods start, and when they are too near their end for purchases."""
    deadlines: list[datetime] = []
    for offer in () if sampled is None else sampled.offers:
        if offer.paid_from is not None:
            deadlines.append(offer.paid_from)
        if offer.paid_until is not None:
            deadlines.append(
                offer.paid_until - timedelta(seconds=policy.reservation_drain_seconds + offer.boot_seconds)
            )
    return sorted(deadlines)


@cached_by_identity(8)
def _waits(
    policy: ScalingPolicy, pods: Mapping[PodUid, PodObserved], jobs: Mapping[JobId, JobRecord]
) -> list[datetime]:
    """Return when work with a known end ends, when that end is near enough to wait for, when waits for spot end, when
    a burst is over, and when its first members have waited long enough. Nothing waiting: none.
    """
    pending = [pod for pod in pods.values() if pod.node_name is None]
    queued = [job.queued.queued_at for job in jobs.values() if job.queued is not None and is_waiting(job)]
    if not pending and not queued:
        return []
    longest = timedelta(seconds=max(policy.pending_pod_timeout_seconds, policy.queued_timeout_seconds))
    deadlines = [at - before for at in ends_of_work(pods, jobs) for before in (longest, timedelta()) if longest]
    for_spot = timedelta(seconds=policy.spot.low_priority_wait_seconds)
    waiting = [*queued, *(pod.unschedulable_since or pod.created_at for pod in pending)]
    deadlines += [since + for_spot for since in waiting if for_spot]
    quiet, burst = policy.batching.quiet_seconds, policy.batching.wait_seconds_max
    waits = [timedelta(seconds=seconds) for seconds in (-quiet, quiet, burst, burst + quiet) if burst]
    return sorted(
        [*deadlines, *(at + wait for at in (*queued, *(pod.created_at for pod in pending)) for wait in waits)]
    )


@cached_by_identity(8)
def _moves(
    policy: ScalingPolicy,
    pods: Mapping[PodUid, PodObserved],
    jobs: Mapping[JobId, JobRecord],
    nodes: Mapping[NodeUid, NodeObserved],
) -> list[datetime]:
    """Return when a pod has run long enough to be moved, when its end is too near to move it, and when protections
    expire.
    """
    rules = policy.removal.protection
    minimum_run, remaining = timedelta(seconds=rules.run_seconds_min), timedelta(seconds=rules.ending_soon_seconds)
    deadlines: list[datetime | None] = [
        protected_until(dict(node.annotations), node.created_at) for node in nodes.values() if node.annotations
    ]
    for pod in pods.values():
        if pod.node_name is None or not counts_for_idleness(pod):
            continue
        if pod.annotations:
            deadlines.append(protected_until(dict(pod.annotations), pod.started_at or pod.created_at))
        job = None if pod.job_id is None else jobs.get(pod.job_id)
        if reason_to_wait(pod, job, rules, policy.job_retries_count_max, _LAST) is not None:
            continue  # never movable
        ends_at = expected_end(pod, job)
        deadlines.append(None if pod.started_at is None else pod.started_at + minimum_run)
        deadlines += [] if ends_at is None else [ends_at, ends_at - remaining]
    return sorted(at for at in deadlines if at is not None)


# ---- of telemetry


@cached_by_identity(8)
def _telemetry(
    policy: ScalingPolicy, usables: Mapping[NodeUid, Usable], trails: Mapping[NodeUid, NodeTelemetryHistory]
) -> list[datetime]:
    """Return when nodes count as silent, when nodes and jobs have been underused long enough, and when evidence of a
    GPU fault is sufficient or out of date.
    """
    rules, idle, health = policy.utilization, policy.idle_jobs, policy.removal.gpu_health
    silent = timedelta(seconds=rules.telemetry_age_seconds_max)
    deadlines = [usable.since + silent for usable in usables.values()]
    for trail in trails.values():
        deadlines.append(trail.seen_until + silent)
        low_since = since_at_most(trail.utilization, rules.low_ratio * 100)
        if low_since is not None:
            deadlines.append(low_since + timedelta(seconds=rules.low_seconds))
        if idle.is_on:
            gpus = (gpu for gpu in trail.gpus if gpu.pod is not None)
            sinces = (since_at_most(gpu.utilization, idle.busy_ratio_max * 100) for gpu in gpus)
            deadlines += [since + timedelta(seconds=idle.idle_seconds) for since in sinces if since is not None]
        if is_suspect(trail, health):
            deadlines.append(trail.seen_until + timedelta(seconds=GAP_SECONDS_MAX))
            evidence = timedelta(seconds=health.evidence_seconds)
            deadlines += [since + evidence for gpu in trail.gpus for since in _error_times(gpu)]
    return sorted(deadlines)


def _error_times(gpu: GpuTelemetryHistory) -> Iterator[datetime]:
    yield from (since for _, since in gpu.xids)
    yield from (since for _, since in gpu.negated_celsius)
    yield from (since for since in (gpu.row_remap_failed_since, gpu.double_bit_since) if since is not None)


# ---- instances


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
        "rejections", "brake", "brake_releases",
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
