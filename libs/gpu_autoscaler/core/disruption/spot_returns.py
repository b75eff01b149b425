"""Step `return_to_spot`: jobs that no drain moves go back to spot as a whole: jobs on several nodes, of high priority,
or with few retries left.

On-demand nodes were bought for such a job in a shortage, which passes in minutes, and it would stay there for hours.
The plan buys spot nodes for it. Once they are ready, it asks all pods of the job to save; then the scheduler ends the
attempt and places the job again (`core/queueing/preemption.py`). The move is decided by its cost.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.demand.durations import Durations
from gpu_autoscaler.core.demand.sources import job_shape
from gpu_autoscaler.core.disruption import repack
from gpu_autoscaler.core.disruption.eligibility import gpu_seconds_at_risk, reason_of_job, reason_of_time
from gpu_autoscaler.core.disruption.move_price import HOUR_SECONDS
from gpu_autoscaler.core.disruption.protection import can_save, pod_mark
from gpu_autoscaler.core.disruption.replacement import leaves_for_risky_spot
from gpu_autoscaler.core.draft import SAVE_PREFIX, Draft, Preemption, Purchase, save_key
from gpu_autoscaler.core.intake.directives import active_directives
from gpu_autoscaler.core.limits.override_bounds import frozen_by
from gpu_autoscaler.core.next_change import has_lasted, note_always
from gpu_autoscaler.core.nodes.views import NodeIndex, NodeView, Selected, Table, bin_key
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.cooldown import rebuy_cooldown, recently_removed_types
from gpu_autoscaler.core.provisioning.spot_waits import is_spot_excluded
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.queries import counts_for_idleness, is_finished, is_waiting
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import PRIORITY_NAMES, JobSpec
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer import DeferReason, SavingTooSmall
from gpu_autoscaler.model.reasons.defer_limits import Cooldown
from gpu_autoscaler.model.reasons.preempt import MovedToSpot

# From the end of an attempt until its successor computes again, on nodes that are ready. Source: our own.
_RESTART_SECONDS = 120.0
# From the end of the time to save until the scheduler has ended the attempt. Source: our own.
_END_SECONDS_MAX = 60.0
# Least ratio of saving and cost for which a job is asked to save. Once it has saved it moves if the saving exceeds the
# cost, so that a prediction that shrinks meanwhile wastes no save. Source: our own.
_WORTH_RATIO_MIN = 1.5
_TRIES_COUNT_MAX = 4  # jobs that are priced in one plan; bounds its time
_STEP = "return_to_spot"


class _OnDemand(NamedTuple):
    """A running job that may go back to spot."""

    job: JobRecord
    spec: JobSpec
    pods: tuple[PodObserved, ...]  # unfinished, by uid; all of them save on request
    moving: tuple[PodObserved, ...]  # those on on-demand nodes
    nodes: tuple[NodeView, ...]  # on-demand nodes that have no other work, by name

    @property
    def micro_usd_per_hour(self) -> int:
        return sum(view.price_micro_usd_per_hour or 0 for view in self.nodes)


class _WithJobs(NamedTuple):
    """An on-demand node and the jobs with pods on it that save on request."""

    view: NodeView
    job_ids: frozenset[JobId]

    @classmethod
    def of(cls, views: Iterable[NodeView], nodes: NodeIndex) -> "dict[str, _WithJobs]":
        """Return those of the views that have such jobs, by name."""
        found: dict[str, _WithJobs] = {}
        for view in views:
            if view.capacity_type is CapacityType.ON_DEMAND and view.empty_since is None:
                saving = (pod for pod in nodes.pods.get(view.name, ()) if can_save(dict(pod.annotations)))
                if job_ids := frozenset(pod.job_id for pod in saving if pod.job_id is not None):
                    found[view.name] = cls(view, job_ids)
        return found


class _OnDemandNodes(Table[Mapping[str, _WithJobs]]):
    """The on-demand nodes that have such jobs, by name."""

    def build(self, nodes: NodeIndex) -> Mapping[str, _WithJobs]:
        """Look at all nodes."""
        return _WithJobs.of(nodes, nodes)

    def update(
        self, table: Mapping[str, _WithJobs], removed: Sequence[NodeView], added: Sequence[NodeView], nodes: NodeIndex
    ) -> Mapping[str, _WithJobs]:
        """Replace the changed nodes."""
        new, out = _WithJobs.of(added, nodes), {view.name for view in removed} & table.keys()
        return table if not new and not out else {name: table[name] for name in table.keys() - out} | new


_ON_DEMAND = _OnDemandNodes()
# Usable spot nodes, without those of ours whose price is unknown. Nodes of others are not billed to us.
_SPOT = Selected(
    lambda view: (
        view.capacity_type is CapacityType.SPOT
        and view.is_usable
        and (view.price_micro_usd_per_hour is not None or not view.is_ours)
    )
)


def return_to_spot(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Keep free spot nodes for one job that goes back to them, which is asked to save; else buy them, while nothing
    else is bought or moves, or defer the jobs with the reason."""
    if not policy.is_consolidation_on or frozen_by(draft.directives, policy) is not None:
        return draft
    jobs = _jobs_on_demand(draft.views, state, policy, draft.as_of, is_asked=False)
    if not jobs or stale_watch(state, policy, draft.as_of) is not None:
        return draft
    is_quiet = draft.is_demand_met and not draft.disrupted_nodes() and not draft.purchases
    for job in jobs[:_TRIES_COUNT_MAX]:
        mark = draft.free_capacity.mark()
        found = _onto_free_spot(job, draft.free_capacity, draft.views, state, policy, draft.as_of, is_asked=False)
        if found is not None:
            preemption, keys = found
            return msgspec.structs.replace(draft, returning=preemption, claimed=draft.claimed.union(keys))
        draft.free_capacity.rollback(mark)
        if not is_quiet:
            continue
        purchases, reason = _bought(job, draft, state, policy)
        if purchases:
            return draft.adding(purchases=purchases)
        if reason is not None:
            draft = draft.deferring(_STEP, f"job/{job.spec.job_id}", reason)
    return draft


