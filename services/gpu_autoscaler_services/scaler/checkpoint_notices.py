"""Asks pods on nodes that Karpenter deletes to save a checkpoint, as a plan decided. Evicts nothing.

Each pod is read first, so that none is notified twice.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

from gpu_autoscaler.core.disruption.deleted_nodes import is_announced
from gpu_autoscaler.events.scaling import ScalingCheckpointRequested
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.protocol import KubeApi
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import RequestCheckpoints
from gpu_autoscaler.model.ids import JobId, PlanId
from gpu_autoscaler_services.scaler import eviction_order


class CheckpointNotices:
    """Notifies pods by annotation and by their HTTP hook."""

    def __init__(self, kube: KubeApi, hooks: CheckpointHooks | None = None) -> None:
        """Without `hooks` pods are notified by annotation only."""
        self._kube = kube
        self._hooks = hooks

    async def send(
        self, decision: RequestCheckpoints, plan_id: PlanId, now: datetime
    ) -> Sequence[ScalingCheckpointRequested]:
        """Notify the pods that were not notified since the deletion; return which. Raises TransientError,
        PermanentError, after which those that were notified are not notified again."""
        on_node = eviction_order.leaving(await self._kube.pods_on(decision.node_name))
        pods = [pod for pod in on_node if not is_announced(pod.metadata.annotations, decision.since)]
        if not pods:
            return ()
        deadlines = await asyncio.gather(*(self._notify(pod, decision.since) for pod in pods))
        job_ids = {JobId(found) for pod in pods if (found := pod.metadata.labels.get(labels.JOB_ID))}
        requested = ScalingCheckpointRequested(
            action_id=decision.action_id,
            plan_id=plan_id,
            node_name=decision.node_name,
            pods=tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in pods)),
            job_ids=tuple(sorted(job_ids)),
            deadline_at=max(deadlines),
            requested_at=now,
        )
        return (requested,)

    async def _notify(self, pod: core.Pod, since: datetime) -> datetime:
        """Notify one pod; return its deadline."""
        # Karpenter evicts at once and waits for the pod's grace period only; the deletion timestamp is its end.
        grace = timedelta(seconds=pod.spec.termination_grace_period_seconds)
        deadline_at = pod.metadata.deletion_timestamp or since + grace
        is_there = await self._kube.annotate_pod(pod, {labels.CHECKPOINT_REQUESTED: deadline_at.isoformat()})
        if is_there and self._hooks is not None:
            self._hooks.notify([pod], deadline_at)
        return deadline_at
