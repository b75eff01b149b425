"""The instants at which a comparison of the core with `as_of` turns, for as long as nothing else is said.

They mirror the core's comparisons; a new one belongs here as well. An instant too many costs one tick that says
nothing, one that is forgotten shows where runs are compared with those that skip no tick (`both_ways.py`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from gpu_autoscaler.core.buying.gangs import tried_again_at
from gpu_autoscaler.core.buying.refusals import refusals_of
from gpu_autoscaler.core.buying.soon import turns as ends_of_work
from gpu_autoscaler.core.gpu_health import is_suspect
from gpu_autoscaler.core.nodes.joins import INSTANCE_MISSING_SECONDS_MAX
from gpu_autoscaler.core.nodes.life import NodeView, node_views
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.core.removing.idling import idle_seconds_allowed
from gpu_autoscaler.core.removing.patience import expected_end, left_alone
from gpu_autoscaler.core.removing.protection import protected_until
from gpu_autoscaler.core.removing.wear import expires_at
from gpu_autoscaler.core.shortfalls import REMEMBERED_SECONDS, ObservedAllocatable
from gpu_autoscaler.core.state import (
    ClusterState,
    DirectiveRecord,
    DrainRecord,
    GangRecord,
    JobRecord,
    OrderRecord,
    Usable,
    ReportedDemandRecord,
)
from gpu_autoscaler.core.trails import GAP_SECONDS_MAX, GpuTelemetryHistory, NodeTelemetryHistory, since_at_most
from gpu_autoscaler.core.views import counts_for_idleness, is_waiting
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PodUid, ProviderId
from gpu_autoscaler.model.reasons import ReplacesNodes

Turns = tuple[list[datetime], ...]  # each in order

_NEVER = datetime.max.replace(tzinfo=UTC)
_FIRST = datetime.min.replace(tzinfo=UTC)
_LAST = _NEVER - timedelta(days=1)  # to which waits can be added
_AFTER = timedelta(microseconds=1)


def next_turn(turns: Turns, now: datetime) -> datetime:
    """Return the first instant that lies ahead. One that is now has not passed: some comparisons turn right after."""
    found = _NEVER
    for each in turns:
        place = bisect_left(each, now)
        if place < len(each) and each[place] < found:
            found = each[place]
    return max(found, now + _AFTER)


def turns_of_the_queue(state: ClusterState, policy: ScalingPolicy) -> Turns:
    """Where the schedule may turn: room fails to come, a hint has grown old, work may be on spot again."""
    return (
        _deadlines(state.orders),
        _hinted_until(policy, state.rebalance_recommended_at),
        _wished_until(state.reported_demand),
        _worn_until(policy, state.jobs),
    )


def turns_of_plans(state: ClusterState, policy: ScalingPolicy, now: datetime) -> Turns:
    """Where a plan of this instant may turn, but for what telemetry says."""
    return (
        *turns_of_the_queue(state, policy),
        _idle(policy, node_views(state, now), state.usable),
        _orders(policy, state.orders, state.instances),
        _removals(policy, state.drains),
        _renewals(policy, state.nodes, state.usable, state.unhealthy_since),
        _ends(state.directives),
        _periods(policy, state.offers),
        _gangs(policy, state.gangs, state.orders),
        _waits(policy, state.pods, state.jobs),
        _bursts(policy, state.pods, state.jobs),
        _moves(policy, state.pods, state.jobs, state.nodes),
        _forgotten(state.observed_allocatable),
        _answered(policy, state.orders),
    )


def telemetry_turns(state: ClusterState, policy: ScalingPolicy) -> Turns:
    """Where what telemetry says may turn a plan, or end a job."""
    return (
        _silent(policy, state.usable, state.telemetry_history),
        _used_little(policy, state.telemetry_history),
        _proven(policy, state.telemetry_history),
    )


def instances_missing(state: ClusterState) -> frozenset[str]:
    """Return the instances that the cloud's lists have left out for longer than they may lag."""
    if state.instances_listed_at is None:
        return frozenset()
    return _missing(state.instances_seen_at, state.orders, state.instances_listed_at)


