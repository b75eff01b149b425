"""Facts in, state out. Total: no valid fact raises, also not about things never heard of.

Within a stream facts keep their order; streams arrive in any interleaving, and any fact may come again. The state is
the same all the same, because each fact touches only what its own stream says, older versions are ignored, and
steps happen once. Called by every projection (`runtime/projection.py`), by replay, and by `recompute`.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import assert_never, cast

from msgspec.structs import replace

from gpu_autoscaler.core.admission import job_id_of
from gpu_autoscaler.core.directives import fold_directive
from gpu_autoscaler.core.folding.batch import Batch, version_of
from gpu_autoscaler.core.folding.ledger import fold_cost
from gpu_autoscaler.core.folding.pruning import prune_pod, is_long_idle, is_past_retention, notice_ended_at, prune
from gpu_autoscaler.core.folding.records import drain_after, job_after, notice_after, notice_withdrawn, order_after
from gpu_autoscaler.core.folding.remembering import fold_reported_demand, fold_demand_history, fold_abandoned_gang
from gpu_autoscaler.core.hours import hour, hour_end
from gpu_autoscaler.core.interruptions import place_of, with_end
from gpu_autoscaler.core.shortfalls import observed_allocatable_of
from gpu_autoscaler.core.state import (
    ClusterState,
    DrainRecord,
    JobRecord,
    NoticeRecord,
    OrderRecord,
    Tombstone,
    Usable,
)
from gpu_autoscaler.core.views import is_finished, is_workload
from gpu_autoscaler.events import gpu, job, node, pod, scaling, spot
from gpu_autoscaler.events.catalogue import (
    FACTS,
    AnyFact,
    CostFact,
    DemandFact,
    GpuFact,
    JobFact,
    NodeFact,
    OneJobFact,
    PodFact,
    PolicyFact,
    ScalingFact,
    ShadowFact,
    SpotFact,
)
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, ProviderId
from gpu_autoscaler.model.offers import CapacityType

_KNOWN_TYPES = frozenset(FACTS)


def fold(state: ClusterState, recorded: Iterable[Recorded]) -> ClusterState:
    """Return the state after these facts. Facts of types that this version does not fold change nothing."""
    batch = Batch(state)
    folding = _Folding(batch)
    for each in recorded:
        # A newer catalogue, or a test's own: such a fact is known to somebody, and none of our business.
        if type(each.envelope.fact) in _KNOWN_TYPES:
            folding.take(each)
    return batch.state()


class _Folding:
    """One batch on its way into the state."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._hour_ends_at: dict[str, datetime] = {}  # by domain: of the hour that its newest instant is in

    def take(self, recorded: Recorded) -> None:
        """Fold one fact in. A new type of fact is an error of the type checker until it has its place here."""
        fact, at = cast("AnyFact", recorded.envelope.fact), recorded.envelope.time
        if isinstance(fact, PodFact):
            self._advance("pod", at)
            self._pod(fact, at)
        elif isinstance(fact, NodeFact):
            self._advance("node", at)
            self._node(fact, at)
        elif isinstance(fact, GpuFact):
            self._advance("gpu", at)
            self._gpu(fact)
        elif isinstance(fact, JobFact):
            self._job(fact, at, recorded.envelope.id)
        elif isinstance(fact, ScalingFact):
            self._advance("scaling", at)
            self._scaling(fact, recorded.sequence)
        elif isinstance(fact, SpotFact):
            self._advance("spot", at)
            self._spot(fact)
        elif isinstance(fact, DemandFact):
            fold_reported_demand(self._batch, fact, at, recorded.sequence)
        elif isinstance(fact, PolicyFact):
            self._advance("policy", at)
            fold_directive(self._batch, fact)
        elif isinstance(fact, CostFact):
            self._advance("cost", at)
            fold_cost(self._batch, fact, at)
        elif not isinstance(fact, ShadowFact):  # what another policy would do never leads to state
            assert_never(fact)

    def _advance(self, domain: str, at: datetime) -> None:
        """Move the stream's time on; with each new hour of it, forget what has outlived its use.

        Right here and not when the batch ends: a later fact about something forgotten must find the same state
        however the facts were cut into batches, else a recorded plan could not be recomputed.
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
        """Forget at once what ended so long ago that it is not kept at all."""
        newest = self._batch.newest.get(domain)
        if newest is not None and is_past_retention(at, newest):
            prune(self._batch, domain, newest)

    # ---- pods

    def _pod(self, fact: PodFact, at: datetime) -> None:
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
            case pod.PodListed():
                for uid, absent in pods.list(fact.pod_uids, version_of(fact), fact.listed_at):
                    pods.end(uid, Tombstone(version_of(fact), fact.listed_at))
                    prune_pod(self._batch, uid, fact.listed_at)
                    self._pod_left(absent, absent.node_name, fact.listed_at)
            case pod.PodWatched():
                pods.watch(version_of(fact), fact.watched_at)
            case pod.PodBudgetObserved() | pod.PodBudgetGone() | pod.PodBudgetListed():
                self._budget(fact, at)
            case _:
                assert_never(fact)

    def _budget(self, fact: pod.PodBudgetObserved | pod.PodBudgetGone | pod.PodBudgetListed, at: datetime) -> None:
        budgets = self._batch.budgets
        match fact:
            case pod.PodBudgetObserved():
                budgets.observe(fact.budget_uid, fact)
            case pod.PodBudgetGone():
                if budgets.end(fact.budget_uid, Tombstone(version_of(fact), at)):
                    self._ended("pod", at)
            case pod.PodBudgetListed():
                for uid, _ in budgets.list(fact.budget_uids, version_of(fact), fact.listed_at):
                    budgets.end(uid, Tombstone(version_of(fact), fact.listed_at))
                    self._ended("pod", fact.listed_at)
            case _:
                assert_never(fact)

    def _pod_left(self, known: pod.PodObserved | None, node_name: str | None, at: datetime) -> None:
        """The node was in use until now, unless the pod had ended before or never counted. Unknown pods count."""
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

    def _node(self, fact: NodeFact, at: datetime) -> None:
        nodes = self._batch.nodes
        match fact:
            case node.NodeObserved():
                if nodes.observe(fact.node_uid, fact):
                    self._offered(fact, at)
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
            case node.NodeWatched():
                nodes.watch(version_of(fact), fact.watched_at)
            case node.NodeInstanceObserved():
                self._instance(fact, at)
            case node.NodeInstanceListed():
                self._instances_listed(fact)
            case _:
                assert_never(fact)

    def _offered(self, fact: node.NodeObserved, at: datetime) -> None:
        """The most that it offered while ready, and since when it offers less."""
        known = self._batch.usable.get(fact.node_uid)
        gpus = fact.allocatable.gpus  # cut otherwise than before they are neither more nor less
        is_less = fact.is_starting if known is None else gpus != known.gpus and gpus.gpus_fit_in(known.gpus)
        if not fact.is_ready or is_less:
            if fact.node_uid not in self._batch.unhealthy_since.now:
                self._batch.unhealthy_since.set(fact.node_uid, at)
            return
        self._batch.unhealthy_since.remove(fact.node_uid)
        if known is None or gpus != known.gpus:
            self._batch.usable.set(fact.node_uid, Usable(gpus, at))

    def _forget_node(self, node_uid: NodeUid, known: node.NodeObserved | None, at: datetime) -> None:
        if (came := observed_allocatable_of(known, at)) is not None:
            self._batch.observed_allocatable.set(*came)
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
        """Count the end once: one of so long ago that a repeat of it would not be known is left out."""
        newest = self._batch.newest.get("node")
        if newest is not None and not is_past_retention(ended_at, newest):
            place = place_of(fact.instance_type, fact.zone)
            known = self._batch.spot_terminations.get(place)
            self._batch.spot_terminations.set(place, with_end(known, ended_at, is_taken=fact.is_taken))

    def _seen(self, provider_id: ProviderId, at: datetime) -> None:
        seen_at = self._batch.instances_seen_at.get(provider_id)
        if seen_at is None or at > seen_at:
            self._batch.instances_seen_at.set(provider_id, at)

    def _instances_listed(self, fact: node.NodeInstanceListed) -> None:
        before = self._batch.instances_listed_at
        if before is None or fact.listed_at > before:
            self._batch.instances_listed_at = fact.listed_at
        for provider_id in fact.provider_ids:
            self._seen(provider_id, fact.listed_at)
        newest = self._batch.newest.get("node")
        if newest is not None and (before is None or hour(before) != hour(fact.listed_at)):
            prune(self._batch, "node", newest)

    # ---- telemetry

    def _gpu(self, fact: GpuFact) -> None:
        match fact:
            case gpu.GpuNodeSummarised():
                known = self._batch.telemetry.get(fact.node_uid)
                if known is None or version_of(fact) > version_of(known):
                    self._batch.telemetry.set(fact.node_uid, fact)
                    self._batch.follow(known, fact)
                    self._ended("gpu", fact.window_started_at)
            case gpu.GpuNodeSampled():
                pass  # raw samples serve screens; decisions read summaries
            case _:
                assert_never(fact)

    # ---- jobs

    def _job(self, fact: JobFact, at: datetime, event_id: str) -> None:
        # What anybody may publish does not move the stream's clock: a date in the far future would empty the state.
        if not isinstance(fact, job.JobRequested | job.JobCancelRequested):
            self._advance("job", at)
        if isinstance(fact, job.JobListed):
            return  # says what Kubernetes has, which the scheduler acts on; nothing is decided by it later
        job_id = self._job_id(fact, event_id)
        before = self._batch.jobs.get(job_id) or JobRecord()
        after = job_after(before, fact, at)
        if after is not before:
            self._batch.jobs.set(job_id, after)
        if isinstance(fact, job.JobFinished):
            self._ended("job", fact.finished_at)

    @staticmethod
    def _job_id(fact: OneJobFact, event_id: str) -> JobId:
        if isinstance(fact, job.JobRequested):
            return job_id_of(fact.job_id, event_id)
        return job_id_of(fact.job_id, fact.request_id) if isinstance(fact, job.JobRejected) else fact.job_id

    # ---- notices and offers

    def _spot(self, fact: SpotFact) -> None:
        match fact:
            case spot.SpotNoticeReceived():
                self._keep_notice(notice_after(self._batch.notices.now, fact))
            case spot.SpotNoticeWithdrawn():
                known = self._batch.notices.get(fact.notice_id)
                if known is not None:  # without a notice there is nothing to take back
                    self._keep_notice(notice_withdrawn(known, fact))
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

    def _scaling(self, fact: ScalingFact, sequence: int) -> None:
        match fact:
            case scaling.ScalingPlanMade():
                self._plan_made(fact, sequence)
            case scaling.ScalingDecisionsRestored():
                self._batch.restored_at = self._batch.restored_at or fact.restored_at
                for past in fact.past:
                    self._decided(past.decision, past.plan_id, past.planned_at)
            case scaling.ScalingNodeOrdered() | scaling.ScalingNodeLaunched() | scaling.ScalingLaunchRefused():
                self._batch.orders.set(fact.action_id, order_after(self._order(fact.action_id, fact.plan_id), fact))
                if isinstance(fact, scaling.ScalingLaunchRefused):
                    self._ended("scaling", fact.refused_at)
            case scaling.ScalingDrainStarted() | scaling.ScalingPodEvicted() | scaling.ScalingNodeDrained():
                self._batch.drains.set(fact.action_id, drain_after(self._drain(fact.action_id, fact.plan_id), fact))
            case scaling.ScalingCheckpointRequested() | scaling.ScalingNodeRemoved():
                pass  # the pods themselves say whether they have saved, and Kubernetes that the node is gone
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

    def _order(self, action_id: ActionId, plan_id: PlanId) -> OrderRecord:
        return self._batch.orders.get(action_id) or OrderRecord(action_id=action_id, plan_id=plan_id)

    def _drain(self, action_id: ActionId, plan_id: PlanId) -> DrainRecord:
        return self._batch.drains.get(action_id) or DrainRecord(action_id=action_id, plan_id=plan_id)

    def _plan_made(self, fact: scaling.ScalingPlanMade, sequence: int) -> None:
        if sequence > self._batch.last_plan_sequence:
            self._batch.last_plan_sequence = sequence
            self._batch.last_plan_at = fact.plan.as_of
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
                if drain.cancel is None and drain.drained is None:  # which of both stands first in the stream holds
                    self._batch.drains.set(decision.drain_action_id, replace(drain, cancel=decision))
            case _:
                assert_never(decision)

    def _terminated(self, fact: scaling.ScalingNodeTerminated) -> None:
        """Close the purchase and the removal that this ends; either may have aged out of the record."""
        order = None if fact.order_action_id is None else self._batch.orders.get(fact.order_action_id)
        if order is not None and order.terminated is None:
            self._batch.orders.set(order.action_id, replace(order, terminated=fact))
        if fact.action_id != fact.order_action_id:
            drain = self._drain(fact.action_id, fact.plan_id)
            if drain.terminated is None:
                self._batch.drains.set(fact.action_id, replace(drain, terminated=fact))
        self._ended("scaling", fact.terminated_at)
