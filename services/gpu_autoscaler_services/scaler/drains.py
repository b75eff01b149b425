"""The executor's half that deals with Kubernetes: cordon, evict, uncordon.

Chooses nothing; every pass bears repeating.
"""

from collections.abc import Sequence
from datetime import datetime

import structlog

from gpu_autoscaler.core.removing.checkpoints import can_save
from gpu_autoscaler.core.removing.protection import pod_protection
from gpu_autoscaler.core.state import DrainRecord
from gpu_autoscaler.core.words.wording import counted
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.scaling import (
    ScalingCheckpointRequested,
    ScalingDrainCancelled,
    ScalingDrainStarted,
    ScalingNodeDrained,
    ScalingPodEvicted,
)
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.hooks import Hooks
from gpu_autoscaler.kube.protocol import NODES, Conflict, KubeApi, NotFound
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid
from gpu_autoscaler.model.reasons import BootTimedOut, GangGivenUp, NodeIdle, NodeLost
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler_services.scaler import eviction_order

PASS_SECONDS = 1.0  # cluster time between two looks at a draining node
PASS_WALL_SECONDS_MIN = 0.2

log = structlog.get_logger()


class Drains:
    """Nodes are emptied, or left alone again."""

    def __init__(self, view: StateView, kube: KubeApi, clock: Clock, hooks: Hooks | None = None) -> None:
        """Without hooks pods are told to save by their annotation alone."""
        self._view = view
        self._hooks = hooks
        self._kube = kube
        self._clock = clock
        self._cleared: set[ActionId] = set()  # releases that may go on; after a restart it is looked once more

    async def start(self, decision: DrainNode, plan_id: PlanId) -> list[Fact]:
        """Cordon the node; tell its pods to save their work. Raises TransientError.

        Of a voluntary drain only those are told that say they can: they are waited for. It looks once more at what is
        there now that nothing new can land: a node that is not idle any more, or has a protected pod, is uncordoned at
        once and stays.
        """
        record = self._record(decision.action_id)
        if record is not None and (record.started or record.cancel or record.cancelled or record.terminated):
            return []
        now = self._clock.now()
        if not await self._cordon(decision.node_name, decision.node_uid, is_cordoned=True):
            return [self._drained(decision, plan_id)]  # the node object is gone, and its pods with it
        pods = eviction_order.leaving(await self._kube.pods_on(decision.node_name))
        told: list[Fact] = []
        if decision.is_voluntary:
            if why := self._objection(pods, decision, now):
                return await self._give_up(decision, plan_id, why)
            pods = [pod for pod in pods if can_save(pod.metadata.annotations)]
        if pods:
            told.append(await self._request_checkpoints(pods, decision, plan_id, now))
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
        return [*told, started]

    async def proceed(self, started: ScalingDrainStarted) -> Outcome:
        """One pass over the node: evict whose turn it is; come again until it is empty, given up, or cancelled.

        Raises TransientError, which also brings the next pass.
        """
        record = self._record(started.action_id)
        if record is not None and (record.cancel or record.cancelled or record.drained or record.terminated):
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
                why = f"{counted(len(pods), 'pod')} had not gone by the deadline"
            if why:
                return Outcome(facts=tuple(await self._give_up(started, started.plan_id, why)))
        facts: list[Fact] = []
        due = eviction_order.due(
            pods, started.deadline_at, now, asked_at=started.started_at, is_patient=started.is_voluntary
        )
        for pod in due:
            facts += await self._evict(pod, started)
        if not started.is_voluntary and now >= started.deadline_at:
            for pod in pods:
                facts += await self._force(pod, started)
        return Outcome(facts=tuple(facts), again_after_seconds=self._pass_wall_seconds())

    async def _emptied(self, started: ScalingDrainStarted, now: datetime) -> Outcome:
        """No pod is left; until the deadline its volumes are waited for, as who comes next could not have them."""
        volumes: Sequence[str] = ()
        try:
            if now < started.deadline_at:
                volumes = await self._kube.volumes_on(started.node_name)
        except PermanentError as exc:
            log.warning("volumes of a node not readable, it does not wait for them", error=str(exc))
        if volumes:
            log.info("volumes still attached, the node waits for them", node=started.node_name, volumes=volumes)
            return Outcome(again_after_seconds=self._pass_wall_seconds())
        return Outcome(facts=(self._drained(started, started.plan_id),))

    async def spare(self, decision: ReleaseInstance, plan_id: PlanId) -> list[Fact] | None:
        """Look once more before an instance is ended that was given back as no use yet; None where it may end.

        Its node may have come up since, and taken work: what was decided on is as old as the last word of the watch.
        So the node is cordoned, if there is one, and where work is there it stays, and its pods are let onto it again.
        Raises TransientError.
        """
        record = self._record(decision.action_id)
        if record is not None and record.cancelled:
            return []
        if decision.action_id in self._cleared:
            return None  # it ends, and takes a while for it
        node = await self._node_of(decision)
        if node is not None and (why := await self._work_on(node, decision)):
            return [self._spared(node, decision, plan_id, why)]
        if node is not None and not node.spec.unschedulable:
            name, uid = node.metadata.name, NodeUid(node.metadata.uid)
            if await self._cordon(name, uid, is_cordoned=True) and (why := await self._work_on(node, decision)):
                await self._cordon(name, uid, is_cordoned=False)
                return [self._spared(node, decision, plan_id, why)]
        self._cleared &= self._view.state.drains.keys()  # what is forgotten there is over
        self._cleared.add(decision.action_id)
        return None

    async def cancel(self, decision: CancelDrain, plan_id: PlanId) -> list[Fact]:
        """Uncordon the node, unless it was drained before: an empty node on its way out is not called back.

        One that was drained while this was decided is ended by nobody (`Purchases.terminate`), and stays.
        """
        record = self._record(decision.drain_action_id)
        is_late = record is not None and record.drained is not None and record.cancel is None
        if record is not None and (is_late or record.cancelled or record.terminated):
            return []
        return await self._keep(decision, plan_id, decision.drain_action_id, "")

    # ---- steps

    async def _node_of(self, decision: ReleaseInstance) -> wire.Node | None:
        """The node as it is now, known to the record or not; None: there is none, or none that says whose it is."""
        known = next((one for one in self._view.state.nodes.values() if _is_of(one, decision)), None)
        if known is not None:
            try:
                node = await self._kube.get(NODES, "", known.name)
            except NotFound:
                return None
            return node if node.metadata.uid == known.node_uid else None
        try:
            found = await self._kube.nodes_labelled(f"{labels.ACTION_ID}={decision.order_action_id}")
        except PermanentError as exc:
            log.warning("nodes not readable, what the record knows of them counts", error=str(exc))
            return None
        return next(iter(found), None)

    async def _work_on(self, node: wire.Node, decision: ReleaseInstance) -> str:
        """Why the node must not end unasked; empty where nothing speaks against it.

        Where its time to boot is over, or it was lost, only what can run there counts: a node that is not ready runs
        nothing, and would be waited for without end.
        """
        is_ready = any(each.type == "Ready" and each.status == "True" for each in node.status.conditions)
        if not is_ready and isinstance(decision.reason, BootTimedOut | NodeLost):
            return ""
        pods = eviction_order.leaving(await self._kube.pods_on(node.metadata.name))
        here = next((pod.metadata for pod in pods if pod.metadata.deletion_timestamp is None), None)
        return "" if here is None else f"pod {here.namespace}/{here.name} has come: it is in use"

    def _spared(self, node: wire.Node, decision: ReleaseInstance, plan_id: PlanId, why: str) -> ScalingDrainCancelled:
        log.info("instance not given back, its node stays", node=node.metadata.name, reason=why)
        return ScalingDrainCancelled(
            action_id=decision.action_id,
            plan_id=plan_id,
            drain_action_id=decision.action_id,
            node_uid=NodeUid(node.metadata.uid),
            node_name=node.metadata.name,
            cancelled_at=self._clock.now(),
            given_up_because=why,
        )

    async def _request_checkpoints(
        self, pods: Sequence[wire.Pod], decision: DrainNode, plan_id: PlanId, now: datetime
    ) -> ScalingCheckpointRequested:
        """Tell the pods until when they can save; how they answer, `core/removing/checkpoints.py` says."""
        deadline = {labels.CHECKPOINT_REQUESTED: decision.deadline_at.isoformat()}
        for pod in pods:
            await self._kube.annotate_pod(pod, deadline)
        if self._hooks is not None:
            await self._hooks.tell(pods, decision.deadline_at)
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
    def _objection(pods: Sequence[wire.Pod], decision: object, now: datetime) -> str:
        """Why a voluntary drain must not go on; empty where nothing speaks against it. Budgets speak for themselves."""
        waiting = [pod for pod in pods if pod.metadata.deletion_timestamp is None]
        if waiting and isinstance(decision, DrainNode) and isinstance(decision.reason, NodeIdle | GangGivenUp):
            return f"pod {waiting[0].metadata.namespace}/{waiting[0].metadata.name} has come: not idle any more"
        for pod in waiting:
            # The version means nothing here: this pod is compared with nothing.
            if (what := pod_protection(pod_observed(pod, epoch=0), (), now)) is not None:
                return f"pod {pod.metadata.namespace}/{pod.metadata.name} is protected: {what}"
        return ""

    async def _evict(self, pod: wire.Pod, started: ScalingDrainStarted) -> list[Fact]:
        """Ask nicely; an involuntary drain that is told no insists as soon as the pod's grace period is all that is
        left of the time."""
        eviction = await self._kube.evict_pod(pod)
        if eviction.answer == "accepted":
            return [self._evicted(pod, started, is_forced=False)]
        if eviction.answer == "gone":
            return []
        if not started.is_voluntary and self._clock.now() >= eviction_order.last_call(pod, started.deadline_at):
            return await self._force(pod, started)
        say = log.warning if eviction.answer == "refused" else log.info
        say(
            "eviction held up, the node waits for it",
            pod=f"{pod.metadata.namespace}/{pod.metadata.name}",
            node=started.node_name,
            action_id=started.action_id,
            outcome=eviction.answer,
            reason=eviction.message,
            deadline_at=started.deadline_at.isoformat(),
        )
        return []

    async def _force(self, pod: wire.Pod, started: ScalingDrainStarted) -> list[Fact]:
        """Delete the pod with what grace is left; a shorter grace than it has already, never a longer one."""
        now = self._clock.now()
        seconds = eviction_order.grace_seconds(pod, started.deadline_at, now)
        ends_at = pod.metadata.deletion_timestamp
        if ends_at is not None and (ends_at - now).total_seconds() <= seconds:
            return []
        if not await self._kube.delete_pod(pod, grace_seconds=seconds):
            return []
        return [self._evicted(pod, started, is_forced=True)]

    async def _give_up(self, drain: DrainNode | ScalingDrainStarted, plan_id: PlanId, why: str) -> list[Fact]:
        log.info("drain given up, the node stays", node=drain.node_name, action_id=drain.action_id, reason=why)
        return await self._keep(drain, plan_id, drain.action_id, why)

    async def _keep(
        self, said: DrainNode | ScalingDrainStarted | CancelDrain, plan_id: PlanId, drain_action_id: ActionId, why: str
    ) -> list[Fact]:
        """Let pods onto the node again, and say that its drain is over."""
        await self._cordon(said.node_name, said.node_uid, is_cordoned=False)
        cancelled = ScalingDrainCancelled(
            action_id=said.action_id,
            plan_id=plan_id,
            drain_action_id=drain_action_id,
            node_uid=said.node_uid,
            node_name=said.node_name,
            cancelled_at=self._clock.now(),
            given_up_because=why,
        )
        return [cancelled]

    async def _cordon(self, node_name: str, node_uid: NodeUid, *, is_cordoned: bool) -> bool:
        """False where that very node is gone; the UID in the patch is a precondition."""
        # None takes the field away, as kubectl uncordon does (RFC 7386, section 2).
        metadata = {"uid": node_uid, "labels": self._balanced(node_uid, is_cordoned=is_cordoned)}
        patch = {"metadata": metadata, "spec": {"unschedulable": True if is_cordoned else None}}
        try:
            await self._kube.patch_node(node_name, patch)
        except (NotFound, Conflict):
            return False
        return True

    def _balanced(self, node_uid: NodeUid, *, is_cordoned: bool) -> dict[str, str | None]:
        """Load balancers send to every node, also for pods elsewhere: to none that is to go (Karpenter,
        `terminator/terminator.go`, does the same; read 2026-11-22). What somebody else wrote there stays."""
        node = self._view.state.nodes.get(node_uid)
        said = None if node is None else dict(node.labels).get(labels.EXCLUDE_FROM_BALANCERS)
        if said not in (None, labels.EXCLUDED_BY_US):
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

    def _evicted(self, pod: wire.Pod, started: ScalingDrainStarted, *, is_forced: bool) -> ScalingPodEvicted:
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
        return max(self._clock.wall_seconds(PASS_SECONDS), PASS_WALL_SECONDS_MIN)


def _is_of(node: NodeObserved, release: ReleaseInstance) -> bool:
    is_its_instance = node.provider_id is not None and node.provider_id == release.provider_id
    return is_its_instance or node.action_id == release.order_action_id
