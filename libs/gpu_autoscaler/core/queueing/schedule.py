"""Which queued jobs start now, and where. Called by the scheduler on each tick; the same engine as the plan's.

The rule of the queue: jobs are looked at by priority, then by waiting time. A job starts when all its members, or as
many as are enough for it, fit on usable nodes. A job that will start once nodes that are on their way are usable keeps
its room there and on usable nodes; smaller jobs of lower priority go around it. A job that has no room in sight keeps
nothing, so that it never idles a cluster that it cannot use.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.demand.sources import demand, is_member, job_spec
from gpu_autoscaler.core.disruption.drift import rebalance_recommended
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.placement.bins import current_bins
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.shapes import BinReadiness
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.spot_waits import exclude_interrupted_from_spot, must_leave_spot
from gpu_autoscaler.core.provisioning.topology_domains import place_in_one_domain
from gpu_autoscaler.core.queueing.job_budgets import offers_of
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.queries import is_finished, pods_by_node, queue
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import Deferred
from gpu_autoscaler.model.ids import JobId, NodeUid, PodUid
from gpu_autoscaler.model.reasons.defer import DeferReason, PriceUnknown
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected, GangIncomplete, SpotExcluded

_STEP = "schedule"


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A job that may start: all its members have room now."""

    job_id: JobId
    attempt: int  # 1 for the first placement
    node_uids: tuple[NodeUid, ...]  # one for each member, repeated where members share a node
    node_names: tuple[str, ...]


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """What starts, in order, and why the rest of the queue waits."""

    placements: tuple[Placement, ...] = ()
    deferred: tuple[Deferred, ...] = ()


