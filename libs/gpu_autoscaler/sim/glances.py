"""What a plan depends on, so that a tick that would say nothing new need not be computed.

Time goes in as how many of the instants at which a comparison turns have passed. The list of those instants mirrors the
core's comparisons with `as_of`; a new one belongs here as well. That runs with and without skipping say the same facts
is tested: a forgotten instant shows there.
"""

from bisect import bisect_right
from collections.abc import Hashable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from operator import is_

from gpu_autoscaler.core.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.gangs import tried_again_at
from gpu_autoscaler.core.idling import idle_seconds_worth
from gpu_autoscaler.core.joins import INSTANCE_MISSING_SECONDS_MAX
from gpu_autoscaler.core.money import caps, slot
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.refusals import refusals_of
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.core.shortfalls import REMEMBERED_SECONDS
from gpu_autoscaler.core.soon import turns
from gpu_autoscaler.core.state import (
    ClusterState,
    DirectiveRecord,
    DrainRecord,
    GangRecord,
    JobRecord,
    OrderRecord,
    Usable,
    WishRecord,
)
from gpu_autoscaler.core.trails import NodeTrail, since_at_most
from gpu_autoscaler.core.wear import expires_at
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PodUid, ProviderId
from gpu_autoscaler.model.reasons import ReplacesNodes
from gpu_autoscaler.runtime.projection import StateView

_AFTER = timedelta(microseconds=1)


def plan_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """What a plan depends on: what is known, what is fresh, and which deadlines have passed."""
    return (_Inputs(view.state, policy, now),)


class _Inputs:
    """Compared with the last ones: first what is known, by identity, as `fold` keeps what did not change.

    What time does to it is asked only where that is the same, which most often it is not.
    """

    __hash__ = None  # type: ignore[assignment]  # never looked up

    def __init__(self, state: ClusterState, policy: ScalingPolicy, now: datetime) -> None:
        self._policy = policy
        self._state = state
        self._now = now

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Inputs):
            return False
        return (
            self._policy is other._policy
            and all(map(is_, _known(self._state), _known(other._state)))
            and self._passed == other._passed
        )

    @cached_property
    def _passed(self) -> tuple[object, ...]:
        state, policy, now = self._state, self._policy, self._now
        listed_at, stale = state.instances_listed_at, stale_watch(state, policy, now)
        ahead = _turns(policy, state.busy_until, state.instances, state.usable, state.orders, state.drains)
        renewals = _renewals(policy, state.nodes, state.usable, state.amiss_since, state.orders, state.drains)
        return (
            sum(now - each.gone_at > timedelta(seconds=REMEMBERED_SECONDS) for each in state.came.values()),
            bisect_right(ahead, now),
            bisect_right(renewals, now),
            bisect_right(_ends(state.directives), now),
            bisect_right(_wished_until(state.wishes), now),
            int(now.timestamp()) // 60 if _is_timed(policy) else None,
            bisect_right(_periods(policy, state.offers), now),
            bisect_right(_gang_turns(policy, state.gangs, state.orders), now),
            bisect_right(_patience(policy, state.pods, state.jobs), now),
            None if stale is None else stale.source,
            stale_instances(state, policy, now) is None,
            None if listed_at is None else _missing(state.instances_seen_at, state.orders, listed_at),
            state.last_plan_sequence,
            state.restored_at,
            _money(state, now) if caps(policy) else None,
            bisect_right(_use_turns(policy, state.usable, state.trails, state.orders, state.drains), now),
        )


def _money(state: ClusterState, now: datetime) -> tuple[object, ...]:
    """What runs is spent, and charged later; both states live while they are compared, so no two share an identity."""
    return (slot(now), id(state.spent), id(state.charges), state.ledger_told_at)


def _known(state: ClusterState) -> tuple[object, ...]:
    return (
        state.pods, state.budgets, state.busy_until, state.nodes, state.nodes_gone, state.instances, state.usable,
        state.amiss_since, state.notices, state.offers, state.jobs, state.orders, state.drains, state.directives,
        state.policy_documents, state.gangs, state.came, state.wishes, state.demand_history, state.forecast_scores,
        state.trails, state.telemetry,
    )  # fmt: skip


