"""Fold facts into the state. Total: no valid fact raises, also for unknown entities.

Streams interleave arbitrarily, and any fact may be redelivered. The state is the same in every case: a fact changes
only fields of its own stream, older versions are ignored, and steps happen once.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, assert_never

from msgspec.structs import replace

from gpu_autoscaler.core.intake.admission import job_id_of
from gpu_autoscaler.core.intake.directives import fold_directive
from gpu_autoscaler.core.intake.reported_demand import fold_reported_demand
from gpu_autoscaler.core.state.demand_history import EMPTY_HISTORY, HOURS_COUNT_MAX, add_sample
from gpu_autoscaler.core.state.duration_history import fold_duration
from gpu_autoscaler.core.state.hours import hour, hour_end
from gpu_autoscaler.core.state.interruption_history import add_termination, capacity_pool_of
from gpu_autoscaler.core.state.ledger import fold_cost
from gpu_autoscaler.core.state.node_shortfalls import observed_allocatable_of
from gpu_autoscaler.core.state.queries import is_finished, is_workload, listed_instances
from gpu_autoscaler.core.state.rejections import REJECTIONS_COUNT_MAX, is_forgotten
from gpu_autoscaler.core.state.retention import is_long_idle, is_past_retention, notice_ended_at, prune, prune_pod
from gpu_autoscaler.core.state.state import (
    ClusterState,
    DrainRecord,
    GangRecord,
    JobRecord,
    NoticeRecord,
    OrderRecord,
    RejectionRecord,
    Tombstone,
    Usable,
)
from gpu_autoscaler.core.state.tables import Batch, E, Entities, version_of
from gpu_autoscaler.core.state.upkeep_attempts import fold_upkeep
from gpu_autoscaler.core.state.usage_history import fold_usage
from gpu_autoscaler.events import catalog, gpu, job, node, pod, scaling, spot
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact, Versioned
from gpu_autoscaler.events.scaling import ScalingDemandSampled, ScalingForecastScored
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer_waits import GangBackoff
from gpu_autoscaler.model.reasons.drain import DrainReason, GangAbandoned, ReleaseReason

# Functions that apply a fact to one record return the same object if the fact changes nothing.

_NEVER = datetime.max.replace(tzinfo=UTC)

OrderStep = scaling.ScalingNodeOrdered | scaling.ScalingNodeLaunched | scaling.ScalingLaunchRefused
_BesidePods = (
    pod.PodBudgetObserved
    | pod.PodBudgetGone
    | pod.PodBudgetListed
    | pod.PodQuotaObserved
    | pod.PodQuotaGone
    | pod.PodQuotaListed
    | pod.PodProvisioningObserved
    | pod.PodProvisioningGone
    | pod.PodProvisioningListed
)
DrainStep = scaling.ScalingDrainStarted | scaling.ScalingPodEvicted | scaling.ScalingNodeDrained


def apply_to_job(record: JobRecord, fact: catalog.OneJobFact, at: datetime) -> JobRecord:
    """The first fact wins for steps that happen once, else the highest attempt or version, or the last fact."""
    match fact:
        case job.JobRequested():
            # The template is in the store: no state holds the templates of all open jobs.
            return record if record.requested else replace(record, requested=fact.without_template(), requested_at=at)
        case job.JobCancelRequested():
            return record if record.cancel_requested else replace(record, cancel_requested=fact)
        case job.JobQueued():
            return record if record.queued else replace(record, queued=fact)
        case job.JobRejected():
            # The last one wins: with the age of the first, a repeated rejection would be pruned and folded again.
            is_older = record.rejected_at is not None and at <= record.rejected_at
            return record if is_older else replace(record, rejected=fact, rejected_at=at)
        case job.JobPlaced():
            is_newer = record.placed is None or fact.attempt > record.placed.attempt
            return replace(record, placed=fact) if is_newer else record
        case job.JobPreempted():
            is_newer = record.preempted is None or fact.attempt > record.preempted.attempt
            return replace(record, preempted=fact) if is_newer else record
        case job.JobStarted():
            return _apply_start(record, fact)
        case job.JobEstimated():
            return record if record.estimated else replace(record, estimated=fact)
        case job.JobEstimateScored(run=None):
            return record if record.scored else replace(record, scored=fact)
        case job.JobEstimateScored():
            return record if record.run_scored else replace(record, run_scored=fact)
        case job.JobFinished():
            return record if record.finished else replace(record, finished=fact)
        case _:
            assert_never(fact)


def _apply_start(record: JobRecord, fact: job.JobStarted) -> JobRecord:
    """Keep the newest start, of repeats the earliest.

    A restarted watcher reports when it first saw the job running: of the same attempt that is no newer start.
    """
    known = record.started
    if known is None:
        return replace(record, started=fact)
    is_newer = (version_of(fact), known.started_at) > (version_of(known), fact.started_at)
    older, newer = (known, fact) if is_newer else (fact, known)
    is_same = newer.is_found_running and older.started_at <= newer.started_at and not _has_ended(record, older, newer)
    last = older if is_same else newer
    return record if last is known else replace(record, started=last)


def _has_ended(record: JobRecord, older: job.JobStarted, newer: job.JobStarted) -> bool:
    """True if the attempt of the older start ended before the newer one."""
    ends = [] if record.placed is None else [record.placed.placed_at]
    ends += [] if record.preempted is None else [record.preempted.preempted_at]
    return any(older.started_at < end <= newer.started_at for end in ends)


def apply_to_order(record: OrderRecord, fact: OrderStep) -> OrderRecord:
    """Every step of a purchase happens once."""
    match fact:
        case scaling.ScalingNodeOrdered():
            return record if record.ordered else replace(record, ordered=fact)
        case scaling.ScalingNodeLaunched():
            return record if record.launched else replace(record, launched=fact)
        case scaling.ScalingLaunchRefused():
            return record if record.refused else replace(record, refused=fact)
        case _:
            assert_never(fact)


def apply_to_drain(record: DrainRecord, fact: DrainStep) -> DrainRecord:
    """Every step of a removal happens once; a forced eviction of a pod replaces a graceful one."""
    match fact:
        case scaling.ScalingDrainStarted():
            return record if record.started else replace(record, started=fact)
        case scaling.ScalingPodEvicted():
            known = record.evicted.get(fact.pod_uid)
            if known is not None and (known.is_forced or not fact.is_forced):
                return record
            return replace(record, evicted={**record.evicted, fact.pod_uid: fact})
        case scaling.ScalingNodeDrained():
            return record if record.drained else replace(record, drained=fact)
        case _:
            assert_never(fact)


def apply_notice(notices: Mapping[str, NoticeRecord], fact: spot.SpotNoticeReceived) -> NoticeRecord:
    """The earliest deadline wins; a withdrawn notice is active again when the cloud repeats it later. Notices of one
    interruption from two sources are one notice, with the id of the first."""
    received_at = fact.received_at
    record = notices.get(fact.notice_id)
    if record is None:
        record = next((known for known in notices.values() if is_same_notice(known, fact)), None)
        if record is not None:
            fact = replace(fact, provider_event=record.notice.provider_event, channel=record.notice.channel)
    if record is None:
        return NoticeRecord(notice=fact, first_received_at=received_at, last_received_at=received_at)
    if record.withdrawn is not None and received_at <= record.withdrawn.withdrawn_at:
        return record  # a repeat of the withdrawn notice
    if not record.is_active:
        return replace(record, notice=fact, first_received_at=received_at, last_received_at=received_at)
    is_earlier = (fact.reclaim_at or _NEVER) < (record.notice.reclaim_at or _NEVER)
    if not is_earlier and record.first_received_at <= received_at <= record.last_received_at:
        return record
    return replace(
        record,
        notice=fact if is_earlier else record.notice,
        first_received_at=min(record.first_received_at, received_at),
        last_received_at=max(record.last_received_at, received_at),
    )


def is_same_notice(record: NoticeRecord, fact: spot.SpotNoticeReceived) -> bool:
    """True for an active notice of the same kind from another source; a queue may send several events for one."""
    known = record.notice
    is_another_channel = known.channel != fact.channel or fact.channel == "queue"
    return is_another_channel and record.is_active and (known.provider_id, known.kind) == (fact.provider_id, fact.kind)


def apply_withdrawal(record: NoticeRecord, fact: spot.SpotNoticeWithdrawn) -> NoticeRecord:
    """The last withdrawal wins; a withdrawal that is older than the notice has no effect."""
    known = record.withdrawn
    is_old = known is not None and known.withdrawn_at >= fact.withdrawn_at
    return record if is_old or fact.withdrawn_at <= record.last_received_at else replace(record, withdrawn=fact)


def fold_demand_history(batch: Batch, fact: ScalingDemandSampled | ScalingForecastScored) -> None:
    """Add a demand sample or the score of an hour; what is not newer changes nothing."""
    if isinstance(fact, ScalingDemandSampled):
        histories, now = batch.demand_history, dict(fact.gpu_counts)
        for kind in sorted({*now, *histories.now}):  # a missing kind has no demand
            before = histories.get(kind) or EMPTY_HISTORY
            after = add_sample(before, fact.minute, now.get(kind, 0))
            if after is not before:
                histories.set(kind, after)
        return
    scores = batch.forecast_scores.get(fact.kind) or ()
    if not scores or fact.score.hour > scores[-1].hour:
        batch.forecast_scores.set(fact.kind, (*scores, fact.score)[-HOURS_COUNT_MAX:])


def fold_abandoned_gang(batch: Batch, reason: DrainReason | ReleaseReason, planned_at: datetime) -> None:
    """Count an abandoned gang, once per plan; late releases during its back-off do not count."""
    if not isinstance(reason, GangAbandoned) or reason.defer_reason == GangBackoff.tag():
        return
    before = batch.gangs.get(reason.gang)
    if before is None or planned_at > before.abandoned_at:
        count = 1 if before is None else before.abandoned_count + 1
        batch.gangs.set(reason.gang, GangRecord(abandoned_count=count, abandoned_at=planned_at))


def fold_rejections(batch: Batch, plan: Plan) -> None:
    """Keep until when each subject is set aside, and how often it was refused; forget both an hour after the end.

    Above REJECTIONS_COUNT_MAX those whose next attempt comes first are removed.
    """
    rejections = batch.rejections
    for subject in [key for key, known in rejections.now.items() if is_forgotten(known, plan.as_of)]:
        rejections.remove(subject)
    for rejection in plan.rejected:
        for subject in rejection.subjects:
            known = rejections.get(subject)
            if known is not None and known.retry_at >= rejection.retry_at:
                continue  # delivered again
            attempts_count = 1 if known is None else known.attempts_count + 1
            record = RejectionRecord(
                violation=rejection.violation, attempts_count=attempts_count, retry_at=rejection.retry_at
            )
            rejections.set(subject, record)
    if (excess := len(rejections.now) - REJECTIONS_COUNT_MAX) > 0:
        first = sorted(rejections.now, key=lambda subject: (rejections.now[subject].retry_at, subject))
        for subject in first[:excess]:
            rejections.remove(subject)


# By type, as a check against unions of types takes longer than most folds. Others are of a newer version, or of a test.
_DOMAINS: Mapping[type[Fact], str] = {fact: fact.domain() for fact in catalog.FACTS}
_WITHOUT_TIME = frozenset({"job", "demand", "shadow"})  # jobs advance it by some facts only, see `_job`
# Fields of a JobRecord whose first fact counts.
_HAPPEN_ONCE = ("requested", "queued", "cancel_requested", "estimated", "scored")


def _joined(before: tuple[PodUid, ...], more: tuple[PodUid, ...]) -> tuple[PodUid, ...]:
    return tuple(sorted({*before, *more}))


def fold(state: ClusterState, recorded: Iterable[Recorded]) -> ClusterState:
    """Return the state after these facts. Unknown fact types change nothing."""
    batch = Batch(state)
    folding = _Folding(batch)
    for record in recorded:
        if (domain := _DOMAINS.get(type(record.envelope.fact))) is not None:
            folding.take(record, domain)
    return batch.state()


class _Folding:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._hour_ends_at: dict[str, datetime] = {}  # by domain: end of the current hour

    def take(self, recorded: Recorded, domain: str) -> None:
        """Fold one fact of the domain. A new fact type fails type checking until its domain handles it."""
        fact: Any = recorded.envelope.fact
        at = recorded.envelope.time
        if domain not in _WITHOUT_TIME:
            self._advance(domain, at)
        match domain:
            case "pod":
                self._pod(fact, at)
            case "node":
                self._node(fact, at)
            case "gpu":
                self._gpu(fact)
            case "job":
                self._job(fact, at, recorded.envelope.id)
            case "scaling":
                self._scaling(fact, recorded.sequence)
            case "spot":
                self._spot(fact)
            case "demand":
                fold_reported_demand(self._batch, fact, at, recorded.sequence)
            case "policy":
                fold_directive(self._batch, fact)
            case "cost":
                fold_cost(self._batch, fact, at)
            case "shadow":
                pass  # shadow plans do not change the state
            case _:
                raise AssertionError(f"no fact of domain {domain} is folded")

    def _advance(self, domain: str, at: datetime) -> None:
        """Advance the time of the domain; prune when it enters a new hour.

        Pruning happens here and not at the end of the batch, so that the state does not depend on batch boundaries.
        Otherwise a recorded plan could not be recomputed.
        """
        newest = self._batch.newest.now.get(domain)
        if newest is None or at > newest:
            self._batch.newest.set(domain, at)
            if newest is None:
                return
            hour_ends_at = self._hour_ends_at.get(domain) or hour_end(newest)
            if at >= hour_ends_at:
                prune(self._batch, domain, at)
                hour_ends_at = hour_end(at)
            self._hour_ends_at[domain] = hour_ends_at

    def _ended(self, domain: str, at: datetime) -> None:
        """Prune at once if the entity ended before the retention."""
        newest = self._batch.newest.get(domain)
        if newest is not None and is_past_retention(at, newest):
            prune(self._batch, domain, newest)

    # ---- pods

    def _pod(self, fact: catalog.PodFact, at: datetime) -> None:
        pods = self._batch.pods
        match fact:
            case pod.PodObserved():
                if pods.observe(fact.pod_uid, fact) and is_workload(fact):
                    self._busy(fact.node_name, fact.finished_at or at if is_finished(fact) else at)
            case pod.PodGone():
                known = pods.living.get(fact.pod_uid)
                lost = fact if fact.job_id is not None and fact.phase != "succeeded" else None
                if pods.end(fact.pod_uid, Tombstone(version_of(fact), at, lost=lost)):
                    prune_pod(self._batch, fact.pod_uid, at)
                    self._pod_left(known, fact.node_name, at)
                    if fact.phase == "succeeded":
                        self._member_completed(fact.job_id, fact.pod_uid)
            case pod.PodListed():
                self._opt_in(fact.opted_in_namespaces, fact.listed_at)
                for uid, absent in pods.list(fact.pod_uids, version_of(fact), fact.listed_at):
                    pods.end(uid, Tombstone(version_of(fact), fact.listed_at))
                    prune_pod(self._batch, uid, fact.listed_at)
                    self._pod_left(absent, absent.node_name, fact.listed_at)
                    if absent.phase == "succeeded":
                        self._member_completed(absent.job_id, uid)
            case pod.PodWatched():
                self._opt_in(fact.opted_in_namespaces, fact.watched_at)
                pods.watch(version_of(fact), fact.watched_at)
            case _:
                self._beside_pods(fact, at)

    def _member_completed(self, job_id: JobId | None, uid: PodUid) -> None:
        """Remember a completed member whose pod is gone: Kubernetes creates no other in its place.

        An unknown job was forgotten after its end; a record of it would begin anew.
        """
        before = None if job_id is None else self._batch.jobs.get(job_id)
        if job_id is not None and before is not None:
            self._batch.jobs.set(job_id, replace(before, completed_pods=_joined(before.completed_pods, (uid,))))

    def _opt_in(self, namespaces: tuple[str, ...] | None, at: datetime) -> None:
        synced = self._batch.pods.synced
        is_newest = synced is None or at >= synced.seen_at
        if is_newest and self._batch.opted_in_namespaces != (namespaces or ()):
            self._batch.opted_in_namespaces = namespaces or ()

    def _beside_pods(self, fact: _BesidePods, at: datetime) -> None:
        """Fold a fact about a kind of object that is listed and watched beside the pods."""
        match fact:
            case pod.PodBudgetObserved():
                self._batch.budgets.observe(fact.budget_uid, fact)
            case pod.PodBudgetGone():
                self._end(self._batch.budgets, fact.budget_uid, fact, at)
            case pod.PodBudgetListed():
                self._list(self._batch.budgets, fact.budget_uids, fact, fact.listed_at)
            case pod.PodQuotaObserved():
                self._batch.quotas.observe(fact.quota_uid, fact)
            case pod.PodQuotaGone():
                self._end(self._batch.quotas, fact.quota_uid, fact, at)
            case pod.PodQuotaListed():
                self._list(self._batch.quotas, fact.quota_uids, fact, fact.listed_at)
            case pod.PodProvisioningObserved():
                self._batch.provisioning.observe(fact.request_uid, fact)
            case pod.PodProvisioningGone():
                self._end(self._batch.provisioning, fact.request_uid, fact, at)
            case pod.PodProvisioningListed():
                self._list(self._batch.provisioning, fact.request_uids, fact, fact.listed_at)
            case _:
                assert_never(fact)

    def _end(self, entities: Entities[str, E], uid: str, fact: Versioned, at: datetime) -> None:
        if entities.end(uid, Tombstone(version_of(fact), at)):
            self._ended("pod", at)

    def _list(self, entities: Entities[str, E], uids: Collection[str], fact: Versioned, at: datetime) -> None:
        for uid, _ in entities.list(uids, version_of(fact), at):
            self._end(entities, uid, fact, at)

    def _pod_left(self, known: pod.PodObserved | None, node_name: str | None, at: datetime) -> None:
        """Mark the node as used until now unless the pod was finished or no workload. Unknown pods count."""
        if known is None or (is_workload(known) and not is_finished(known)):
            self._busy(node_name, at)

    def _busy(self, node_name: str | None, at: datetime) -> None:
        if node_name is None:
            return
        known = self._batch.busy_until.get(node_name)
        if known is None or at > known:
            self._batch.busy_until.set(node_name, at)
            if (newest := self._batch.newest.get("pod")) is not None and is_long_idle(at, newest):
                self._batch.busy_until.remove(node_name)

    # ---- nodes and instances

    def _node(self, fact: catalog.NodeFact, at: datetime) -> None:
        nodes = self._batch.nodes
        match fact:
            case node.NodeObserved():
                if nodes.observe(fact.node_uid, fact):
                    self._record_usable(fact, at)
            case node.NodeGone():
                known = nodes.living.get(fact.node_uid)
                provider_id = fact.provider_id or (None if known is None else known.provider_id)
                if nodes.end(fact.node_uid, Tombstone(version_of(fact), at, provider_id)):
                    self._ended("node", at)
                    self._forget_node(fact.node_uid, known, at)
            case node.NodeListed():
                for uid, absent in nodes.list(fact.node_uids, version_of(fact), fact.listed_at):
                    nodes.end(uid, Tombstone(version_of(fact), fact.listed_at, absent.provider_id))
                    self._ended("node", fact.listed_at)
                    self._forget_node(uid, absent, fact.listed_at)
            case node.NodeWatched(instances=node.InstanceChanges()):
                self._instances_changed(fact)
            case node.NodeWatched():
                nodes.watch(version_of(fact), fact.watched_at)
            case node.NodeInstanceObserved():
                self._instance(fact, at)
            case node.NodeInstanceListed():
                self._instances_listed(fact.provider_ids, fact.listed_at)
            case _:
                assert_never(fact)

    def _record_usable(self, fact: node.NodeObserved, at: datetime) -> None:
        """Record the most GPUs while ready, and since when there are fewer."""
        known = self._batch.usable.get(fact.node_uid)
        gpus = fact.allocatable.gpus  # a different partitioning is neither more nor less
        is_less = fact.is_starting if known is None else gpus != known.gpus and gpus.gpus_fit_in(known.gpus)
        if not fact.is_ready or is_less:
            if fact.node_uid not in self._batch.unhealthy_since.now:
                self._batch.unhealthy_since.set(fact.node_uid, at)
            return
        self._batch.unhealthy_since.remove(fact.node_uid)
        if known is None or gpus != known.gpus:
            self._batch.usable.set(fact.node_uid, Usable(gpus, at))

    def _forget_node(self, node_uid: NodeUid, known: node.NodeObserved | None, at: datetime) -> None:
        if (observed := observed_allocatable_of(known, at)) is not None:
            self._batch.observed_allocatable.set(*observed)
        self._batch.usable.remove(node_uid)
        self._batch.unhealthy_since.remove(node_uid)

    def _instance(self, fact: node.NodeInstanceObserved, at: datetime) -> None:
        self._seen(fact.provider_id, at)
        known = self._batch.instances.get(fact.provider_id)
        if known is None or version_of(fact) > version_of(known):
            self._batch.instances.set(fact.provider_id, fact)
            if fact.state == "terminated" and fact.capacity_type is CapacityType.SPOT:
                self._spot_ended(fact, fact.terminated_at or at)
            self._ended("node", fact.terminated_at or at)

    def _spot_ended(self, fact: node.NodeInstanceObserved, ended_at: datetime) -> None:
        """Count the termination once; skip it if its retention is over, as a repeat would count again."""
        newest = self._batch.newest.get("node")
        if newest is not None and not is_past_retention(ended_at, newest):
            place = capacity_pool_of(fact.instance_type, fact.zone)
            known = self._batch.spot_terminations.get(place)
            self._batch.spot_terminations.set(place, add_termination(known, ended_at, is_reclaimed=fact.is_reclaimed))

    def _seen(self, provider_id: ProviderId, at: datetime) -> None:
        seen_at = self._batch.instances_seen_at.get(provider_id)
        if seen_at is None or at > seen_at:
            self._batch.instances_seen_at.set(provider_id, at)

    def _instances_changed(self, fact: node.NodeWatched) -> None:
        """Continue the last list: what it had and is not missing now is seen again."""
        changes = fact.instances
        if changes is None or changes.since != self._batch.instances_listed_at:
            return
        listed = listed_instances(self._batch.instances_seen_at.now, changes.since)
        self._instances_listed((*listed.difference(changes.missing), *changes.appeared), fact.watched_at)

    def _instances_listed(self, provider_ids: Iterable[ProviderId], listed_at: datetime) -> None:
        before, seen = self._batch.instances_listed_at, self._batch.instances_seen_at
        if before is None or listed_at > before:
            self._batch.instances_listed_at = listed_at
        known = seen.now.get
        newer = (key for key in provider_ids if (at := known(key)) is None or listed_at > at)
        seen.update(dict.fromkeys(newer, listed_at))
        newest = self._batch.newest.get("node")
        if newest is not None and (before is None or hour(before) != hour(listed_at)):
            prune(self._batch, "node", newest)

    # ---- telemetry

    def _gpu(self, fact: catalog.GpuFact) -> None:
        match fact:
            case gpu.GpuNodeSummarized():
                known = self._batch.telemetry.get(fact.node_uid)
                if known is None or version_of(fact) > version_of(known):
                    self._batch.telemetry.set(fact.node_uid, fact)
                    self._batch.follow(known, fact)
                    self._ended("gpu", fact.window_started_at)
            case gpu.GpuNodeSampled():
                pass  # decisions use summaries
            case _:
                assert_never(fact)

    # ---- jobs

    def _job(self, fact: catalog.JobFact, at: datetime, event_id: str) -> None:
        # Facts that anybody may publish do not advance the time: a date in the future would prune everything.
        if not isinstance(fact, job.JobRequested | job.JobCancelRequested):
            self._advance("job", at)
        if isinstance(fact, job.JobListed):
            return  # used by the scheduler only
        if isinstance(fact, job.JobResynced):
            self._job_resynced(fact, at)
            return
        job_id = self._job_id(fact, event_id)
        before = self._batch.jobs.get(job_id) or JobRecord()
        after = apply_to_job(before, fact, at)
        if after is not before:
            self._batch.jobs.set(job_id, after)
            fold_usage(self._batch, before, after)
            fold_duration(self._batch, before, after)
        if isinstance(fact, job.JobFinished):
            self._ended("job", fact.finished_at)

    def _job_resynced(self, fact: job.JobResynced, at: datetime) -> None:
        """Fold the facts of an open job.

        Of those that happen once these are the first ones: the stream may have discarded them, and have repeats.
        """
        first = {name: getattr(fact, name) for name in _HAPPEN_ONCE if getattr(fact, name) is not None}
        if fact.requested is not None:
            first["requested_at"] = fact.requested_at or at
        before = self._batch.jobs.get(fact.job_id) or JobRecord()
        after = replace(before, **first, completed_pods=_joined(before.completed_pods, fact.completed_pods))
        for part in (fact.placed, fact.preempted, fact.started):
            after = after if part is None else apply_to_job(after, part, at)
        if after != before:
            self._batch.jobs.set(fact.job_id, after)
            fold_usage(self._batch, before, after)
            fold_duration(self._batch, before, after)

    @staticmethod
    def _job_id(fact: catalog.OneJobFact, event_id: str) -> JobId:
        if isinstance(fact, job.JobRequested):
            return job_id_of(fact.job_id, event_id)
        return job_id_of(fact.job_id, fact.request_id) if isinstance(fact, job.JobRejected) else fact.job_id

    # ---- notices and offers

    def _spot(self, fact: catalog.SpotFact) -> None:
        match fact:
            case spot.SpotNoticeReceived():
                self._keep_notice(apply_notice(self._batch.notices.now, fact))
            case spot.SpotNoticeWithdrawn():
                known = self._batch.notices.get(fact.notice_id)
                if known is not None:  # without a notice there is nothing to withdraw
                    self._keep_notice(apply_withdrawal(known, fact))
            case spot.SpotRebalanceRecommended():
                known_at = self._batch.rebalance_recommended_at.get(fact.provider_id)
                if known_at is None or fact.noticed_at > known_at:
                    self._batch.rebalance_recommended_at.set(fact.provider_id, fact.noticed_at)
                self._ended("spot", fact.noticed_at)
            case spot.SpotOffersSampled():
                known_offers = self._batch.offers
                if known_offers is None or version_of(fact) > version_of(known_offers):
                    self._batch.offers = fact
            case _:
                assert_never(fact)

    def _keep_notice(self, record: NoticeRecord) -> None:
        self._batch.notices.set(record.notice.notice_id, record)
        self._ended("spot", notice_ended_at(record))

    # ---- plans and their steps

    def _scaling(self, fact: catalog.ScalingFact, sequence: int) -> None:
        match fact:
            case scaling.ScalingPlanMade():
                self._plan_made(fact, sequence)
            case scaling.ScalingDecisionsRestored():
                self._restored(fact)
            case scaling.ScalingOrderResynced() | scaling.ScalingDrainResynced():
                self._resynced(fact)
            case scaling.ScalingNodeOrdered() | scaling.ScalingNodeLaunched() | scaling.ScalingLaunchRefused():
                self._order_step(fact)
            case scaling.ScalingDrainStarted() | scaling.ScalingPodEvicted() | scaling.ScalingNodeDrained():
                self._batch.drains.set(fact.action_id, apply_to_drain(self._drain(fact.action_id, fact.plan_id), fact))
            case scaling.ScalingCheckpointRequested() | scaling.ScalingNodeRemoved():
                pass  # facts of pods and nodes show the result
            case scaling.ScalingDrainCancelled():
                drain = self._drain(fact.drain_action_id, fact.plan_id)
                if drain.cancelled is None:
                    self._batch.drains.set(fact.drain_action_id, replace(drain, cancelled=fact))
                    self._ended("scaling", fact.cancelled_at)
            case scaling.ScalingNodeTerminated():
                self._terminated(fact)
            case scaling.ScalingDemandSampled() | scaling.ScalingForecastScored():
                fold_demand_history(self._batch, fact)
            case _:
                assert_never(fact)

    def _restored(self, fact: scaling.ScalingDecisionsRestored) -> None:
        self._batch.restored_at = self._batch.restored_at or fact.restored_at
        if self._batch.last_plan_sequence == 0:
            self._batch.brake = fact.brake
        for past in fact.past:
            self._decided(past.decision, past.plan_id, past.planned_at)

    def _order(self, action_id: ActionId, plan_id: PlanId) -> OrderRecord:
        return self._batch.orders.get(action_id) or OrderRecord(action_id=action_id, plan_id=plan_id)

    def _drain(self, action_id: ActionId, plan_id: PlanId) -> DrainRecord:
        return self._batch.drains.get(action_id) or DrainRecord(action_id=action_id, plan_id=plan_id)

    def _plan_made(self, fact: scaling.ScalingPlanMade, sequence: int) -> None:
        if sequence > self._batch.last_plan_sequence:
            self._batch.last_plan_sequence = sequence
            self._batch.last_plan_at = fact.plan.as_of
            self._batch.brake = fact.plan.brake
        fold_rejections(self._batch, fact.plan)
        fold_upkeep(self._batch, fact.plan)
        for decision in fact.plan.decisions:
            self._decided(decision, fact.plan_id, fact.plan.as_of)

    def _decided(self, decision: AnyDecision, plan_id: PlanId, planned_at: datetime) -> None:
        match decision:
            case BuyNode():
                order = self._order(decision.action_id, plan_id)
                if order.decision is None:
                    decided = replace(order, plan_id=plan_id, decision=decision, planned_at=planned_at)
                    self._batch.orders.set(decision.action_id, decided)
            case DrainNode() | ReleaseInstance():
                drain = self._drain(decision.action_id, plan_id)
                if drain.decision is None:
                    self._batch.drains.set(decision.action_id, replace(drain, decision=decision, planned_at=planned_at))
                    fold_abandoned_gang(self._batch, decision.reason, planned_at)
            case CancelDrain():
                drain = self._drain(decision.drain_action_id, plan_id)
                if drain.cancel is None and drain.drained is None:  # the first of both in the stream wins
                    self._batch.drains.set(decision.drain_action_id, replace(drain, cancel=decision))
            case _:
                assert_never(decision)

    def _order_step(self, fact: OrderStep) -> None:
        self._batch.orders.set(fact.action_id, apply_to_order(self._order(fact.action_id, fact.plan_id), fact))
        if isinstance(fact, scaling.ScalingLaunchRefused):
            self._ended("scaling", fact.refused_at)

    def _resynced(self, fact: scaling.ScalingOrderResynced | scaling.ScalingDrainResynced) -> None:
        """Fold what is missing in the record of an open decision; repeated steps change nothing."""
        if fact.decision is not None and fact.planned_at is not None:
            self._decided(fact.decision, fact.plan_id, fact.planned_at)
        if isinstance(fact, scaling.ScalingDrainResynced):
            if fact.cancel is not None:  # before `drained`: the first of both wins
                self._decided(fact.cancel, fact.plan_id, fact.planned_at or _NEVER)
            drain = self._drain(fact.action_id, fact.plan_id)
            for step in (fact.started, fact.drained):
                drain = drain if step is None else apply_to_drain(drain, step)
            cancelled, terminated = drain.cancelled or fact.cancelled, drain.terminated or fact.terminated
            self._batch.drains.set(fact.action_id, replace(drain, cancelled=cancelled, terminated=terminated))
            return
        order = self._order(fact.action_id, fact.plan_id)
        for order_step in (fact.ordered, fact.launched):
            order = order if order_step is None else apply_to_order(order, order_step)
        terminated = order.terminated or fact.terminated
        self._batch.orders.set(fact.action_id, order if terminated is None else replace(order, terminated=terminated))

    def _terminated(self, fact: scaling.ScalingNodeTerminated) -> None:
        """Close the purchase and the removal of the instance; either may have aged out."""
        order = None if fact.order_action_id is None else self._batch.orders.get(fact.order_action_id)
        if order is not None and order.terminated is None:
            self._batch.orders.set(order.action_id, replace(order, terminated=fact))
        if fact.action_id != fact.order_action_id:
            drain = self._drain(fact.action_id, fact.plan_id)
            if drain.terminated is None:
                self._batch.drains.set(fact.action_id, replace(drain, terminated=fact))
        self._ended("scaling", fact.terminated_at)
