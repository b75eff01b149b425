"""Schedule: which queued jobs start now, and on which nodes. It uses the placement engine of the plan.

Jobs are served in the order of their queues (`core/demand/queue_order.py`). A job that will start once booting nodes
are usable keeps its capacity; others are backfilled around it. A job without expected capacity reserves nothing, unless
it waited for `reserve_after_seconds` of its queue (`core/queueing/backfill.py`).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.demand.queue_order import in_queue_order, ordered_queue, overdue_jobs
from gpu_autoscaler.core.demand.quotas import ending_victim, with_quota
from gpu_autoscaler.core.demand.sources import demand, job_spec
from gpu_autoscaler.core.disruption import spot_returns
from gpu_autoscaler.core.disruption.drift import rebalance_recommended
from gpu_autoscaler.core.draft import Preemption
from gpu_autoscaler.core.nodes.views import NodeView, bin_key, node_views
from gpu_autoscaler.core.placement.bins import CURRENT_BINS
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.measured_use import UNKNOWN_USE, MeasuredUse, measured_use
from gpu_autoscaler.core.placement.shapes import BinReadiness, Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import queue_of
from gpu_autoscaler.core.provisioning.keep_or_buy import KeepOrBuy
from gpu_autoscaler.core.provisioning.spot_waits import exclude_interrupted_from_spot, must_leave_spot
from gpu_autoscaler.core.provisioning.topology_domains import place_in_one_domain
from gpu_autoscaler.core.queueing.backfill import Release, Reservation, latest_end, releases_of_pods, reserve
from gpu_autoscaler.core.queueing.job_budgets import offer_keys_of
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.queries import is_finished, is_member
from gpu_autoscaler.core.state.retries import retries_used
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.model.decisions import Deferred
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.reasons.defer import DeferReason, PriceUnknown
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected, GangIncomplete, QueueHeadWaits, SpotExcluded

_STEP = "schedule"


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A job that starts: all its members have capacity."""

    job_id: JobId
    attempt: int  # 1 for the first placement
    retries_used_count: int  # by losses of earlier attempts
    node_uids: tuple[NodeUid, ...]  # one per member
    node_names: tuple[str, ...]
    gpu_use_ratios: tuple[float | None, ...] = ()  # as in `JobPlaced`


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that start, in order, and why the others wait."""

    placements: tuple[Placement, ...] = ()
    deferred: tuple[Deferred, ...] = ()
    granted: frozenset[JobId] = frozenset()  # queued jobs that got their quotas now, whatever else they wait for
    returning: Preemption | None = None  # a running job that goes back to spot, once it has saved


def schedule(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Schedule:
    """Return the jobs that start now; every other queued job is deferred with its reason. Equal input gives an equal
    schedule. Nothing starts while lists of pods or nodes are stale."""
    queued = ordered_queue(state, policy, as_of)
    waiting = {job.queued.job_id: job for job in queued if job.queued is not None}
    is_save_requested = spot_returns.is_save_requested(state, policy)
    if not waiting and not is_save_requested:
        return Schedule()
    stale = stale_watch(state, policy, as_of)
    if stale is not None:
        return Schedule(deferred=tuple(_deferred(job_id, stale) for job_id in waiting))
    serving = _Serving(state, policy, as_of)
    serving.serve()
    outcomes = serving.outcomes
    views = {view.name: view for view in serving.views if view.node is not None}
    released = _released(state, waiting, views, outcomes)
    outcomes.update(released)
    outcomes.update(_leaving_spot(state, waiting, policy, as_of))
    outcomes.update(_passing(waiting, outcomes, policy, released))
    ending = {job_id: ending_victim(state, job, policy) for job_id, job in waiting.items()}
    outcomes.update({job_id: reason for job_id, reason in ending.items() if reason is not None})
    placements: list[Placement] = []
    deferred: list[Deferred] = []
    for job_id, job in waiting.items():
        outcome = outcomes.get(job_id)
        if isinstance(outcome, tuple):
            used = UNKNOWN_USE if job_id in released else serving.used  # others were bound without it
            placements.append(_placement(job_id, job, outcome, retries_used(state, job), used))
        elif outcome is not None:
            deferred.append(_deferred(job_id, outcome))
    returning = serving.returning() if is_save_requested else None
    return Schedule(
        placements=tuple(placements), deferred=tuple(deferred), granted=serving.granted, returning=returning
    )


class _Serving:
    """The demand of one schedule, and what became of the queued jobs so far."""

    def __init__(self, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> None:
        self._state, self._policy, self._as_of = state, policy, as_of
        self.views = node_views(state, as_of)
        wanted = in_queue_order(demand(state, self.views, as_of), state, policy, as_of)
        wanted = exclude_interrupted_from_spot(wanted, state, policy, as_of)
        self._items, self.granted = with_quota(wanted, state, policy, as_of)
        bins = self.views.table(CURRENT_BINS)
        self.used = measured_use(state, self.views, policy, as_of)
        shapes = [item.shape for item in self._items]
        self._free_capacity = FreeCapacity(bins, policy.placement, shapes, self.used)
        self._nodes = {f"node/{view.node_uid}": view for view in self.views}
        self._keys = tuple(entry.key for entry in bins)
        self._keep_or_buy = KeepOrBuy(state, policy, as_of, self.views)
        self.outcomes: dict[JobId, tuple[NodeView, ...] | DeferReason] = {}
        self._strict_heads: dict[str, JobId] = {}  # by queue: the first job that does not start
        self._overdue = frozenset(overdue_jobs(state, policy, as_of))
        self._reservation: Reservation | None = None
        self._unreservable: set[tuple[Shape, int, str | None]] = set()  # equal jobs do not fit either
        self._given: list[Release] = []  # capacity of placed jobs without pods on nodes, and of jobs that start
        for key, view in self._nodes.items() if state.rebalance_recommended_at else ():
            if key in self._free_capacity and rebalance_recommended(view, state, policy, as_of) is not None:
                self._free_capacity.close(key)

    def serve(self) -> None:
        """Place the demand in its order, and record the outcome of each queued job."""
        for item in self._items:
            if item.source is DemandSource.QUEUED_JOB and item.job_id is not None:
                outcome = self.outcomes[item.job_id] = self._outcome(item, item.job_id)
                if item.strict_queue is not None and not isinstance(outcome, tuple):
                    self._strict_heads.setdefault(item.strict_queue, item.job_id)
            # Waiting jobs may use the capacity of reported demand.
            elif item.blocked is not None or item.source is DemandSource.REPORTED:
                continue
            elif item.source is DemandSource.ELASTIC_MEMBER:
                if self._reservation is None or self._reservation.is_over_before(item, self._as_of):
                    _add_elastic_member(item, self.outcomes, self._nodes, self._free_capacity)
            else:
                # A part of a gang starts nothing, so it takes no capacity from jobs that could start.
                is_gang = item.source in (DemandSource.PROVISIONING, DemandSource.CAPACITY_CHECK)
                place = self._free_capacity.place_gang if is_gang else self._free_capacity.place_most
                self._give(item, place(item.shape, item.member_count, item.prefers) or ())

    def returning(self) -> Preemption | None:
        """Return the end of an attempt on demand for which free spot nodes are left; after `serve`."""
        return spot_returns.returning(self._free_capacity, self.views, self._state, self._policy, self._as_of)

    def _outcome(self, item: DemandItem, job_id: JobId) -> tuple[NodeView, ...] | DeferReason:
        if item.strict_queue is not None and (head := self._strict_heads.get(item.strict_queue)) is not None:
            return QueueHeadWaits(queue=item.strict_queue, job_id=head)
        if item.blocked is not None:
            return item.blocked
        free_capacity = self._free_capacity
        unpriced = _unpriced(item, self._state, self._nodes, free_capacity)
        expensive = self._keep_or_buy.avoided(item, free_capacity)
        avoided = (*unpriced, *expensive)
        if self._reservation is not None and not self._reservation.is_over_before(item, self._as_of):
            keys = self._backfill(self._reservation, item, avoided)
            if not keys and _fits(item, free_capacity, avoided):
                return self._reservation.reason
        else:
            keys = _place(item, free_capacity, avoided)
        reason = _why_no_price(item, keys, unpriced, expensive, self._nodes, free_capacity) or _why_not_now(
            job_id, item, keys, free_capacity, expensive
        )
        if reason is None:
            self._give(item, keys)
        elif isinstance(reason, GangIncomplete) and job_id in self._overdue and self._reserves(item, unpriced):
            assert self._reservation is not None  # noqa: S101 - it was made just now
            return self._reservation.own_reason
        return reason or tuple(self._nodes[key] for key in keys)

    def _give(self, item: DemandItem, keys: tuple[str, ...]) -> None:
        """Note when a job gives these places back. It has not started, so the instant moves on."""
        at = latest_end(item, self._as_of) if self._overdue else None
        if item.job_id is not None and at is not None:
            self._given += [Release(at, key, item.shape.resources, is_moving=True) for key in keys]

    def _reserves(self, item: DemandItem, unpriced: tuple[str, ...]) -> bool:
        """Reserve capacity for the job if none is reserved yet; false if the job would not fit on empty nodes."""
        kind = (item.shape, item.member_count, item.within)
        if self._reservation is not None or kind in self._unreservable:
            return False

        def place(capacity: FreeCapacity) -> tuple[str, ...]:
            return _place(item, capacity, unpriced)

        of_pods = releases_of_pods(self._state, self.views, self._free_capacity, self._as_of)
        releases = (*of_pods, *self._given)
        self._reservation = reserve(item, place, releases, self._free_capacity, self._keys, self._as_of)
        if self._reservation is None:
            self._unreservable.add(kind)
        return self._reservation is not None

    def _backfill(self, reservation: Reservation, item: DemandItem, avoided: Collection[str]) -> tuple[str, ...]:
        """Place all members where they do not delay the job that reserves; none if they do not all fit there."""
        extra = reservation.capacity_beside(self._free_capacity, self._keys)
        mark = extra.mark()
        keys = _place(item, extra, avoided)
        extra.rollback(mark)
        if keys:
            reservation.take(keys, item.shape, self._free_capacity)
        return keys


def _fits(item: DemandItem, free_capacity: FreeCapacity, avoided: Collection[str]) -> bool:
    mark = free_capacity.mark()
    keys = _place(item, free_capacity, avoided)
    free_capacity.rollback(mark)
    return bool(keys)


def _passing(
    waiting: Mapping[JobId, JobRecord],
    outcomes: Mapping[JobId, tuple[NodeView, ...] | DeferReason],
    policy: ScalingPolicy,
    released: Collection[JobId],
) -> dict[JobId, QueueHeadWaits]:
    """Return the jobs of strict queues that would pass one whose pods exist and are not all bound. Jobs whose pods are
    bound are not held: Kubernetes has started them."""
    heads: dict[str, JobId] = {}
    held: dict[JobId, QueueHeadWaits] = {}
    for job_id, job in waiting.items():
        queue = None if job.queued is None else queue_of(policy.queues, job.queued.spec.project_id)
        if queue is None or not queue.is_strict:
            continue
        head = heads.get(queue.name)
        if not isinstance(outcomes.get(job_id), tuple):
            heads.setdefault(queue.name, job_id)
        elif head is not None and job_id not in released:
            held[job_id] = QueueHeadWaits(queue=queue.name, job_id=head)
    return held


def _place(item: DemandItem, free_capacity: FreeCapacity, avoided: Collection[str] = ()) -> tuple[str, ...]:
    """Place all members, in one domain if required, on no bin in `avoided`; none if they do not all fit."""
    if item.within is None:
        return free_capacity.place_gang(item.shape, item.member_count, avoided=avoided) or ()
    return place_in_one_domain(item.within, item.shape, item.member_count, free_capacity, avoided)


def _unpriced(
    item: DemandItem, state: ClusterState, nodes: Mapping[str, NodeView], free_capacity: FreeCapacity
) -> tuple[str, ...]:
    """Return the bins that a job with a budget avoids, because their price is unknown. Nodes of others are not billed,
    so they are allowed."""
    spec = job_spec(state, item.job_id)
    if spec is None or spec.budget_limit_micro_usd is None:
        return ()
    return tuple(
        key
        for key, view in nodes.items()
        if view.is_ours and view.price_micro_usd_per_hour is None and key in free_capacity
    )


def _why_no_price(
    item: DemandItem,
    keys: tuple[str, ...],
    unpriced: tuple[str, ...],
    expensive: Collection[str],
    nodes: Mapping[str, NodeView],
    free_capacity: FreeCapacity,
) -> PriceUnknown | None:
    """Return the offers of unknown price if only they prevent the placement; None: something else does."""
    if len(keys) == item.member_count or not unpriced:
        return None
    mark = free_capacity.mark()
    places = set(_place(item, free_capacity, expensive)) & set(unpriced)
    free_capacity.rollback(mark)
    return PriceUnknown(offers=offer_keys_of(nodes[key] for key in places)) if places else None


def _add_elastic_member(
    item: DemandItem,
    outcomes: dict[JobId, tuple[NodeView, ...] | DeferReason],
    nodes: Mapping[str, NodeView],
    free_capacity: FreeCapacity,
) -> None:
    """Add a usable node for an elastic member if its job starts now. Booting nodes bought for it are reserved. If the
    job does not start, it uses no capacity."""
    starts = None if item.job_id is None else outcomes.get(item.job_id)
    if item.job_id is None or not isinstance(starts, tuple):
        return
    placed = free_capacity.place_most(item.shape, item.member_count)
    ready = (nodes[key] for key in placed if free_capacity[key].readiness is BinReadiness.READY)
    outcomes[item.job_id] = (*starts, *ready)


def _why_not_now(
    job_id: JobId, item: DemandItem, keys: tuple[str, ...], free_capacity: FreeCapacity, expensive: Collection[str]
) -> DeferReason | None:
    """Return why a gang does not start now; None: every member has a usable node."""
    if len(keys) < item.member_count:
        placed_count = free_capacity.count_places(item.shape, item.member_count, expensive)
        return GangIncomplete(
            job_id=job_id,
            members_placed=placed_count,
            members_count=item.member_count,
            nodes_avoided_count=len(expensive),
        )
    booting = [free_capacity[key] for key in keys if free_capacity[key].readiness is not BinReadiness.READY]
    if not booting:
        return None
    last = max(booting, key=lambda bin_: (bin_.expected_at is None, bin_.expected_at, bin_.key))
    return CapacityExpected(node=last.name, expected_at=last.expected_at)


def _released(
    state: ClusterState,
    waiting: Mapping[JobId, JobRecord],
    nodes: Mapping[str, NodeView],
    in_queue: Mapping[JobId, tuple[NodeView, ...] | DeferReason],
) -> dict[JobId, tuple[NodeView, ...] | DeferReason]:
    """Return the outcome of queued jobs whose pods exist after a preemption: the Kubernetes scheduler binds them.

    Such a job is placed once all members are bound to nodes that stay; a leaving node would cost another attempt. If
    all existing pods are finished, the Job may be suspended: missing pods get the outcome of the queue.
    """
    members_bound: dict[JobId, list[NodeView]] = {}
    running: set[JobId] = set()
    for pod in sorted(state.pods.values(), key=lambda pod: pod.pod_uid):
        if pod.job_id is not None and pod.job_id in waiting and (is_member(pod) or not is_finished(pod)):
            if not is_finished(pod):
                running.add(pod.job_id)
            bound = members_bound.setdefault(pod.job_id, [])
            view = None if pod.node_name is None or not is_member(pod) else nodes.get(pod.node_name)
            if view is not None and view.notice is None and not view.is_leaving:
                bound.append(view)
    outcomes: dict[JobId, tuple[NodeView, ...] | DeferReason] = {}
    for job_id, bound in members_bound.items():
        accepted, completed_count = waiting[job_id].queued, waiting[job_id].completed_count
        count = len(bound) if accepted is None else max(1, accepted.spec.gang_count - completed_count)
        others = None if job_id in running else in_queue.get(job_id)
        if others is not None:
            outcomes[job_id] = (*bound, *others) if isinstance(others, tuple) else others
        elif len(bound) >= count:
            outcomes[job_id] = tuple(bound if accepted is None else bound[: accepted.spec.member_count])
        else:
            outcomes[job_id] = GangIncomplete(job_id=job_id, members_placed=len(bound), members_count=count)
    return outcomes


def _leaving_spot(
    state: ClusterState, waiting: Mapping[JobId, JobRecord], policy: ScalingPolicy, as_of: datetime
) -> dict[JobId, DeferReason]:
    """Return jobs that must leave spot and still have pods, which Kubernetes may have bound to free spot nodes. The
    scheduler suspends their Jobs; once no pod is left they are placed like other queued jobs."""
    leaving = {job_id: job for job_id, job in waiting.items() if must_leave_spot(job, policy, as_of)}
    left = Counter(pod.job_id for pod in state.pods.values() if pod.job_id in leaving and not is_finished(pod))
    return {
        job_id: SpotExcluded(
            interruptions_count=job.preempted.retries_used,
            pods_remaining_count=left[job_id],
            until=job.preempted.preempted_at + timedelta(seconds=policy.spot.on_demand_wait_seconds),
        )
        for job_id, job in leaving.items()
        if left[job_id] and job.preempted is not None
    }


def _placement(
    job_id: JobId,
    job: JobRecord,
    members: tuple[NodeView, ...],
    retries_used_count: int,
    used: Mapping[str, MeasuredUse],
) -> Placement:
    attempts = (fact.attempt for fact in (job.placed, job.preempted) if fact is not None)
    uses = [used.get(bin_key(view)) for view in members]
    return Placement(
        job_id=job_id,
        attempt=max(attempts, default=0) + 1,
        retries_used_count=retries_used_count,
        node_uids=tuple(view.node_uid for view in members if view.node_uid is not None),
        node_names=tuple(view.name for view in members),
        gpu_use_ratios=tuple(None if use is None else use.ratio for use in uses) if any(uses) else (),
    )


def _deferred(job_id: JobId, reason: DeferReason) -> Deferred:
    return Deferred(step=_STEP, subject=f"job/{job_id}", reason=reason)
