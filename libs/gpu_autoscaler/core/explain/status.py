"""What matters now, in one line: what a job or pod waits for, why a node exists and what keeps it.

From the state, the latest plan and the current schedule; `core/explain/story.py` has the history.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.deferred_groups import ungrouped
from gpu_autoscaler.core.demand.durations import Durations
from gpu_autoscaler.core.demand.elastic import deferred_elastic_members
from gpu_autoscaler.core.demand.fair_share import RecentUse
from gpu_autoscaler.core.demand.provisioning_requests import (
    BOOKED_SECONDS,
    booked_since,
    missing_counts,
    request_key,
    request_names,
)
from gpu_autoscaler.core.demand.queue_order import recent_uses
from gpu_autoscaler.core.disruption.orphaned_nodes import orphaned_nodes
from gpu_autoscaler.core.explain.names import named_reason, names_in_state, ordered_node, reason_sentence
from gpu_autoscaler.core.intake.annotations import annotation_violations
from gpu_autoscaler.core.intake.directives import active_directives
from gpu_autoscaler.core.limits.override_bounds import frozen_by
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.queries import counts_for_idleness, demand_of, is_waiting, job_pods, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.format import counted, instant, listed, subject_name
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.reasons.base import Reason
from gpu_autoscaler.model.reasons.defer import DeferReason, PriceUnknown
from gpu_autoscaler.model.reasons.defer_limits import Frozen
from gpu_autoscaler.model.reasons.defer_waits import (
    CapacityExpected,
    CapacityReserved,
    GangIncomplete,
    GangPending,
    QueueHeadWaits,
    ReservationHeld,
)

_ORPHANED = (
    "Its instance is terminated; the node object is deleted once the cloud has confirmed that for the second time."
)
_QueueReason = QueueHeadWaits | CapacityReserved | ReservationHeld
_PRICE_NEEDED = (
    "The node has capacity, but the job's budget cannot be enforced without a price; alternatively submit the job "
    "without budget_limit_usd."
)


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """What every line of one answer is read from, computed once."""

    state: ClusterState
    as_of: datetime
    views: tuple[NodeView, ...]
    coming: Mapping[str, tuple[NodeView, ...]]  # nodes on their way, by what they were bought for
    planned: Mapping[str, DeferReason]  # why the latest plan deferred it, by job/<id>, pod/<uid>, node/<uid>
    merged: Mapping[str, int]  # objects of one planned reason whose figures are those of one of them
    scheduled: Mapping[str, DeferReason]  # why it does not start now, by job/<id>
    uses: Mapping[str, RecentUse] = {}  # by project, of queues with fair share
    frozen: Frozen | None = None  # why nothing may be bought at all
    orphaned: frozenset[NodeUid] = frozenset()  # nodes that are removed once the cloud has confirmed it again

    @classmethod
    def of(cls, state: ClusterState, policy: ScalingPolicy, as_of: datetime, plan: Plan | None) -> "StatusView":
        all_deferred = () if plan is None else ungrouped(plan, state)
        groups = () if plan is None else plan.deferred_groups
        merged = {(group.step, group.reason): group.objects_count for group in groups if group.reasons_count > 1}
        views = node_views(state, as_of)
        coming: dict[str, tuple[NodeView, ...]] = {}
        for view in views:
            for key in demand_of(view.order) if view.is_booting else ():
                coming[key] = (*coming.get(key, ()), view)
        return cls(
            state=state,
            as_of=as_of,
            views=views,
            coming=coming,
            planned={deferred.subject: deferred.reason for deferred in reversed(all_deferred)},
            merged={
                deferred.subject: merged[deferred.step, deferred.reason]
                for deferred in all_deferred
                if merged and (deferred.step, deferred.reason) in merged
            },
            scheduled={deferred.subject: deferred.reason for deferred in schedule(state, policy, as_of).deferred},
            uses=recent_uses(state, policy, as_of),
            frozen=frozen_by(active_directives(state.directives, as_of), policy),
            orphaned=frozenset(node.node_uid for node in orphaned_nodes(state, as_of)),
        )

    def explain(self, reason: Reason, subject: str = "") -> str:
        """Return the reason's sentence and remedy, with object names in place of uids. `subject`: whose it is."""
        named = named_reason(reason, names_in_state(self.state))
        count = self.merged.get(subject) if reason is self.planned.get(subject) else None
        whose = "" if count is None else f"The figures are those of one of {count} objects deferred for this reason."
        return " ".join(filter(None, (named.sentence(), named.remedy(), whose)))