def is_save_requested(state: ClusterState, policy: ScalingPolicy) -> bool:
    """True if a plan may have asked a job to save because it goes back to spot."""
    return policy.is_consolidation_on and any(key.startswith(SAVE_PREFIX) for key in state.upkeep)


def returning(
    free_capacity: FreeCapacity, nodes: NodeIndex, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> Preemption | None:
    """Return the end of the attempt of a job that a plan has asked to save, and that fits on free spot nodes at a
    saving which also pays for what it has not saved; None: there is none, or the cluster is frozen."""
    if frozen_by(active_directives(state.directives, as_of), policy) is not None:
        return None
    for job in _jobs_on_demand(nodes, state, policy, as_of, is_asked=True):
        mark = free_capacity.mark()
        found = _onto_free_spot(job, free_capacity, nodes, state, policy, as_of, is_asked=True)
        if found is not None:
            return found[0]
        free_capacity.rollback(mark)
    return None


# ---- the jobs


def _jobs_on_demand(
    nodes: NodeIndex, state: ClusterState, policy: ScalingPolicy, as_of: datetime, *, is_asked: bool
) -> list[_OnDemand]:
    """Return the jobs that may go back to spot, those on the most expensive nodes first. `is_asked`: only those that
    plans have asked to save."""
    views_of: dict[JobId, list[NodeView]] = {}
    for entry in nodes.table(_ON_DEMAND).values():
        for job_id in entry.job_ids:
            views_of.setdefault(job_id, []).append(entry.view)
    found = {
        job_id: job
        for job_id in sorted(views_of)
        if (job := state.jobs.get(job_id)) is not None
        and _is_protected(job, policy)
        and _is_in_time(job_id, job, state, policy, as_of, is_asked=is_asked)
        and _may_be_left(views_of[job_id], policy, as_of)
    }
    pods_of = _pods_of(found, state)
    whole = (
        _whole(job, pods_of[job_id], views_of[job_id], nodes, state, policy, as_of) for job_id, job in found.items()
    )
    return sorted((job for job in whole if job is not None), key=lambda job: -job.micro_usd_per_hour)


def _is_protected(job: JobRecord, policy: ScalingPolicy) -> bool:
    """True for a running job that may run on spot on any node, and that no drain by choice moves."""
    if job.queued is None or job.placed is None or job.started is None or job.finished or job.cancel_requested:
        return False
    spec = job.queued.spec
    if is_waiting(job) or not spec.is_preemptible or spec.within is not None or not spec.member_resources.gpu_count:
        return False
    return reason_of_job(job, policy.removal.protection, policy.job_retries_count_max) is not None


def _is_in_time(
    job_id: JobId, job: JobRecord, state: ClusterState, policy: ScalingPolicy, as_of: datetime, *, is_asked: bool
) -> bool:
    """True for a job that was asked to save just now, with `is_asked` false also for one that was not asked. Where the
    attempt did not end in time, its free nodes are not kept any longer; it is asked again once that is forgotten."""
    known = None if job.placed is None else state.upkeep.get(save_key(job_id, job.placed.attempt))
    if known is None or known.decided_at is None:
        return not is_asked
    seconds = policy.quotas.checkpoint_seconds_max + _END_SECONDS_MAX
    return not has_lasted(known.decided_at, seconds, as_of)


def _may_be_left(views: Iterable[NodeView], policy: ScalingPolicy, as_of: datetime) -> bool:
    """True if these on-demand nodes have been usable for long enough, and none of them leaves."""
    least_seconds = policy.spot.return_to_spot_seconds_min
    return all(
        view.is_usable
        and not view.is_leaving
        and view.notice is None
        and view.usable_since is not None
        and has_lasted(view.usable_since, least_seconds, as_of)
        for view in views
    )


def _pods_of(job_ids: Collection[JobId], state: ClusterState) -> Mapping[JobId, tuple[PodObserved, ...]]:
    """Return the unfinished pods of these jobs, by uid, in one pass over all pods."""
    pods: dict[JobId, list[PodObserved]] = {job_id: [] for job_id in job_ids}
    for pod in state.pods.values() if pods else ():
        if pod.job_id in pods and not is_finished(pod):
            pods[pod.job_id].append(pod)
    return {job_id: tuple(sorted(of_job, key=lambda pod: pod.pod_uid)) for job_id, of_job in pods.items()}


def _whole(
    job: JobRecord,
    pods: tuple[PodObserved, ...],
    views: Iterable[NodeView],
    nodes: NodeIndex,
    state: ClusterState,
    policy: ScalingPolicy,
    as_of: datetime,
) -> _OnDemand | None:
    """Return the job if all its pods may be ended after a save, and a node is left empty. `views`: its on-demand
    nodes."""
    if job.queued is None or is_spot_excluded(job, policy, as_of):
        return None
    spec, names = job.queued.spec, {view.name for view in views}
    own = sorted((view for view in views if _is_left_empty(view, spec.job_id, nodes)), key=lambda view: view.name)
    if not own or not all(_may_end(pod, job, state, policy, as_of) for pod in pods):
        return None
    moving = tuple(pod for pod in pods if pod.node_name in names)
    return _OnDemand(job, spec, pods, moving, tuple(own))


def _is_left_empty(view: NodeView, job_id: JobId, nodes: NodeIndex) -> bool:
    """True for a node that we pay for and that has no other work."""
    others = (pod for pod in nodes.pods.get(view.name, ()) if counts_for_idleness(pod) and pod.job_id != job_id)
    return view.is_ours and view.price_micro_usd_per_hour is not None and next(others, None) is None


def _may_end(pod: PodObserved, job: JobRecord, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> bool:
    is_running = pod.phase == "running" and pod.node_name is not None and pod.deleting_since is None
    return (
        is_running
        and can_save(dict(pod.annotations))
        and pod_mark(pod, state.budgets.values(), as_of) is None
        and reason_of_time(pod, job, policy.removal.protection, as_of) is None
    )


# ---- the move and its price


def _onto_free_spot(
    job: _OnDemand,
    free_capacity: FreeCapacity,
    nodes: NodeIndex,
    state: ClusterState,
    policy: ScalingPolicy,
    as_of: datetime,
    *,
    is_asked: bool,
) -> tuple[Preemption, tuple[str, ...]] | None:
    """Place the members on spot nodes that are ready, the fullest first; return the end of the attempt and the keys of
    the bins. None: they do not fit, or the saving is too small; the caller rolls back."""
    gpu_count, views = job.spec.member_resources.gpu_count, {bin_key(view): view for view in nodes.table(_SPOT)}
    spot = sorted(
        (free_count, entry.key)
        for entry, free_count in free_capacity.with_free_gpus()
        if entry.key in views and free_count >= gpu_count
    )
    keys = free_capacity.place_on([key for _, key in spot], job_shape(job.spec), len(job.moving)) if spot else ()
    if len(keys) < len(job.moving):
        return None
    after = sum(
        gpu_count * ((views[key].price_micro_usd_per_hour or 0) + policy.node_overhead_micro_usd_per_hour)
        / max(1, views[key].allocatable.gpu_count)
        for key in keys
    )  # fmt: skip
    reason = _worth(job, after, 0.0, state, policy, as_of, is_asked=is_asked)
    if isinstance(reason, SavingTooSmall) or job.job.placed is None:
        return None
    placed = job.job.placed
    preemption = Preemption(
        job_id=job.spec.job_id,
        attempt=placed.attempt,
        retries_used_count=placed.retries_used,
        reason=reason,
        pods=job.pods,
    )
    return preemption, keys


def _bought(
    job: _OnDemand, draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> tuple[tuple[Purchase, ...], DeferReason | None]:
    """Return the spot nodes to buy for the job, or why none are bought."""
    cooldown_seconds, known = policy.removal.replacement_cooldown_seconds, repack.replacements(state.orders)
    bought = [known[view.node_uid] for view in job.nodes if view.node_uid is not None and view.node_uid in known]
    last = max(bought, key=lambda replacement: replacement.planned_at, default=None)
    if last is not None and not has_lasted(last.planned_at, cooldown_seconds, draft.as_of):
        if any(view.is_booting and view.action_id in last.action_ids for view in draft.views):
            return (), None  # its nodes are on their way
        waited_seconds = (draft.as_of - last.planned_at).total_seconds()
        return (), Cooldown(remaining_seconds=cooldown_seconds - waited_seconds)
    mark, cause = draft.free_capacity.mark(), RemovalCause.UNDERUSED
    purchases, refused = repack.replacement_fleet(job.moving, job.nodes, cause, draft, state, policy)
    draft.free_capacity.rollback(mark)
    if not purchases:
        return (), refused
    offers = [purchase.decision.offer for purchase in purchases]
    overhead = policy.node_overhead_micro_usd_per_hour
    after = sum((offer.price_micro_usd_per_hour or 0) + overhead for offer in offers)
    boot_seconds = max(offer.boot_seconds for offer in offers)
    worth = _worth(job, after, boot_seconds, state, policy, draft.as_of, is_asked=False)
    if isinstance(worth, SavingTooSmall):
        return (), worth
    is_spot = all(offer.capacity_type is CapacityType.SPOT for offer in offers)
    if not is_spot or leaves_for_risky_spot(job.nodes, None, purchases, draft, state, policy):
        return (), None
    removed = recently_removed_types(state, policy, draft.as_of)
    pause = rebuy_cooldown(tuple(purchase.decision for purchase in purchases), removed)
    return (purchases, None) if pause is None else ((), pause)


def _worth(
    job: _OnDemand,
    after: float,
    boot_seconds: float,
    state: ClusterState,
    policy: ScalingPolicy,
    as_of: datetime,
    *,
    is_asked: bool,
) -> MovedToSpot | SavingTooSmall:
    """Return what the move saves and costs, or that it saves too little. `after`: micro-dollars an hour, new nodes.

    They are idle while they boot and the job saves, the old ones until they leave. The job waits for its restart, which
    counts in proportion to its priority above medium. What is not saved since the last save is lost, unless the job is
    about to be asked.
    """
    note_always(as_of)  # what remains, and what is not saved, moves on
    overhead = policy.node_overhead_micro_usd_per_hour
    before = sum((view.price_micro_usd_per_hour or 0) + overhead for view in job.nodes)
    ratio, ratio_min = (before - after) / before if after < before else 0.0, policy.consolidation_saving_ratio_min
    if after >= before or ratio < ratio_min:
        return SavingTooSmall(saving_ratio=ratio, saving_ratio_min=ratio_min)
    remaining = Durations(state).of_job(job.job, as_of)
    payback_seconds = policy.removal.replacement_payback_hours * HOUR_SECONDS
    remaining_seconds = payback_seconds if remaining is None else remaining.median_seconds
    waiting = policy.removal.waiting_micro_usd_per_hour * max(1.0, job.spec.priority / PRIORITY_NAMES["medium"])
    saving_seconds = policy.quotas.checkpoint_seconds_max
    move = after * (boot_seconds + saving_seconds + _RESTART_SECONDS)
    move += before * policy.removal.unneeded_idle_seconds + waiting * _RESTART_SECONDS
    if is_asked:
        gpu_count = sum(pod.requests.gpu_count for pod in job.moving)
        lost = gpu_seconds_at_risk(job.pods, policy.removal.checkpoint_interval_seconds, as_of)
        move += before * lost / max(1, gpu_count)
    needed = move * (1.0 if is_asked else _WORTH_RATIO_MIN)
    if (before - after) * remaining_seconds <= needed:
        return SavingTooSmall(
            saving_ratio=ratio,
            saving_ratio_min=ratio_min,
            saved_micro_usd=round((before - after) * remaining_seconds / HOUR_SECONDS),
            move_micro_usd=round(needed / HOUR_SECONDS),
        )
    return MovedToSpot(
        node_names=tuple(view.name for view in job.nodes),
        saving_micro_usd_per_hour=round(before - after),
        remaining_seconds=remaining_seconds,
        move_micro_usd=round(move / HOUR_SECONDS),
    )
