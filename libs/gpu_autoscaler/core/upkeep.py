"""Step `upkeep`: acts that buy and remove no capacity, each decided once, and again after a back-off.

What is due follows from the state. An act that was decided and whose effect no fact shows yet is under way until its
`retry_at`; from its second attempt on that is a deferral.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from gpu_autoscaler.core.disruption.avoided_nodes import taint_changes
from gpu_autoscaler.core.disruption.deleted_nodes import finalizer_changes, is_karpenter_managed, unannounced_deletions
from gpu_autoscaler.core.disruption.idle_jobs import IdleJob, IdleWorkload, idle_jobs, idle_workloads
from gpu_autoscaler.core.disruption.interruption import reservation_ends
from gpu_autoscaler.core.disruption.orphaned_nodes import orphaned_nodes
from gpu_autoscaler.core.disruption.periodic_checkpoints import due_checkpoints
from gpu_autoscaler.core.draft import Draft, Preemption
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.limits.override_bounds import frozen_by
from gpu_autoscaler.core.next_change import plain
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.request_answers import answers
from gpu_autoscaler.core.queueing.preemption import (
    barred_jobs,
    may_need_priority,
    may_preempt_for_others,
    preemptions,
    unasked_pods,
)
from gpu_autoscaler.core.queueing.requeue import may_requeue, unused_quotas
from gpu_autoscaler.core.queueing.schedule import Schedule, schedule
from gpu_autoscaler.core.state.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.state.upkeep_attempts import BACKOFF_SECONDS_MAX, next_attempt
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import (
    OWNER_KINDS,
    AddFinalizer,
    AnnounceIdleJob,
    AnnounceIdleWorkload,
    AnnounceReservationEnd,
    AnswerProvisioningRequest,
    AnyUpkeep,
    AvoidNode,
    CancelIdleJob,
    DeferredUpkeep,
    EndIdleWorkload,
    OpenNode,
    RemoveFinalizer,
    RemoveOrphanedNode,
    RequestCheckpoints,
    RequestJobCheckpoint,
    RequestPreemptionCheckpoint,
    RequeueJob,
    Upkeep,
    UpkeepDecision,
    WorkloadPod,
    upkeep_key,
)
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_waits import PlanFull
from gpu_autoscaler.model.reasons.preempt import beneficiary
from gpu_autoscaler.model.reasons.upkeep import (
    CheaperToEmpty,
    DeletedByKarpenter,
    FinalizerMissing,
    FinalizerUnneeded,
    InstanceGone,
    JobIdle,
    OwnerUnsupported,
    ReservationEnding,
    TaintUnneeded,
    UpkeepRepeated,
    WorkloadIdle,
)

SUBJECTS_COUNT_MAX = 64  # named in one deferral


class _Make(Protocol):
    """Makes the decision of an act that is due."""

    def __call__(self, *, action_id: ActionId, attempts_count: int, retry_at: datetime) -> AnyUpkeep: ...


class _Due(NamedTuple):
    """An act that the state calls for."""

    subject: str
    make: _Make
    held: DeferReason | None = None  # why this one is not done
    occasion: str = ""  # of `UpkeepDecision`


class _Kind(NamedTuple):
    """A kind of act: what is due, what holds all of it, and the limits of its decisions."""

    decision: type[UpkeepDecision]
    find: Callable[[ClusterState, ScalingPolicy, datetime, Draft | None], Iterable[_Due]]
    count_max: int  # in one plan
    backoff_seconds: float  # of the first attempt
    backoff_seconds_max: float = BACKOFF_SECONDS_MAX
    hold: Callable[[Draft, ClusterState, ScalingPolicy], DeferReason | None] = lambda *_: None


def decide_upkeep(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Decide each act that is due, within the limits of its kind; defer the others with a reason."""
    decisions: list[AnyUpkeep] = []
    deferred: list[DeferredUpkeep] = []
    for kind in KINDS:
        decided, held = _decide(kind, draft, state, policy)
        decisions += decided
        deferred += _grouped(kind.decision.tag(), held) if held else ()
    if not decisions and not deferred:
        return draft
    return msgspec.structs.replace(draft, upkeep=Upkeep(decisions=tuple(decisions), deferred=tuple(deferred)))