def job_line(name_or_id: str, status: StatusView) -> str:
    """Return what the job waits for and the next step, or what became of it; empty: the state does not have it."""
    jobs = status.state.jobs
    same_name = (job for job in jobs.values() if job.queued is not None and job.queued.spec.job_name == name_or_id)
    job = jobs.get(JobId(name_or_id)) or max(same_name, key=_queued_at, default=None)
    if job is None:
        return ""
    if job.rejected is not None and job.queued is None:
        violations = "; ".join(f"{violation.field} {violation.reason}" for violation in job.rejected.violations)
        return f"Rejected: {violations}. Correct the request and submit the job again."
    if job.finished is not None:
        return f"Finished: {job.finished.outcome} at {instant(job.finished.finished_at)}."
    if job.cancel_requested is not None:
        return "Cancellation was requested: the job ends when its Kubernetes Job is deleted."
    if job.queued is None:
        return "Waiting: the scheduler has not accepted the job yet."
    job_id = job.queued.job_id
    line = _waiting_job(job_id, status) if is_waiting(job) else _placed_job(job, job_id, status)
    use = status.uses.get(job.queued.spec.project_id) if is_waiting(job) else None
    run = Durations(status.state).of_job(job, status.as_of)
    rest = "" if run is None else run.sentence(from_now=not is_waiting(job))
    return " ".join(
        filter(None, (line + _elastic_members(job_id, status), rest, "" if use is None else use.sentence()))
    )


def pod_line(name_or_id: str, status: StatusView) -> str:
    """Return what the pod waits for and the next step, or where it runs; empty: the state does not have it."""
    matching = (
        pod
        for pod in status.state.pods.values()
        if name_or_id in (pod.pod_uid, pod.name, f"{pod.namespace}/{pod.name}")
    )
    pod = max(matching, key=lambda pod: (pod.created_at, pod.pod_uid), default=None)
    if pod is None:
        return ""
    if pod.phase in ("succeeded", "failed"):
        return f"Finished: {pod.phase}."
    return " ".join((_pod_line(pod, status), *invalid_annotations(pod)))


def _pod_line(pod: PodObserved, status: StatusView) -> str:
    if pod.node_name is not None:
        return f"{'Runs' if pod.phase == 'running' else 'Starting'} on node {pod.node_name}."
    if pod.is_gated and pod.job_id is not None:
        return f"Held by its scheduling gate until job {pod.job_id} may start. {job_line(pod.job_id, status)}".rstrip()
    if pod.is_gated:
        return "Waiting: the pod has a scheduling gate, which its controller must remove."
    return waiting_pod_line(pod, status)


def invalid_annotations(pod: PodObserved) -> Iterator[str]:
    """Yield a sentence for each annotation that decisions cannot read."""
    return (f"Annotation {wrong.field} {wrong.reason}." for wrong in annotation_violations(pod.annotations))


def request_line(name_or_id: str, status: StatusView) -> str:
    """Return what a ProvisioningRequest waits for, or how long its capacity is kept; empty: it does not exist."""
    requests = status.state.provisioning.values()
    named = (known for known in requests if name_or_id in request_names(known))
    request = max(named, key=lambda known: (known.created_at, known.request_uid), default=None)
    if request is None:
        return ""
    if (closed := request.closed_by) is not None:
        return f"Closed: {closed.type} since {instant(closed.since)} ({closed.reason})."
    if (since := booked_since(request)) is not None:
        count = sum(missing_counts(request, status.state))
        until = instant(since + timedelta(seconds=BOOKED_SECONDS))
        return f"Booked: capacity for {counted(count, 'pod')} that do not exist yet is kept until {until}."
    if request.trouble:
        return f"Waiting: {request.trouble}."
    keys = (request_key(request), *(f"{request_key(request)}/{number}" for number in range(len(request.pod_sets))))
    reasons = (status.planned[key] for key in keys if key in status.planned)
    reason = next((known for known in reasons if not isinstance(known, CapacityExpected)), None)
    if reason is not None:
        return _waiting(reason, status, keys[0]) + _freeze(reason, status)
    return _ordered_for(keys, status) or "Waiting: no plan has served the request yet."