class Calendar:
    """What of a policy holds by the clock. Beginnings and ends are whole minutes."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._kept: tuple[int, object] = (-1, None)  # the minute that was asked for last

    def at(self, now: datetime) -> object:
        """What holds in this minute; where a forecast looks ahead, every minute is another one."""
        minute = int(now.timestamp()) // 60
        if self._kept[0] != minute:
            self._kept = (minute, self._holding(now.replace(second=0, microsecond=0), minute))
        return self._kept[1]

    def _holding(self, now: datetime, minute: int) -> object:
        policy = self._policy
        return (
            minute if policy.forecast.is_on else None,
            tuple(each.holds(now, timedelta(seconds=each.lead_seconds)) for each in policy.headrooms),
            tuple(each.holds(now, timedelta(seconds=each.lead_seconds)) for each in policy.scheduled_limits),
            tuple(each.holds(now) for each in policy.scheduled_limits),
            tuple(each.holds_at(now) for each in policy.removal.disruption_budgets if not any(each.mistakes())),
        )


calendar_of = remembered(8)(Calendar)


# ---- of plans and of the queue


@remembered(8)
def _deadlines(orders: Mapping[ActionId, OrderRecord]) -> list[datetime]:
    """When what was ordered is late."""
    said = (order.decision or order.ordered for order in orders.values() if order.terminated is None)
    return sorted(each.deadline_at for each in said if each is not None)


@remembered(8)
def _hinted_until(policy: ScalingPolicy, hints: Mapping[ProviderId, datetime]) -> list[datetime]:
    return sorted(at + timedelta(seconds=policy.spot.rebalance_avoid_seconds) for at in hints.values())


@remembered(8)
def _wished_until(wishes: Mapping[str, ReportedDemandRecord]) -> list[datetime]:
    return sorted(record.reported.until for record in wishes.values())


@remembered(8)
def _worn_until(policy: ScalingPolicy, jobs: Mapping[JobId, JobRecord]) -> list[datetime]:
    """When jobs that spot lost may be on spot again."""
    waits = timedelta(seconds=policy.spot.on_demand_wait_seconds)
    lost = (job.preempted for job in jobs.values() if job.finished is None)
    return sorted(each.preempted_at + waits for each in lost if each is not None)


# ---- of plans alone


@remembered(8)
def _idle(policy: ScalingPolicy, views: tuple[NodeView, ...], usables: Mapping[NodeUid, Usable]) -> list[datetime]:
    """When empty nodes have been so for long enough, and any node is old enough to go by choice."""
    young = timedelta(seconds=policy.scale_down_cooldown_seconds)
    returns = timedelta(seconds=max(policy.spot.return_to_spot_seconds_min, policy.scale_down_cooldown_seconds))
    found = [usable.since + after for usable in usables.values() for after in (young, returns)]
    for view in views:
        if view.empty_since is not None:
            worth = {policy.idle_seconds_max, idle_seconds_allowed(view, policy)}
            found += [view.empty_since + timedelta(seconds=seconds) for seconds in worth]
    return sorted(found)


@remembered(8)
def _orders(
    policy: ScalingPolicy,
    orders: Mapping[ActionId, OrderRecord],
    instances: Mapping[ProviderId, NodeInstanceObserved],
) -> list[datetime]:
    """When what was refused may be asked for again, the next may be bought, and a node be replaced once more."""
    cooldown = timedelta(seconds=policy.limits.scale_up_cooldown_seconds)
    again = timedelta(seconds=policy.removal.replacement_cooldown_seconds)
    found = [refusal.until for refusal in refusals_of(orders, instances).values()]
    for order in orders.values():
        if order.planned_at is None:
            continue
        if cooldown:
            found.append(order.planned_at + cooldown)
        if order.decision is not None and isinstance(order.decision.reason, ReplacesNodes):
            found.append(order.planned_at + again)
    return sorted(found)


@remembered(8)
def _removals(policy: ScalingPolicy, drains: Mapping[ActionId, DrainRecord]) -> list[datetime]:
    """When a drain that was given up may be tried again, and what a node went for is forgotten."""
    again, gone = timedelta(seconds=policy.removal.drain_retry_seconds), timedelta(seconds=policy.scale_down_cooldown_seconds)
    found = [each.cancelled.cancelled_at + again for each in drains.values() if each.cancelled is not None]
    return sorted([*found, *(each.planned_at + gone for each in drains.values() if each.planned_at is not None)])


@remembered(8)
def _renewals(
    policy: ScalingPolicy,
    nodes: Mapping[NodeUid, NodeObserved],
    usables: Mapping[NodeUid, Usable],
    unhealthy_since: Mapping[NodeUid, datetime],
) -> list[datetime]:
    """When a node becomes due to be replaced, for its age, its sickness or its price."""
    rules = policy.removal
    found = [since + timedelta(seconds=rules.unhealthy_seconds_max) for since in unhealthy_since.values()]
    for node in nodes.values():
        due_at = expires_at(node.name, node.created_at, policy)
        if due_at is not None:
            found += [due_at, due_at + timedelta(seconds=rules.expire_grace_seconds)]
    stands = timedelta(seconds=max(rules.replacement_payback_hours * 3600.0, policy.scale_down_cooldown_seconds))
    return sorted([*found, *(usable.since + stands for usable in usables.values())])


@remembered(8)
def _ends(directives: Mapping[str, DirectiveRecord]) -> list[datetime]:
    """When what people overrule is over by itself."""
    return sorted(record.given.until for record in directives.values())


@remembered(8)
def _periods(policy: ScalingPolicy, sampled: SpotOffersSampled | None) -> list[datetime]:
    """When an offer's paid period opens, or is too near its end to be bought from."""
    found: list[datetime] = []
    for offer in () if sampled is None else sampled.offers:
        if offer.paid_from is not None:
            found.append(offer.paid_from)
        if offer.paid_until is not None:
            found.append(offer.paid_until - timedelta(seconds=policy.reservation_drain_seconds + offer.boot_seconds))
    return sorted(found)