def due_upkeep(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[str, ...]:
    """Return the keys of all acts that the state calls for without a plan, also of those under way or held."""
    return tuple(
        upkeep_key(kind.decision.tag(), due.subject, due.occasion)
        for kind in KINDS
        for due in kind.find(state, policy, as_of, None)
    )


def _decide(
    kind: _Kind, draft: Draft, state: ClusterState, policy: ScalingPolicy
) -> tuple[list[AnyUpkeep], list[tuple[str, DeferReason]]]:
    """Return the decisions of this kind, and the subjects of deferred acts with their reasons."""
    decided: list[AnyUpkeep] = []
    deferred: list[tuple[str, DeferReason]] = []
    due_acts = tuple(kind.find(state, policy, draft.as_of, draft))
    hold = kind.hold(draft, state, policy) if due_acts else None
    for due in due_acts:
        key = upkeep_key(kind.decision.tag(), due.subject, due.occasion)
        attempt = next_attempt(state, key, kind.backoff_seconds, draft.as_of, kind.backoff_seconds_max)
        if attempt is None:
            known = state.upkeep[key]
            if known.attempts_count > 1:
                repeated = UpkeepRepeated(attempts_count=known.attempts_count, retry_at=known.retry_at)
                deferred.append((due.subject, repeated))
        elif (held := hold or due.held or draft.rejected.get(key)) is not None:
            deferred.append((due.subject, held))
        elif len(decided) >= kind.count_max:
            deferred.append((due.subject, PlanFull(decisions_count=len(decided))))
        else:
            attempts_count, retry_at = attempt
            action_id = draft.next_action_id()
            decided.append(due.make(action_id=action_id, attempts_count=attempts_count, retry_at=plain(retry_at)))
    return decided, deferred


def _grouped(tag: str, deferred: Iterable[tuple[str, DeferReason]]) -> Iterator[DeferredUpkeep]:
    """Yield the deferred acts of a kind by the tag of their reason, so that their number is bounded."""
    by_reason: dict[str, list[tuple[str, DeferReason]]] = {}
    for subject, reason in deferred:
        by_reason.setdefault(reason.tag(), []).append((subject, reason))
    for entries in by_reason.values():
        subjects = sorted(subject for subject, _ in entries)
        yield DeferredUpkeep(
            decision=tag,
            reason=entries[0][1],
            objects_count=len(entries),
            subjects=tuple(subjects[:SUBJECTS_COUNT_MAX]),
        )


# ---- what is due


def _orphaned_nodes(state: ClusterState, _: ScalingPolicy, as_of: datetime, __: object) -> Iterator[_Due]:
    for orphan in orphaned_nodes(state, as_of):
        reason = InstanceGone(gone_since=orphan.gone_since)
        uid, name = orphan.node_uid, orphan.node_name
        make = partial(RemoveOrphanedNode, node_uid=uid, node_name=name, provider_id=orphan.provider_id, reason=reason)
        yield _Due(f"node/{uid}", make)


def _missing_finalizers(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for node in _with_finalizer_change(state, policy, as_of, is_wanted=True):
        make = partial(AddFinalizer, node_uid=node.node_uid, node_name=node.name, reason=FinalizerMissing())
        yield _Due(f"node/{node.node_uid}", make)


def _unneeded_finalizers(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for node in _with_finalizer_change(state, policy, as_of, is_wanted=False):
        cause: Literal["policy", "karpenter", "instance_ended"] = "instance_ended"
        if not policy.removal.is_finalizer_on:
            cause = "policy"
        elif is_karpenter_managed(node):
            cause = "karpenter"
        reason = FinalizerUnneeded(cause=cause)
        make = partial(RemoveFinalizer, node_uid=node.node_uid, node_name=node.name, reason=reason)
        yield _Due(f"node/{node.node_uid}", make)


def _with_finalizer_change(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime, *, is_wanted: bool
) -> Iterator[NodeObserved]:
    for change in finalizer_changes(state, policy, as_of):
        if change.is_wanted is is_wanted and change.view.node is not None:
            yield change.view.node


def _nodes_to_avoid(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for change in taint_changes(state, policy, as_of):
        if change.cause is None:
            reason = CheaperToEmpty(
                node_micro_usd_per_hour=change.node_micro_usd_per_hour,
                open_micro_usd_per_hour=change.open_micro_usd_per_hour,
            )
            make = partial(AvoidNode, node_uid=change.node_uid, node_name=change.node_name, reason=reason)
            yield _Due(f"node/{change.node_uid}", make)


def _nodes_to_open(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for change in taint_changes(state, policy, as_of):
        if change.cause is not None:
            reason = TaintUnneeded(cause=change.cause)
            make = partial(OpenNode, node_uid=change.node_uid, node_name=change.node_name, reason=reason)
            yield _Due(f"node/{change.node_uid}", make)


def _unannounced_deletions(state: ClusterState, *_: object) -> Iterator[_Due]:
    for deletion in unannounced_deletions(state):
        uid, name, since = deletion.node_uid, deletion.node_name, deletion.since
        reason = DeletedByKarpenter(deleted_at=since)
        yield _Due(f"node/{uid}", partial(RequestCheckpoints, node_uid=uid, node_name=name, since=since, reason=reason))


def _unannounced_jobs(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for job in idle_jobs(state, policy, as_of):
        if job.announced_at is None:
            make = partial(
                AnnounceIdleJob,
                job_id=job.job_id,
                namespace=job.pods[0].namespace,
                pods=_named(job.pods),
                announced_at=plain(as_of),
                ends_at=as_of + timedelta(seconds=policy.idle_jobs.grace_seconds),
                reason=_job_idle(job, policy),
            )
            yield _Due(f"job/{job.job_id}", make)


def _idle_jobs(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for job in idle_jobs(state, policy, as_of):
        if job.ends_at is not None and as_of >= job.ends_at:
            make = partial(CancelIdleJob, job_id=job.job_id, reason=_job_idle(job, policy))
            yield _Due(f"job/{job.job_id}", make)


def _job_idle(job: IdleJob, policy: ScalingPolicy) -> JobIdle:
    return JobIdle(
        idle_seconds=job.idle_seconds,
        idle_seconds_max=policy.idle_jobs.idle_seconds,
        busy_ratio_max=policy.idle_jobs.busy_ratio_max,
        announced_at=job.announced_at,
    )


def _named(pods: Iterable[PodObserved]) -> tuple[WorkloadPod, ...]:
    return tuple(WorkloadPod(name=pod.name, pod_uid=pod.pod_uid) for pod in pods)


def _unannounced_workloads(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for workload in idle_workloads(state, policy, as_of):
        if workload.announced_at is None:
            ends_at = as_of + timedelta(seconds=policy.idle_jobs.grace_seconds)
            more = {"announced_at": plain(as_of), "ends_at": ends_at}
            yield _of_workload(AnnounceIdleWorkload, workload, policy, more)


def _ending_workloads(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for workload in idle_workloads(state, policy, as_of):
        pod = workload.pods[0]
        if workload.ends_at is not None and as_of >= workload.ends_at:
            more = {"owner_kind": pod.owner_kind, "owner_uid": pod.owner_uid or ""}
            yield _of_workload(EndIdleWorkload, workload, policy, more)


def _of_workload(
    kind: type[AnnounceIdleWorkload | EndIdleWorkload],
    workload: IdleWorkload,
    policy: ScalingPolicy,
    more: Mapping[str, Any],
) -> _Due:
    rules, pods = policy.idle_jobs, workload.pods
    reason = WorkloadIdle(
        idle_seconds=workload.idle_seconds,
        idle_seconds_max=rules.idle_seconds,
        busy_ratio_max=rules.busy_ratio_max,
        announced_at=workload.announced_at,
    )
    owner = pods[0].owner_kind
    held = None if owner is None or owner in OWNER_KINDS else OwnerUnsupported(owner_kind=owner)
    make = partial(kind, namespace=pods[0].namespace, pods=_named(pods), reason=reason, **more)
    return _Due(f"pod/{pods[0].pod_uid}", make, held)


def _due_checkpoints(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for due in due_checkpoints(state, policy, as_of):
        make = partial(
            RequestJobCheckpoint,
            job_id=due.job_id,
            node_names=due.node_names,
            since=due.since,
            requested_at=plain(as_of),
            reason=due.reason,
        )
        yield _Due(f"job/{due.job_id}", make, due.held, due.since.isoformat())


def _preempted_jobs(state: ClusterState, policy: ScalingPolicy, as_of: datetime, draft: Draft | None) -> Iterator[_Due]:
    """Yield the jobs that the scheduler is about to preempt, found as it finds them; without a plan that defers jobs
    there are none."""
    if draft is None:
        return
    deadline_at = plain(as_of) + timedelta(seconds=policy.quotas.checkpoint_seconds_max)
    for victim in _victims(draft, state, policy):
        node_names = {pod.node_name for pod in unasked_pods(victim, state) if pod.node_name is not None}
        if node_names:
            make = partial(
                RequestPreemptionCheckpoint,
                job_id=victim.job_id,
                attempt=victim.attempt,
                node_names=tuple(sorted(node_names)),
                requested_at=plain(as_of),
                deadline_at=deadline_at,
                reason=victim.reason,
            )
            yield _Due(f"job/{victim.job_id}", make, None, str(victim.attempt))


def _victims(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> tuple[Preemption, ...]:
    """Return the attempts that are about to end: for jobs that wait, else one that goes back to spot."""
    is_one_held = any(held.subject.startswith("job/") for held in draft.deferred)
    victims = _queue(draft, state, policy).victims if is_one_held and may_preempt_for_others(policy) else ()
    return victims or (() if draft.returning is None else (draft.returning,))


class _Queue(NamedTuple):
    """What becomes of the queue, found as the scheduler finds it."""

    scheduled: Schedule
    victims: tuple[Preemption, ...]


@cached_by_identity(1)  # of one plan: preemptions and requeues both need it
def _queue(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> _Queue:
    scheduled = schedule(state, policy, draft.as_of)
    barred = barred_jobs(draft.deferred) if may_need_priority(state, policy, scheduled.deferred) else {}
    return _Queue(scheduled, preemptions(state, policy, draft.as_of, scheduled=scheduled, barred=barred))


def _requeued_jobs(state: ClusterState, policy: ScalingPolicy, as_of: datetime, draft: Draft | None) -> Iterator[_Due]:
    """Yield the jobs whose quota others can use, except those for which others are about to be preempted."""
    if draft is None or not may_requeue(draft.deferred):
        return
    scheduled, victims = _queue(draft, state, policy)
    for job_id, attempt, reason in unused_quotas(state, policy, as_of, deferred=draft.deferred, scheduled=scheduled):
        if all(beneficiary(victim.reason) != job_id for victim in victims):
            make = partial(RequeueJob, job_id=job_id, attempt=attempt, reason=reason)
            yield _Due(f"job/{job_id}", make, None, str(attempt))


def _reservation_ends(state: ClusterState, policy: ScalingPolicy, as_of: datetime, _: object) -> Iterator[_Due]:
    for end in reservation_ends(state, policy, as_of):
        reason = ReservationEnding(paid_until=end.paid_until, drain_seconds=policy.reservation_drain_seconds)
        make = partial(AnnounceReservationEnd, provider_id=end.provider_id, reclaim_at=end.paid_until, reason=reason)
        yield _Due(f"instance/{end.provider_id}", make)


def _answers(state: ClusterState, _: ScalingPolicy, as_of: datetime, draft: Draft | None) -> Iterator[_Due]:
    served = {} if draft is None else draft.served
    for request, condition, is_true, code, reason in answers(state, as_of, served):
        make = partial(
            AnswerProvisioningRequest,
            request_uid=request.request_uid,
            namespace=request.namespace,
            name=request.name,
            condition=condition,
            is_true=is_true,
            code=code,
            at=plain(as_of),
            reason=reason,
        )
        yield _Due(f"provisioning/{request.request_uid}/{reason.tag()}", make)


# ---- what holds it


def _old_data(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> DeferReason | None:
    return stale_watch(state, policy, draft.as_of)


def _freeze(draft: Draft, _: ClusterState, policy: ScalingPolicy) -> DeferReason | None:
    return frozen_by(draft.directives, policy)


def _freeze_or_old_data(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> DeferReason | None:
    stale = stale_watch(state, policy, draft.as_of) or stale_instances(state, policy, draft.as_of)
    return frozen_by(draft.directives, policy) or stale


# Numbers and back-offs: our own; of a requeue those of Kueue's `requeuingStrategy`. Karpenter evicts at once, so that
# its nodes are not waited for. The first back-off of a removal is a little longer than the time between two questions
# to the cloud (`scaler/orphaned_nodes.py: ASKED_AGAIN_SECONDS`): the first attempt asks, the second one removes. Taints
# as many at once as cluster-autoscaler's `--max-bulk-soft-taint-count` allows by default.
KINDS = (
    _Kind(AnswerProvisioningRequest, _answers, count_max=64, backoff_seconds=5.0, hold=_old_data),
    _Kind(RequestCheckpoints, _unannounced_deletions, count_max=32, backoff_seconds=5.0),
    _Kind(RemoveFinalizer, _unneeded_finalizers, count_max=32, backoff_seconds=15.0),
    _Kind(AddFinalizer, _missing_finalizers, count_max=32, backoff_seconds=15.0),
    _Kind(OpenNode, _nodes_to_open, count_max=10, backoff_seconds=15.0, hold=_freeze),
    _Kind(AvoidNode, _nodes_to_avoid, count_max=10, backoff_seconds=15.0, hold=_freeze_or_old_data),
    _Kind(RequestPreemptionCheckpoint, _preempted_jobs, count_max=64, backoff_seconds=15.0),
    _Kind(RequeueJob, _requeued_jobs, count_max=32, backoff_seconds=60.0, backoff_seconds_max=3600.0),
    _Kind(RequestJobCheckpoint, _due_checkpoints, count_max=32, backoff_seconds=600.0),
    _Kind(AnnounceReservationEnd, _reservation_ends, count_max=32, backoff_seconds=60.0),
    _Kind(RemoveOrphanedNode, _orphaned_nodes, count_max=8, backoff_seconds=70.0, hold=_freeze_or_old_data),
    _Kind(AnnounceIdleWorkload, _unannounced_workloads, count_max=32, backoff_seconds=60.0, hold=_freeze),
    _Kind(EndIdleWorkload, _ending_workloads, count_max=32, backoff_seconds=60.0, hold=_freeze),
    _Kind(AnnounceIdleJob, _unannounced_jobs, count_max=32, backoff_seconds=60.0, hold=_freeze),
    _Kind(CancelIdleJob, _idle_jobs, count_max=32, backoff_seconds=60.0, hold=_freeze),
)