@remembered(8)
def _turns(
    policy: ScalingPolicy,
    busy_until: Mapping[str, datetime],
    instances: Mapping[ProviderId, NodeInstanceObserved],
    usables: Mapping[NodeUid, Usable],
    orders: Mapping[ActionId, OrderRecord],
    drains: Mapping[ActionId, DrainRecord],
) -> list[datetime]:
    """The instants at which a comparison of the core turns, in order."""
    idle, young = timedelta(seconds=policy.idle_seconds_max), timedelta(seconds=policy.scale_down_cooldown_seconds)
    boot = timedelta(seconds=policy.boot_seconds_max)
    sold = (order.decision.offer for order in orders.values() if order.decision is not None)
    spans = {idle, *(timedelta(seconds=idle_seconds_worth(offer, policy)) for offer in sold)}
    turns = [usable.since + young for usable in usables.values()]
    for at in (*busy_until.values(), *(usable.since for usable in usables.values())):
        turns += [at + span for span in spans]
    for instance in instances.values():
        turns.append(instance.launched_at + boot)
    for order in orders.values():
        if order.decision is not None:
            turns.append(order.decision.deadline_at)
        if order.planned_at is not None:
            turns.append(order.planned_at + timedelta(seconds=policy.limits.scale_up_cooldown_seconds))
        if order.ordered is not None:
            turns.append(order.ordered.deadline_at)
        if order.refused is not None:
            turns.append(order.refused.retry_at)
    turns += [refusal.until for refusal in refusals_of(orders, instances).values()]
    for drain in drains.values():
        if drain.started is not None:
            turns.append(drain.started.deadline_at)
    return sorted(turns)


@remembered(8)
def _renewals(
    policy: ScalingPolicy,
    nodes: Mapping[NodeUid, NodeObserved],
    usables: Mapping[NodeUid, Usable],
    amiss_since: Mapping[NodeUid, datetime],
    orders: Mapping[ActionId, OrderRecord],
    drains: Mapping[ActionId, DrainRecord],
) -> list[datetime]:
    """The instants at which a node becomes due to be replaced, or may be tried again, in order."""
    rules, turns = policy.removal, []
    for node in nodes.values():
        due_at = expires_at(node.name, node.created_at, policy)
        if due_at is not None:
            turns += [due_at, due_at + timedelta(seconds=rules.expire_overtime_seconds)]
    turns += [since + timedelta(seconds=rules.sick_seconds_max) for since in amiss_since.values()]
    for order in orders.values():
        decision, planned_at = order.decision, order.planned_at
        if decision is not None and planned_at is not None and isinstance(decision.reason, ReplacesNodes):
            turns.append(planned_at + timedelta(seconds=rules.replacement_seconds_min))
    for usable in usables.values():
        stands_seconds = max(rules.horizon_hours * 3600.0, policy.scale_down_cooldown_seconds)
        turns.append(usable.since + timedelta(seconds=stands_seconds))
    ends = (drain.cancelled for drain in drains.values())
    turns += [end.cancelled_at + timedelta(seconds=rules.retry_seconds) for end in ends if end is not None]
    return sorted(turns)


@remembered(8)
def _ends(directives: Mapping[str, DirectiveRecord]) -> list[datetime]:
    """The instants at which what people overrule is over by itself, in order."""
    return sorted(record.given.until for record in directives.values())


@remembered(8)
def _wished_until(wishes: Mapping[str, WishRecord]) -> list[datetime]:
    """The instants at which wishes for room are over, in order."""
    return sorted(record.reported.until for record in wishes.values())


@remembered(8)
def _is_timed(policy: ScalingPolicy) -> bool:
    """True where a rule holds by the clock, whose beginnings and ends are whole minutes, or a forecast looks ahead."""
    ahead = (rule.schedule for rule in (*policy.headrooms, *policy.sizes))
    schedules = (*ahead, *(budget.schedule for budget in policy.removal.budgets))
    return policy.forecast.is_on or any(schedule is not None for schedule in schedules)