@remembered(8)
def _gangs(
    policy: ScalingPolicy, gangs: Mapping[str, GangRecord], orders: Mapping[ActionId, OrderRecord]
) -> list[datetime]:
    """When a gang is tried again, or has had its time."""
    had = timedelta(seconds=policy.gangs.complete_seconds_max)
    bought = (order for order in orders.values() if order.decision is not None and order.decision.gang is not None)
    over = (order.planned_at + had for order in bought if order.planned_at is not None)
    return sorted([*over, *(tried_again_at(record, policy.gangs) for record in gangs.values())])


@remembered(8)
def _waits(
    policy: ScalingPolicy, pods: Mapping[PodUid, PodObserved], jobs: Mapping[JobId, JobRecord]
) -> list[datetime]:
    """When work ends that is certain to, when that is near enough to be waited for, and when spot is waited for no
    more."""
    waiting = [pod.unschedulable_since or pod.created_at for pod in pods.values() if pod.node_name is None]
    waiting += [job.queued.queued_at for job in jobs.values() if job.queued is not None and is_waiting(job)]
    if not waiting:
        return []
    longest = timedelta(seconds=max(policy.pending_pod_timeout_seconds, policy.queued_timeout_seconds))
    found = [at - before for at in ends_of_work(pods, jobs) for before in (longest, timedelta()) if longest]
    for_spot = timedelta(seconds=policy.spot.low_priority_wait_seconds)
    return sorted([*found, *(since + for_spot for since in waiting if for_spot)])


@remembered(8)
def _bursts(
    policy: ScalingPolicy, pods: Mapping[PodUid, PodObserved], jobs: Mapping[JobId, JobRecord]
) -> list[datetime]:
    """When nothing more is taken to come, and what waits for it has waited for long enough."""
    if not policy.batching.wait_seconds_max:
        return []
    came = [pod.created_at for pod in pods.values() if pod.node_name is None]
    came += [job.queued.queued_at for job in jobs.values() if job.queued is not None and is_waiting(job)]
    quiet, longest = policy.batching.quiet_seconds, policy.batching.wait_seconds_max
    waits = [timedelta(seconds=seconds) for seconds in (-quiet, quiet, longest, longest + quiet)]
    return sorted(at + each for at in came for each in waits)