def schedule(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Schedule:
    """Return the jobs that start now; every other job of the queue is held back with its reason.

    Equal state, policy and `as_of` give an equal schedule. Nothing starts on an old picture of pods or nodes.
    """
    waiting = {job.queued.job_id: job for job in queue(state) if job.queued is not None}
    if not waiting:
        return Schedule()
    stale = stale_watch(state, policy, as_of)
    if stale is not None:
        return Schedule(deferred=tuple(_held(job_id, stale) for job_id in waiting))
    views = node_views(state, as_of)
    items = exclude_interrupted_from_spot(demand(state, views, as_of), state, policy, as_of)
    free_capacity = FreeCapacity(
        current_bins(views, pods_by_node(state)), policy.placement, [item.shape for item in items]
    )
    nodes = {f"node/{view.node_uid}": view for view in views}
    for key, view in nodes.items() if state.rebalance_recommended_at else ():
        if key in free_capacity and rebalance_recommended(view, state, policy, as_of) is not None:
            free_capacity.remove(key)
    found: dict[JobId, tuple[NodeView, ...] | DeferReason] = {}
    for item in items:
        # Room is wished to be free for work: what waits may have it.
        if item.blocked is not None or item.source is DemandSource.REPORTED:
            continue
        if item.source is DemandSource.ELASTIC_MEMBER:
            _join(item, found, nodes, free_capacity)
            continue
        if item.source is not DemandSource.QUEUED_JOB or item.job_id is None:
            free_capacity.place_most(item.shape, item.member_count, item.prefers)
            continue
        unpriced = _unpriced(item, state, nodes, free_capacity)
        keys = _placed_apart(item, free_capacity, unpriced) if unpriced else _placed(item, free_capacity)
        found[item.job_id] = (
            _why_no_price(item, keys, unpriced, nodes, free_capacity)
            or _why_not_now(item.job_id, item, keys, free_capacity)
            or tuple(nodes[key] for key in keys)
        )
    found.update(_released(state, waiting, {view.name: view for view in views if view.node is not None}, found))
    found.update(_leaving_spot(state, waiting, policy, as_of))
    placements: list[Placement] = []
    held: list[Deferred] = []
    for job_id, job in waiting.items():
        outcome = found.get(job_id)
        if isinstance(outcome, tuple):
            placements.append(_placement(job_id, job, outcome))
        elif outcome is not None:
            held.append(_held(job_id, outcome))
    return Schedule(placements=tuple(placements), deferred=tuple(held))


def _placed(item: DemandItem, free_capacity: FreeCapacity) -> tuple[str, ...]:
    """Place all members, near each other where they must be; none where they do not all fit."""
    if item.within is None:
        return free_capacity.place_gang(item.shape, item.member_count) or ()
    return place_in_one_domain(item.within, item.shape, item.member_count, free_capacity)


def _unpriced(
    item: DemandItem, state: ClusterState, nodes: Mapping[str, NodeView], free_capacity: FreeCapacity
) -> tuple[str, ...]:
    """Keys of the bins that a job with a budget of its own keeps away from: what it spends there nobody could say.

    Nodes that are not ours are in no bill of ours: nothing is spent there, and the plan counts on their room.
    """
    spec = job_spec(state, item.job_id)
    if spec is None or spec.budget_limit_micro_usd is None:
        return ()
    return tuple(
        key
        for key, view in nodes.items()
        if view.is_ours and view.price_micro_usd_per_hour is None and key in free_capacity
    )


def _placed_apart(item: DemandItem, free_capacity: FreeCapacity, unpriced: tuple[str, ...]) -> tuple[str, ...]:
    """Place all members outside of these bins, which others may have."""
    mark = free_capacity.mark()
    for key in unpriced:
        free_capacity.remove(key)
    keys = _placed(item, free_capacity)
    free_capacity.rollback(mark)
    return free_capacity.place_on(dict.fromkeys(keys), item.shape, len(keys))


def _why_no_price(
    item: DemandItem,
    keys: tuple[str, ...],
    unpriced: tuple[str, ...],
    nodes: Mapping[str, NodeView],
    free_capacity: FreeCapacity,
) -> PriceUnknown | None:
    """Return the offers without a price that are all that keeps the job from its place; None: it is something else."""
    if len(keys) == item.member_count or not unpriced:
        return None
    mark = free_capacity.mark()
    places = set(_placed(item, free_capacity)) & set(unpriced)
    free_capacity.rollback(mark)
    return PriceUnknown(offers=offers_of(nodes[key] for key in places)) if places else None


def _join(
    item: DemandItem,
    found: dict[JobId, tuple[NodeView, ...] | DeferReason],
    nodes: Mapping[str, NodeView],
    free_capacity: FreeCapacity,
) -> None:
    """Add a usable node for a member that the job can do without, where the job starts now; what is coming for it is
    kept, and where the job does not start it takes nobody's room."""
    starts = None if item.job_id is None else found.get(item.job_id)
    if item.job_id is None or not isinstance(starts, tuple):
        return
    placed = free_capacity.place_most(item.shape, item.member_count)
    ready = (nodes[key] for key in placed if free_capacity[key].readiness is BinReadiness.READY)
    found[item.job_id] = (*starts, *ready)


def _why_not_now(
    job_id: JobId, item: DemandItem, keys: tuple[str, ...], free_capacity: FreeCapacity
) -> DeferReason | None:
    """Return why a gang does not start now; None: every member has a place on a usable node."""
    if len(keys) < item.member_count:
        placed_count = free_capacity.count_places(item.shape, item.member_count)
        return GangIncomplete(job_id=job_id, members_placed=placed_count, members_count=item.member_count)
    coming = [free_capacity[key] for key in keys if free_capacity[key].readiness is not BinReadiness.READY]
    if not coming:
        return None
    last = max(coming, key=lambda each: (each.expected_at is None, each.expected_at, each.key))
    return CapacityExpected(node=last.name, expected_at=last.expected_at)


def _released(
    state: ClusterState,
    waiting: Mapping[JobId, JobRecord],
    nodes: Mapping[str, NodeView],
    in_queue: Mapping[JobId, tuple[NodeView, ...] | DeferReason],
) -> dict[JobId, tuple[NodeView, ...] | DeferReason]:
    """Jobs of the queue whose pods exist: Kubernetes has them already, after a preemption, and binds them by itself.

    Such a job has its place once all members are bound to nodes that stay; until then there is nothing for us to
    choose. A member whose node is on its way out has no place: taken for one, its loss would cost another attempt. Nor
    has one that is about to go itself, though for a moment it may be all that is left of its job.

    Where all pods that exist have done their part, the Job may be held, and nothing makes the others before they have
    a place: they get what the queue found for them.
    """
    members_bound: dict[JobId, list[NodeView]] = {}
    at_work: set[JobId] = set()
    for pod in sorted(state.pods.values(), key=_by_uid):
        if pod.job_id is not None and pod.job_id in waiting and (is_member(pod) or not is_finished(pod)):
            if not is_finished(pod):
                at_work.add(pod.job_id)
            bound = members_bound.setdefault(pod.job_id, [])
            view = None if pod.node_name is None or not is_member(pod) else nodes.get(pod.node_name)
            if view is not None and view.notice is None and not view.is_leaving:
                bound.append(view)
    found: dict[JobId, tuple[NodeView, ...] | DeferReason] = {}
    for job_id, bound in members_bound.items():
        accepted = waiting[job_id].queued
        count = len(bound) if accepted is None else accepted.spec.gang_count
        others = None if job_id in at_work else in_queue.get(job_id)
        if others is not None:
            found[job_id] = (*bound, *others) if isinstance(others, tuple) else others
        elif len(bound) >= count:
            found[job_id] = tuple(bound if accepted is None else bound[: accepted.spec.member_count])
        else:
            found[job_id] = GangIncomplete(job_id=job_id, members_placed=len(bound), members_count=count)
    return found


def _leaving_spot(
    state: ClusterState, waiting: Mapping[JobId, JobRecord], policy: ScalingPolicy, as_of: datetime
) -> dict[JobId, DeferReason]:
    """Jobs that are to leave spot and have pods still: Kubernetes may have bound them to spot that was free.

    The scheduler holds their Jobs; once no pod is left they are placed as those of the queue are.
    """
    leaving = {job_id: job for job_id, job in waiting.items() if must_leave_spot(job, policy, as_of)}
    left = Counter(pod.job_id for pod in state.pods.values() if pod.job_id in leaving and not is_finished(pod))
    return {
        job_id: SpotExcluded(
            interruptions_count=job.preempted.attempt,
            pods_remaining_count=left[job_id],
            until=job.preempted.preempted_at + timedelta(seconds=policy.spot.on_demand_wait_seconds),
        )
        for job_id, job in leaving.items()
        if left[job_id] and job.preempted is not None
    }


def _by_uid(pod: PodObserved) -> PodUid:
    return pod.pod_uid


def _placement(job_id: JobId, job: JobRecord, members: tuple[NodeView, ...]) -> Placement:
    attempts = (said.attempt for said in (job.placed, job.preempted) if said is not None)
    return Placement(
        job_id=job_id,
        attempt=max(attempts, default=0) + 1,
        node_uids=tuple(view.node_uid for view in members if view.node_uid is not None),
        node_names=tuple(view.name for view in members),
    )


def _held(job_id: JobId, reason: DeferReason) -> Deferred:
    return Deferred(step=_STEP, subject=f"job/{job_id}", reason=reason)