@remembered(8)
def _periods(policy: ScalingPolicy, sampled: SpotOffersSampled | None) -> list[datetime]:
    """The instants at which an offer's paid period opens, or is too near its end to be bought from, in order."""
    found: list[datetime] = []
    for offer in () if sampled is None else sampled.offers:
        if offer.paid_from is not None:
            found.append(offer.paid_from)
        if offer.paid_until is not None:
            found.append(offer.paid_until - timedelta(seconds=policy.paid_drain_seconds + offer.boot_seconds))
    return sorted(found)


@remembered(8)
def _gang_turns(
    policy: ScalingPolicy, gangs: Mapping[str, GangRecord], orders: Mapping[ActionId, OrderRecord]
) -> list[datetime]:
    """The instants at which a gang is tried again, or has had its time, in order."""
    had = timedelta(seconds=policy.gangs.complete_seconds_max)
    bought = (order for order in orders.values() if order.decision is not None and order.decision.gang is not None)
    over = (order.planned_at + had for order in bought if order.planned_at is not None)
    return sorted([*over, *(tried_again_at(record, policy.gangs) for record in gangs.values())])


@remembered(8)
def _patience(
    policy: ScalingPolicy, pods: Mapping[PodUid, PodObserved], jobs: Mapping[JobId, JobRecord]
) -> list[datetime]:
    """The instants at which work ends that is certain to, and at which no more is waited for that, in order."""
    found = [*turns(pods, jobs)]
    if not found:
        return found
    pending, queued = policy.pending_pod_timeout_seconds, policy.queued_timeout_seconds
    longest = timedelta(seconds=max(pending, queued))
    found += [at - longest for at in found]
    waiting = (pod.unschedulable_since for pod in pods.values() if pod.node_name is None)
    found += [since + timedelta(seconds=pending) for since in waiting if since is not None]
    accepted = (job.queued.queued_at for job in jobs.values() if job.queued is not None)
    return sorted([*found, *(at + timedelta(seconds=queued) for at in accepted)])


@remembered(8)
def _use_turns(
    policy: ScalingPolicy,
    usables: Mapping[NodeUid, Usable],
    trails: Mapping[NodeUid, NodeTrail],
    orders: Mapping[ActionId, OrderRecord],
    drains: Mapping[ActionId, DrainRecord],
) -> list[datetime]:
    """The instants at which a node counts as silent, as little used for long, or the next may be answered, in order."""
    rules = policy.utilization
    silent, low = timedelta(seconds=rules.silent_seconds_max), timedelta(seconds=rules.low_seconds)
    again, gone = timedelta(seconds=rules.cooldown_seconds), timedelta(seconds=policy.scale_down_cooldown_seconds)
    found = [usable.since + silent for usable in usables.values()]
    found += [trail.seen_until + silent for trail in trails.values()]
    lows = (since_at_most(trail.busy, rules.low_ratio * 100) for trail in trails.values())
    found += [since + low for since in lows if since is not None]
    found += [order.planned_at + again for order in orders.values() if order.planned_at is not None]
    found += [drain.planned_at + gone for drain in drains.values() if drain.planned_at is not None]
    # Some of these comparisons turn at the instant, some right after it.
    return sorted([*found, *(at + _AFTER for at in found)])


@remembered(8)
def _missing(
    seen: Mapping[ProviderId, datetime], orders: Mapping[ActionId, OrderRecord], listed_at: datetime
) -> frozenset[str]:
    """Instances that the cloud's lists have left out for longer than they may lag."""
    since = listed_at - timedelta(seconds=INSTANCE_MISSING_SECONDS_MAX)
    missing = {one for one, seen_at in seen.items() if seen_at < since}
    return frozenset(missing.union(one for one, at in _launched(orders) if at < since and one not in seen))


@remembered(8)
def _launched(orders: Mapping[ActionId, OrderRecord]) -> tuple[tuple[ProviderId, datetime], ...]:
    launches = (order.launched for order in orders.values())
    return tuple((launched.provider_id, launched.launched_at) for launched in launches if launched is not None)