@remembered(8)
def _moves(
    policy: ScalingPolicy,
    pods: Mapping[PodUid, PodObserved],
    jobs: Mapping[JobId, JobRecord],
    nodes: Mapping[NodeUid, NodeObserved],
) -> list[datetime]:
    """When a pod has run for long enough to be moved by choice, or ends so soon that it is not, and marks are over."""
    rules = policy.removal.protection
    run, ending = timedelta(seconds=rules.run_seconds_min), timedelta(seconds=rules.ending_soon_seconds)
    found: list[datetime | None] = [
        protected_until(dict(node.annotations), node.created_at) for node in nodes.values() if node.annotations
    ]
    for pod in pods.values():
        if pod.node_name is None or not counts_for_idleness(pod):
            continue
        if pod.annotations:
            found.append(protected_until(dict(pod.annotations), pod.started_at or pod.created_at))
        job = None if pod.job_id is None else jobs.get(pod.job_id)
        if left_alone(pod, job, rules, policy.job_retries_count_max, _LAST) is not None:
            continue  # at any time
        ends_at = expected_end(pod, job)
        found.append(None if pod.started_at is None else pod.started_at + run)
        found += [] if ends_at is None else [ends_at, ends_at - ending]
    return sorted(at for at in found if at is not None)


@remembered(8)
def _forgotten(came: Mapping[str, ObservedAllocatable]) -> list[datetime]:
    """When what the last node of an offer lacked counts no more."""
    return sorted(each.gone_at + timedelta(seconds=REMEMBERED_SECONDS) for each in came.values())


@remembered(8)
def _answered(policy: ScalingPolicy, orders: Mapping[ActionId, OrderRecord]) -> list[datetime]:
    """When high use may be answered again, where it is answered at all."""
    if policy.utilization_trigger != "direct":
        return []
    again = timedelta(seconds=policy.utilization.cooldown_seconds)
    return sorted(order.planned_at + again for order in orders.values() if order.planned_at is not None)


# ---- of telemetry


@remembered(8)
def _silent(
    policy: ScalingPolicy, usables: Mapping[NodeUid, Usable], trails: Mapping[NodeUid, NodeTelemetryHistory]
) -> list[datetime]:
    """When a node that is not heard of counts as silent."""
    silent = timedelta(seconds=policy.utilization.telemetry_age_seconds_max)
    found = [usable.since + silent for usable in usables.values()]
    return sorted([*found, *(trail.seen_until + silent for trail in trails.values())])


@remembered(8)
def _used_little(policy: ScalingPolicy, trails: Mapping[NodeUid, NodeTelemetryHistory]) -> list[datetime]:
    """When a node, or a job on it, has been used little for long enough."""
    rules, idle = policy.utilization, policy.idle_jobs
    lows = (since_at_most(trail.busy, rules.low_ratio * 100) for trail in trails.values())
    found = [since + timedelta(seconds=rules.low_seconds) for since in lows if since is not None]
    if idle.is_on:
        gpus = (gpu for trail in trails.values() for gpu in trail.gpus if gpu.pod is not None)
        sinces = (since_at_most(gpu.busy, idle.busy_ratio_max * 100) for gpu in gpus)
        found += [since + timedelta(seconds=idle.idle_seconds) for since in sinces if since is not None]
    return sorted(found)


@remembered(8)
def _proven(policy: ScalingPolicy, trails: Mapping[NodeUid, NodeTelemetryHistory]) -> list[datetime]:
    """When what is amiss with a GPU counts as proven, or is heard of no more."""
    rules = policy.removal.gpu_health
    found: list[datetime] = []
    for trail in trails.values():
        if is_suspect(trail, rules):
            found.append(trail.seen_until + timedelta(seconds=GAP_SECONDS_MAX))
            sinces = (since for gpu in trail.gpus for since in _marks(gpu))
            found += [since + timedelta(seconds=rules.evidence_seconds) for since in sinces]
    return sorted(found)


def _marks(gpu: GpuTelemetryHistory) -> Iterator[datetime]:
    yield from (since for _, since in gpu.xids)
    yield from (since for _, since in gpu.cool)
    yield from (since for since in (gpu.row_remap_failed_since, gpu.double_bit_since) if since is not None)


# ---- instances


@remembered(8)
def _missing(
    seen: Mapping[ProviderId, datetime], orders: Mapping[ActionId, OrderRecord], listed_at: datetime
) -> frozenset[str]:
    since = listed_at - timedelta(seconds=INSTANCE_MISSING_SECONDS_MAX)
    missing = {one for one, seen_at in seen.items() if seen_at < since}
    return frozenset(missing.union(one for one, at in _launched(orders) if at < since and one not in seen))


@remembered(8)
def _launched(orders: Mapping[ActionId, OrderRecord]) -> tuple[tuple[ProviderId, datetime], ...]:
    launches = (order.launched for order in orders.values())
    return tuple((launched.provider_id, launched.launched_at) for launched in launches if launched is not None)