def node_line(name_or_id: str, status: StatusView) -> str:
    """Return why the node exists, and what keeps or removes it; empty: it does not exist."""
    names = ((view, (view.name, view.node_uid, view.provider_id, view.action_id)) for view in status.views)
    return next((view_line(view, status) for view, known_as in names if name_or_id in known_as), "")


def view_line(view: NodeView, status: StatusView) -> str:
    """Return why this node exists, and what keeps or removes it."""
    return f"{_origin(view, status)} {_ORPHANED if view.node_uid in status.orphaned else _outlook(view, status)}"


def waiting_pod_line(pod: PodObserved, status: StatusView) -> str:
    """Return what a pod without a node waits for and the next step."""
    key = f"pod/{pod.pod_uid}"
    reason = status.planned.get(key)
    if reason is not None and not isinstance(reason, CapacityExpected):
        return _waiting(reason, status, key) + _freeze(reason, status)
    if coming := _ordered_for((key,), status):
        return coming
    if reason is not None:
        return _waiting(reason, status, key)
    if pod.unschedulable_since is None:
        return "Waiting: the Kubernetes scheduler has not tried to place the pod yet."
    message = f": {pod.unschedulable_message.rstrip('.')}" if pod.unschedulable_message else ""
    return f"Waiting: the Kubernetes scheduler found no node for the pod{message}; no plan covers the pod yet."


def is_ordered_for(pod: PodObserved, status: StatusView) -> bool:
    """Return whether a node that was bought for this pod is on its way."""
    return bool(_ordered_for((f"pod/{pod.pod_uid}",), status))


def _waiting_job(job_id: JobId, status: StatusView) -> str:
    key = f"job/{job_id}"
    planned = status.planned.get(key) or next(
        (status.planned[pod] for pod in _pod_keys(job_id, status) if pod in status.planned), None
    )
    scheduled = status.scheduled.get(key)
    if planned is not None and not isinstance(planned, CapacityExpected):
        members = f" {scheduled.sentence()}" if isinstance(scheduled, GangIncomplete | _QueueReason) else ""
        return _waiting(planned, status, key) + _freeze(planned, status) + members
    if isinstance(scheduled, _QueueReason):
        return _waiting(scheduled, status)  # the plan may count on capacity that the queue gives to others first
    coming = _ordered_for((key, *_pod_keys(job_id, status)), status)
    if coming:
        return coming
    if isinstance(scheduled, PriceUnknown):
        # The plan counts on the capacity; only the job's budget keeps the job from it.
        return f"{_waiting(scheduled, status)} {_PRICE_NEEDED}"
    reason = planned or scheduled
    return "Ready: the scheduler starts the job in its next tick." if reason is None else _waiting(reason, status)


def _elastic_members(job_id: JobId, status: StatusView) -> str:
    """What keeps the first member beyond the gang from starting, where that is not the gang itself; else nothing."""
    waiting = [
        (key, status.planned[key])
        for key in deferred_elastic_members(status.planned, job_id)
        if not isinstance(status.planned[key], CapacityExpected | GangPending)
    ]
    if not waiting:
        return ""
    key, reason = waiting[0]
    others = "" if len(waiting) == 1 else f" (and {len(waiting) - 1} more)"
    return f" The job starts without elastic {subject_name(key)}{others}, which waits: {status.explain(reason)}"


def _waiting(reason: DeferReason, status: StatusView, subject: str = "") -> str:
    return f"Waiting: {status.explain(reason, subject)}"


