"""The one thing that matters now, in a line: what a job or pod waits for, why a node exists and what keeps it.

From the state, the last plan and today's schedule; the story of how it came to that is told by `core/explain.py`.
"""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from gpu_autoscaler.core.bounds import frozen_by
from gpu_autoscaler.core.directives import active_directives
from gpu_autoscaler.core.further import deferred_elastic_members
from gpu_autoscaler.core.nodes.life import NodeView, node_views
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.removing.leftovers import leftovers
from gpu_autoscaler.core.state import ClusterState, JobRecord
from gpu_autoscaler.core.views import counts_for_idleness, is_waiting, job_pods, pods_by_node
from gpu_autoscaler.core.words.remedies import remedy
from gpu_autoscaler.core.words.sentences import sentence
from gpu_autoscaler.core.words.wording import counted, instant, named, thing
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import reasons
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.waits import GangPending, GangIncomplete

_LEFT_OVER = (
    "Its instance is gone, and nobody took the node away: it is removed from Kubernetes once the cloud, asked for that "
    "very instance, has said so twice."
)
_PRICE_NEEDED = (
    "There is room for it there, but its budget cannot be held where no price is known: add the price to the "
    "provider's list of prices, or cancel the job and ask again without budget_limit_usd."
)


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What every line of one answer is read from, computed once."""

    state: ClusterState
    as_of: datetime
    views: tuple[NodeView, ...]
    coming: Mapping[str, tuple[NodeView, ...]]  # nodes on their way, by what they were bought for
    planned: Mapping[
        str, reasons.DeferReason
    ]  # why the last plan did nothing for it, by job/<id>, pod/<uid>, node/<uid>
    scheduled: Mapping[str, reasons.DeferReason]  # why it does not start now, by job/<id>
    frozen: reasons.Frozen | None = None  # whether anything may be bought at all
    left_over: frozenset[NodeUid] = frozenset()  # nodes that are removed once the cloud has said so again

    @classmethod
    def of(cls, state: ClusterState, policy: ScalingPolicy, as_of: datetime, plan: Plan | None) -> "Sight":
        """The sight from this state; `plan` is the last that was made, None where it is not known."""
        deferred = () if plan is None else plan.deferred
        views = node_views(state, as_of)
        coming: dict[str, tuple[NodeView, ...]] = {}
        for view in views:
            for key in _demand(view) if view.is_booting else ():
                coming[key] = (*coming.get(key, ()), view)
        return cls(
            state=state,
            as_of=as_of,
            views=views,
            coming=coming,
            planned={held.subject: held.reason for held in reversed(deferred)},
            scheduled={held.subject: held.reason for held in schedule(state, policy, as_of).deferred},
            frozen=frozen_by(active_directives(state.directives, as_of), policy),
            left_over=frozenset(one.node_uid for one in leftovers(state, policy, as_of)),
        )


def job_line(name_or_id: str, sight: Sight) -> str:
    """Return what the job waits for and when it starts, or what became of it; empty: the state does not have it."""
    jobs = sight.state.jobs
    named_so = (one for one in jobs.values() if one.queued is not None and one.queued.spec.job_name == name_or_id)
    job = jobs.get(JobId(name_or_id)) or max(named_so, key=_queued_at, default=None)
    if job is None:
        return ""
    if job.rejected is not None and job.queued is None:
        mistakes = "; ".join(f"{mistake.field} {mistake.reason}" for mistake in job.rejected.mistakes)
        return f"Refused: {mistakes}. It starts when it is asked for again without that."
    if job.finished is not None:
        return f"Over: {job.finished.outcome} at {instant(job.finished.finished_at)}."
    if job.cancel_requested is not None:
        return "Somebody asked to cancel it; it ends when its Kubernetes Job is gone."
    if job.queued is None:
        return "Waiting to be accepted; it starts when the scheduler has let it in and finds room for it."
    said = _waiting(job.queued.job_id, sight) if is_waiting(job) else _placed(job, job.queued.job_id, sight)
    return said + _of_further(job.queued.job_id, sight)


def pod_line(name_or_id: str, sight: Sight) -> str:
    """Return what the pod waits for and when it starts, or where it runs; empty: the state does not have it."""
    found = (
        pod for pod in sight.state.pods.values() if name_or_id in (pod.pod_uid, pod.name, f"{pod.namespace}/{pod.name}")
    )
    pod = max(found, key=lambda each: (each.created_at, each.pod_uid), default=None)
    if pod is None:
        return ""
    if pod.phase in ("succeeded", "failed"):
        return f"Over: {pod.phase}."
    if pod.node_name is not None:
        return f"{'Runs' if pod.phase == 'running' else 'Is started'} on node {pod.node_name}."
    if pod.is_gated and pod.job_id is not None:
        return f"Held at its gate until job {pod.job_id} may start. {job_line(pod.job_id, sight)}".rstrip()
    if pod.is_gated:
        return "Waiting because it has a scheduling gate; it starts when who set the gate takes it away."
    return waiting_pod_line(pod, sight)


def node_line(name_or_id: str, sight: Sight) -> str:
    """Return why the node exists and what keeps it, or takes it away; empty: it is gone, or never was."""
    view = next(
        (one for one in sight.views if name_or_id in (one.name, one.node_uid, one.provider_id, one.action_id)), None
    )
    return "" if view is None else view_line(view, sight)


def view_line(view: NodeView, sight: Sight) -> str:
    """Return why this node exists and what keeps it, or takes it away."""
    becomes = _LEFT_OVER if view.node_uid in sight.left_over else _what_becomes(view, sight)
    return f"{_why_there(view)} {becomes}"


def _waiting(job_id: JobId, sight: Sight) -> str:
    key = f"job/{job_id}"
    planned = sight.planned.get(key) or next(
        (sight.planned[pod] for pod in _pod_keys(job_id, sight) if pod in sight.planned), None
    )
    scheduled = sight.scheduled.get(key)
    if planned is not None and not isinstance(planned, reasons.CapacityExpected):
        members = f" {sentence(scheduled)}" if isinstance(scheduled, GangIncomplete) else ""
        return _because(planned) + _besides(planned, sight) + members
    coming = _ordered_for((key, *_pod_keys(job_id, sight)), sight)
    if coming:
        return coming
    if isinstance(scheduled, reasons.PriceUnknown):
        # There is room, which the plan counts on; only a budget keeps the job from it.
        return f"{_because(scheduled)} {_PRICE_NEEDED}"
    reason = planned or scheduled
    return _because(reason) if reason is not None else "It may start: the scheduler places it with its next look."


def _of_further(job_id: JobId, sight: Sight) -> str:
    """What keeps the first member beyond the gang from its room, where that is more than its gang; else nothing."""
    found = [(key, sight.planned[key]) for key in deferred_elastic_members(sight.planned, job_id)]
    waiting = [(key, reason) for key, reason in found if not isinstance(reason, reasons.CapacityExpected | GangPending)]
    if not waiting:
        return ""
    key, reason = waiting[0]
    others = f" ({len(waiting) - 1} more wait as well)" if len(waiting) > 1 else ""
    return (
        f" It starts without {thing(key)}{others}, which waits because {_within(sentence(reason)).rstrip('.')}; it "
        f"joins when {remedy(reason)}."
    )


def waiting_pod_line(pod: PodObserved, sight: Sight) -> str:
    """Return what a pod without a node waits for and when it starts."""
    key = f"pod/{pod.pod_uid}"
    reason = sight.planned.get(key)
    if reason is not None and not isinstance(reason, reasons.CapacityExpected):
        return _because(reason) + _besides(reason, sight)
    if coming := _ordered_for((key,), sight):
        return coming
    if reason is not None:
        return _because(reason)
    if pod.unschedulable_since is None:
        return "Waiting because Kubernetes has not looked at it yet; it starts when its scheduler binds it."
    said = f": {pod.unschedulable_message.rstrip('.')}" if pod.unschedulable_message else ""
    return f"Waiting because Kubernetes found no node for it{said}; no plan has spoken of it yet."


def _because(reason: reasons.DeferReason) -> str:
    return f"Waiting because {_within(sentence(reason))}; it starts when {remedy(reason)}."


def _besides(reason: reasons.DeferReason, sight: Sight) -> str:
    """That a freeze holds back what another reason holds back already: without the one, the other would still."""
    if sight.frozen is None or isinstance(reason, reasons.Frozen):
        return ""
    return f" Besides, {_within(sentence(sight.frozen))}; nothing is bought until {remedy(sight.frozen)}."


def _within(said: str) -> str:
    """The sentence as a part of another."""
    said = said.rstrip(".")
    return said if said[1:2].isupper() else said[:1].lower() + said[1:]  # GPU, EC2


def is_ordered_for(pod: PodObserved, sight: Sight) -> bool:
    """Return whether a node that was bought for this pod is on its way."""
    return bool(_ordered_for((f"pod/{pod.pod_uid}",), sight))


def _ordered_for(keys: tuple[str, ...], sight: Sight) -> str:
    """The last of the nodes that were bought for any of this and are not usable yet; empty: none is on its way."""
    coming = list({view.name: view for key in keys for view in sight.coming.get(key, ())}.values())
    if not coming:
        return ""
    last = max(coming, key=lambda view: (view.expected_at is not None, view.expected_at, view.name))
    when = "soon" if last.expected_at is None else f"about {instant(last.expected_at)}"
    what = (
        "the node that was bought for it is" if len(coming) == 1 else f"{len(coming)} nodes that were bought for it are"
    )
    return f"Waiting because {what} on the way; it starts when {last.name} is usable, {when}."


def _demand(view: NodeView) -> tuple[str, ...]:
    decision = None if view.order is None else view.order.decision
    reason = None if decision is None else decision.reason
    return reason.demand if isinstance(reason, reasons.UnmetDemand | reasons.ReplacesAtRiskNode) else ()


def _pod_keys(job_id: JobId, sight: Sight) -> tuple[str, ...]:
    return tuple(f"pod/{pod.pod_uid}" for pod in job_pods(sight.state, job_id))


def _placed(job: JobRecord, job_id: JobId, sight: Sight) -> str:
    assert job.placed is not None, "a job that does not wait and has not ended is placed"  # noqa: S101 - as it says
    where = named(tuple(dict.fromkeys(job.placed.node_names)))
    if job.started is not None and job.started.started_at >= job.placed.placed_at:
        return f"Runs on {where} since {instant(job.started.started_at)}."
    pods = job_pods(sight.state, job_id)
    running = sum(pod.phase == "running" for pod in pods)
    count = len(job.placed.node_uids)
    gang_count = count if job.queued is None else job.queued.spec.gang_count
    lost = next((pod for pod in pods if pod.unschedulable_since is not None and pod.node_name is None), None)
    why = "" if lost is None else f" {lost.name}: {pod_line(lost.pod_uid, sight)}"
    needed = "all members run" if count == gang_count else f"{counted(gang_count, 'member')} run"
    return f"Placed on {where}; it starts when {needed} ({running} of {count} do).{why}"


def _why_there(view: NodeView) -> str:
    if not view.is_ours:
        return "It is not ours: it is room for work, and nobody here removes it."
    decision = None if view.order is None else view.order.decision
    if decision is None:
        return "It was bought by a decision that the record does not have any more."
    return f"Bought because: {sentence(decision.reason)}"


def _what_becomes(view: NodeView, sight: Sight) -> str:
    if view.drain is not None and view.drain.decision is not None:
        return f"It leaves: {sentence(view.drain.decision.reason)}"
    if view.notice is not None:
        return f"The cloud takes it back {'soon' if view.reclaim_at is None else f'at {instant(view.reclaim_at)}'}."
    if view.is_booting:
        expected = "" if view.expected_at is None else f", expected about {instant(view.expected_at)}"
        until = "" if view.usable_by is None else f"; given back if it is not usable by {instant(view.usable_by)}"
        return f"It is on its way{expected}{until}."
    here = [pod for pod in pods_by_node(sight.state).get(view.name, ()) if counts_for_idleness(pod)]
    reason = sight.planned.get(f"node/{view.node_uid}")
    kept = "" if reason is None else f" {sentence(reason)} It goes when {remedy(reason)}."
    if here:
        who = named([f"{pod.namespace}/{pod.name}" for pod in here])
        return f"It is kept by {counted(len(here), 'pod')} ({who}).{kept}"
    return f"Nothing runs on it.{kept}"


def _queued_at(job: JobRecord) -> tuple[datetime, str]:
    assert job.queued is not None, "only jobs with a name are compared"  # noqa: S101 - as it says
    return job.queued.queued_at, job.queued.job_id
