"""The executor's calls to Kubernetes: cordon, evict, uncordon. Decides nothing; every pass is idempotent."""

from collections.abc import Iterable, Sequence
from datetime import datetime

import structlog

from gpu_autoscaler.core.disruption.protection import can_save, pod_protection, request_annotations
from gpu_autoscaler.core.state.state import DrainRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.scaling import (
    ScalingCheckpointRequested,
    ScalingDrainCancelled,
    ScalingDrainStarted,
    ScalingNodeDrained,
    ScalingPodEvicted,
)
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.protocol import NODES, Conflict, KubeApi, NotFound
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.format import counted
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid
from gpu_autoscaler.model.reasons.drain import BootTimedOut, GangAbandoned, NodeIdle, NodeLost
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler_services.scaler import eviction_order

PASS_SECONDS = 1.0  # cluster time between two passes over a draining node
PASS_WALL_SECONDS_MIN = 0.2
# Of all drains together: redelivered facts come before new ones, so passes without a limit would keep a new drain from
# its first one. A hundred nodes drain at full pace, a thousand are looked at every five seconds. Source: our own.
PASSES_PER_SECOND_MAX = 200.0

log = structlog.get_logger()


class Drains:
    """Drains nodes, and cancels drains."""

    def __init__(self, view: StateView, kube: KubeApi, clock: Clock, hooks: CheckpointHooks | None = None) -> None:
        """Without `hooks` pods are asked to save a checkpoint by annotation only."""
        self._view = view
        self._hooks = hooks
        self._kube = kube
        self._clock = clock
        self._cleared: set[ActionId] = set()  # releases that passed the check; a restart repeats it

    async def start(self, decision: DrainNode, plan_id: PlanId) -> list[Fact]:
        """Cordon the node and ask its pods to save a checkpoint. Raises TransientError.

        A voluntary drain asks only the pods that can save, and waits for them. With new pods kept off by the cordon it
        checks the pods again: a node that is no longer idle, or has a protected pod, is uncordoned and stays.
        """
        record = self._record(decision.action_id)
        if record is not None and (record.started or record.cancel or record.cancelled or record.terminated):
            return []
        now = self._clock.now()
        if not await self._cordon(decision.node_name, decision.node_uid, is_cordoned=True):
            return [self._drained(decision, plan_id)]  # the node object is gone, and its pods with it
        pods = eviction_order.leaving(await self._kube.pods_on(decision.node_name))
        facts: list[Fact] = []
        if decision.is_voluntary:
            if why := self._objection(pods, decision, now):
                return await self._abandon(decision, plan_id, why)
            pods = [pod for pod in pods if can_save(pod.metadata.annotations)]
        if pods:
            facts.append(await self._request_checkpoints(pods, decision, plan_id, now))
        started = ScalingDrainStarted(
            action_id=decision.action_id,
            plan_id=plan_id,
            node_uid=decision.node_uid,
            node_name=decision.node_name,
            provider_id=decision.provider_id,
            is_voluntary=decision.is_voluntary,
            deadline_at=decision.deadline_at,
            started_at=now,
        )
        return [*facts, started]

    async def proceed(self, started: ScalingDrainStarted) -> Outcome:
        """Make one pass over the node: evict the pods that are due; repeat until drained, abandoned or cancelled.

        Raises TransientError, after which the pass is repeated as well.
        """
        record = self._record(started.action_id)
        if record is not None and has_ended(record):
            return Outcome()
        if not await self._exists(started.node_name, started.node_uid):
            return Outcome(facts=(self._drained(started, started.plan_id),))
        now = self._clock.now()
        pods = eviction_order.leaving(await self._kube.pods_on(started.node_name))
        if not started.is_voluntary and now >= started.deadline_at:
            pods = [pod for pod in pods if not eviction_order.is_overdue(pod, now)]
        if not pods:
            return await self._emptied(started, now)
        if started.is_voluntary:
            why = self._objection(pods, None if record is None else record.decision, now)
            if now >= started.deadline_at:
                why = f"{counted(len(pods), 'pod')} left at the deadline"
            if why:
                return Outcome(facts=tuple(await self._abandon(started, started.plan_id, why)))
        facts: list[Fact] = []
        due = eviction_order.due(
            pods, started.deadline_at, now, asked_at=started.started_at, is_patient=started.is_voluntary
        )
        for pod in due:
            facts += await self._evict(pod, started)
        if not started.is_voluntary and now >= started.deadline_at:
            for pod in pods:
                facts += await self._force(pod, started)
        return Outcome(facts=tuple(facts), redeliver_after_seconds=self._pass_wall_seconds())

    async def _emptied(self, started: ScalingDrainStarted, now: datetime) -> Outcome:
        """End the drain once the node's volumes are detached, or at the deadline: their next pods need them."""
        volumes: Sequence[str] = ()
        try:
            if now < started.deadline_at:
                volumes = await self._kube.volumes_on(started.node_name)
        except PermanentError as exc:
            log.warning("volume list refused, detachment not awaited", node=started.node_name, error=str(exc))
        if volumes:
            log.info("volume detachment awaited", node=started.node_name, volumes=volumes)
            return Outcome(redeliver_after_seconds=self._pass_wall_seconds())
        return Outcome(facts=(self._drained(started, started.plan_id),))

    async def recheck_release(self, decision: ReleaseInstance, plan_id: PlanId) -> list[Fact] | None:
        """Check once more that the instance to release runs no work; None if it may be terminated.

        Its node may have registered and taken pods since the last watch event that the decision was based on. So the
        node, if there is one, is cordoned; if it has pods it is uncordoned and stays. Raises TransientError.
        """
        record = self._record(decision.action_id)
        if record is not None and record.cancelled:
            return []
        if decision.action_id in self._cleared:
            return None  # its termination is under way
        node = await self._node_of(decision)
        if node is not None and (why := await self._work_on(node, decision)):
            return [self._release_cancelled(node, decision, plan_id, why)]
        if node is not None and not node.spec.unschedulable:
            name, uid = node.metadata.name, NodeUid(node.metadata.uid)
            if await self._cordon(name, uid, is_cordoned=True) and (why := await self._work_on(node, decision)):
                await self._cordon(name, uid, is_cordoned=False)
                return [self._release_cancelled(node, decision, plan_id, why)]
        self._cleared &= self._view.state.drains.keys()  # the state forgets what is over
        self._cleared.add(decision.action_id)
        return None

    async def cancel(self, decision: CancelDrain, plan_id: PlanId) -> list[Fact]:
        """Uncordon the node, unless it was drained before the cancellation: then its termination goes on.

        A node that is drained after the cancellation is not terminated (`Purchases.terminate`), and stays.
        """
        record = self._record(decision.drain_action_id)
        is_late = record is not None and record.drained is not None and record.cancel is None
        if record is not None and (is_late or record.cancelled or record.terminated):
            return []
        return await self._uncordon(decision, plan_id, decision.drain_action_id, "")

    # ---- steps

    async def _node_of(self, decision: ReleaseInstance) -> core.Node | None:
        """Return the node of the instance as it is now, in the state or not; None if there is none."""
        known = next((node for node in self._view.state.nodes.values() if _is_of(node, decision)), None)
        if known is not None:
            try:
                node = await self._kube.get(NODES, "", known.name)
            except NotFound:
                return None
            return node if node.metadata.uid == known.node_uid else None
        try:
            nodes = await self._kube.nodes_labeled(f"{labels.ACTION_ID}={decision.order_action_id}")
        except PermanentError as exc:
            log.warning("node list refused, recorded nodes used", error=str(exc))
            return None
        return next(iter(nodes), None)

    async def _work_on(self, node: core.Node, decision: ReleaseInstance) -> str:
        """Return why the node must not be terminated without a drain; empty if it may.

        Pods on a node that is not ready do not count if it timed out while booting or was lost.
        """
        is_ready = any(condition.type == "Ready" and condition.status == "True" for condition in node.status.conditions)
        if not is_ready and isinstance(decision.reason, BootTimedOut | NodeLost):
            return ""
        pods = eviction_order.leaving(await self._kube.pods_on(node.metadata.name))
        pod = next((pod.metadata for pod in pods if pod.metadata.deletion_timestamp is None), None)
        return "" if pod is None else f"node is in use: pod {pod.namespace}/{pod.name} was scheduled to it"

    def _release_cancelled(
        self, node: core.Node, decision: ReleaseInstance, plan_id: PlanId, why: str
    ) -> ScalingDrainCancelled:
        log.info("release cancelled", node=node.metadata.name, reason=why)
        return ScalingDrainCancelled(
            action_id=decision.action_id,
            plan_id=plan_id,
            drain_action_id=decision.action_id,
            node_uid=NodeUid(node.metadata.uid),
            node_name=node.metadata.name,
            cancelled_at=self._clock.now(),
            abandoned_because=why,
        )

    async def _request_checkpoints(
        self, pods: Sequence[core.Pod], decision: DrainNode, plan_id: PlanId, now: datetime
    ) -> ScalingCheckpointRequested:
        """Notify the pods of the deadline; `core/disruption/protection.py` reads their answers."""
        request = request_annotations(now, decision.deadline_at)
        for pod in pods:
            await self._kube.annotate_pod(pod, request)
        if self._hooks is not None:
            self._hooks.notify(pods, decision.deadline_at)
        job_ids = {pod.metadata.labels.get(labels.JOB_ID, "") for pod in pods} - {""}
        return ScalingCheckpointRequested(
            action_id=decision.action_id,
            plan_id=plan_id,
            node_name=decision.node_name,
            pods=tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in pods)),
            job_ids=tuple(sorted(map(JobId, job_ids))),
            deadline_at=decision.deadline_at,
            requested_at=now,
        )

    def _record(self, action_id: ActionId) -> DrainRecord | None:
        return self._view.state.drains.get(action_id)

    @staticmethod
    def _objection(pods: Sequence[core.Pod], decision: object, now: datetime) -> str:
        """Return why a voluntary drain must stop; empty if not. The eviction API enforces PodDisruptionBudgets."""
        waiting = [pod for pod in pods if pod.metadata.deletion_timestamp is None]
        if waiting and isinstance(decision, DrainNode) and isinstance(decision.reason, NodeIdle | GangAbandoned):
            pod = waiting[0]
            return f"node is no longer idle: pod {pod.metadata.namespace}/{pod.metadata.name} was scheduled to it"
        for pod in waiting:
            # The epoch does not matter: the fact is not compared.
            if (protection := pod_protection(pod_observed(pod, epoch=0), (), now)) is not None:
                return f"pod {pod.metadata.namespace}/{pod.metadata.name} is protected: {protection}"
        return ""

    async def _evict(self, pod: core.Pod, started: ScalingDrainStarted) -> list[Fact]:
        """Evict the pod; an involuntary drain deletes a refused pod once only its grace period is left."""
        eviction = await self._kube.evict_pod(pod)
        if eviction.answer == "accepted":
            return [self._evicted(pod, started, is_forced=False)]
        if eviction.answer == "gone":
            return []
        if not started.is_voluntary and self._clock.now() >= eviction_order.latest_eviction_at(
            pod, started.deadline_at
        ):
            return await self._force(pod, started)
        write = log.warning if eviction.answer == "refused" else log.info
        write(
            "eviction delayed",
            pod=f"{pod.metadata.namespace}/{pod.metadata.name}",
            node=started.node_name,
            action_id=started.action_id,
            outcome=eviction.answer,
            reason=eviction.message,
            deadline_at=started.deadline_at.isoformat(),
        )
        return []

    async def _force(self, pod: core.Pod, started: ScalingDrainStarted) -> list[Fact]:
        """Delete the pod with the grace that is left; never extend the grace of a pod that is being deleted."""
        now = self._clock.now()
        seconds = eviction_order.grace_seconds(pod, started.deadline_at, now)
        ends_at = pod.metadata.deletion_timestamp
        if ends_at is not None and (ends_at - now).total_seconds() <= seconds:
            return []
        if not await self._kube.delete_pod(pod, grace_seconds=seconds):
            return []
        return [self._evicted(pod, started, is_forced=True)]

    async def _abandon(self, drain: DrainNode | ScalingDrainStarted, plan_id: PlanId, why: str) -> list[Fact]:
        log.info("drain abandoned", node=drain.node_name, action_id=drain.action_id, reason=why)
        return await self._uncordon(drain, plan_id, drain.action_id, why)

    async def _uncordon(
        self, drain: DrainNode | ScalingDrainStarted | CancelDrain, plan_id: PlanId, drain_action_id: ActionId, why: str
    ) -> list[Fact]:
        """Uncordon the node; return the end of its drain."""
        await self._cordon(drain.node_name, drain.node_uid, is_cordoned=False)
        cancelled = ScalingDrainCancelled(
            action_id=drain.action_id,
            plan_id=plan_id,
            drain_action_id=drain_action_id,
            node_uid=drain.node_uid,
            node_name=drain.node_name,
            cancelled_at=self._clock.now(),
            abandoned_because=why,
        )
        return [cancelled]

    async def _cordon(self, node_name: str, node_uid: NodeUid, *, is_cordoned: bool) -> bool:
        """Return False if the node of this UID is gone; the UID in the patch is a precondition."""
        # None removes the field, as kubectl uncordon does (RFC 7386, section 2).
        metadata = {"uid": node_uid, "labels": self._load_balancer_label(node_uid, is_cordoned=is_cordoned)}
        patch = {"metadata": metadata, "spec": {"unschedulable": True if is_cordoned else None}}
        try:
            await self._kube.patch_node(node_name, patch)
        except (NotFound, Conflict):
            return False
        return True

    def _load_balancer_label(self, node_uid: NodeUid, *, is_cordoned: bool) -> dict[str, str | None]:
        """Exclude a cordoned node from load balancers (as Karpenter, `terminator/terminator.go`, read 2026-11-22).

        A value that somebody else wrote is kept.
        """
        node = self._view.state.nodes.get(node_uid)
        value = None if node is None else dict(node.labels).get(labels.EXCLUDE_FROM_BALANCERS)
        if value not in (None, labels.EXCLUDED_BY_US):
            return {}
        return {labels.EXCLUDE_FROM_BALANCERS: labels.EXCLUDED_BY_US if is_cordoned else None}

    async def _exists(self, node_name: str, node_uid: NodeUid) -> bool:
        try:
            node = await self._kube.get(NODES, "", node_name)
        except NotFound:
            return False
        return node.metadata.uid == node_uid

    def _drained(self, drain: DrainNode | ScalingDrainStarted, plan_id: PlanId) -> ScalingNodeDrained:
        return ScalingNodeDrained(
            action_id=drain.action_id,
            plan_id=plan_id,
            node_uid=drain.node_uid,
            node_name=drain.node_name,
            provider_id=drain.provider_id,
            drained_at=self._clock.now(),
        )

    def _evicted(self, pod: core.Pod, started: ScalingDrainStarted, *, is_forced: bool) -> ScalingPodEvicted:
        return ScalingPodEvicted(
            action_id=started.action_id,
            plan_id=started.plan_id,
            node_name=started.node_name,
            pod_uid=PodUid(pod.metadata.uid),
            pod=f"{pod.metadata.namespace}/{pod.metadata.name}",
            is_forced=is_forced,
            evicted_at=self._clock.now(),
        )

    def _pass_wall_seconds(self) -> float:
        drains_count = sum(record.started is not None and not has_ended(record) for record in self._drains())
        pace_seconds = drains_count / PASSES_PER_SECOND_MAX
        return max(self._clock.wall_seconds(PASS_SECONDS), PASS_WALL_SECONDS_MIN, pace_seconds)

    def _drains(self) -> Iterable[DrainRecord]:
        return self._view.state.drains.values()


def has_ended(record: DrainRecord) -> bool:
    """Return True for a drain that needs no further pass."""
    return bool(record.drained or record.cancel or record.cancelled or record.terminated)


def _is_of(node: NodeObserved, release: ReleaseInstance) -> bool:
    is_its_instance = node.provider_id is not None and node.provider_id == release.provider_id
    return is_its_instance or node.action_id == release.order_action_id