def _freeze(reason: DeferReason, status: StatusView) -> str:
    """A freeze that holds in addition to the reason: removing one of them alone would not help."""
    return (
        "" if status.frozen is None or isinstance(reason, Frozen) else f" In addition: {status.explain(status.frozen)}"
    )


def _ordered_for(keys: tuple[str, ...], status: StatusView) -> str:
    """The last of the nodes that were bought for any of this and are not usable yet; empty: none is on its way."""
    coming = list({view.name: view for key in keys for view in status.coming.get(key, ())}.values())
    if not coming:
        return ""
    last = max(coming, key=lambda view: (view.expected_at is not None, view.expected_at, view.name))
    order = None if last.order is None or last.node is not None else last.order.decision
    name = last.name if order is None else ordered_node(order)
    when = "soon" if last.expected_at is None else f"about {instant(last.expected_at)}"
    if len(coming) == 1:
        return f"Waiting: node {name}, which was bought for it, is expected {when}."
    return f"Waiting: {len(coming)} nodes, which were bought for it, are on their way; the last is expected {when}."


def _pod_keys(job_id: JobId, status: StatusView) -> tuple[str, ...]:
    return tuple(f"pod/{pod.pod_uid}" for pod in job_pods(status.state, job_id))


def _placed_job(job: JobRecord, job_id: JobId, status: StatusView) -> str:
    assert job.placed is not None, "a job that does not wait and has not ended is placed"  # noqa: S101 - a bug of ours
    nodes = listed(tuple(dict.fromkeys(job.placed.node_names)))
    if job.started is not None and job.started.started_at >= job.placed.placed_at:
        stays = status.planned.get(key := f"job/{job_id}")
        spot = "" if stays is None else f" It does not go back to spot: {status.explain(stays, key)}"
        return f"Runs on {nodes} since {instant(job.started.started_at)}.{spot}"
    pods = job_pods(status.state, job_id)
    running = sum(pod.phase == "running" for pod in pods)
    count = len(job.placed.node_uids)
    gang_count = count if job.queued is None else job.queued.spec.gang_count
    lost = next((pod for pod in pods if pod.unschedulable_since is not None and pod.node_name is None), None)
    why = "" if lost is None else f" Pod {lost.name}: {pod_line(lost.pod_uid, status)}"
    needed = "all members run" if count == gang_count else f"{counted(gang_count, 'member')} run"
    return f"Placed on {nodes}: the job starts when {needed} ({running} of {count} running).{why}"


def _origin(view: NodeView, status: StatusView) -> str:
    if not view.is_ours:
        return "Not managed by gpu-autoscaler: pods may use the node, and it is never removed."
    decision = None if view.order is None else view.order.decision
    if decision is None:
        return "Bought by a decision that is no longer recorded."
    return f"Bought: {reason_sentence(decision.reason, names_in_state(status.state))}"


def _outlook(view: NodeView, status: StatusView) -> str:
    if view.drain is not None and view.drain.decision is not None:
        return f"Being removed: {status.explain(view.drain.decision.reason)}"
    if view.notice is not None:
        return f"The cloud reclaims the node {'soon' if view.reclaim_at is None else f'at {instant(view.reclaim_at)}'}."
    if view.is_booting:
        expected = "soon" if view.expected_at is None else f"about {instant(view.expected_at)}"
        until = "" if view.usable_by is None else f"; it is released if it is not usable by {instant(view.usable_by)}"
        return f"The node is expected {expected}{until}."
    pods = [pod for pod in pods_by_node(status.state).get(view.name, ()) if counts_for_idleness(pod)]
    subject = f"node/{view.node_uid}"
    reason = status.planned.get(subject)
    kept = "" if reason is None else f" Its removal is deferred: {status.explain(reason, subject)}"
    if pods:
        names = listed([f"{pod.namespace}/{pod.name}" for pod in pods])
        return f"Used by {counted(len(pods), 'pod')} ({names}).{kept}"
    return f"No pod uses the node.{kept}"


def _queued_at(job: JobRecord) -> tuple[datetime, str]:
    assert job.queued is not None, "only jobs with a name are compared"  # noqa: S101 - a bug of ours
    return job.queued.queued_at, job.queued.job_id
