"""Asks pods to save a checkpoint, as a plan decided: on nodes that Karpenter deletes, and of jobs. Evicts nothing.

Each pod is read first, so that none is notified twice.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import repeat

from gpu_autoscaler.core.disruption.deleted_nodes import is_announced
from gpu_autoscaler.core.disruption.protection import can_save, request_annotations, save_request
from gpu_autoscaler.events.scaling import ScalingCheckpointRequested
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.protocol import KubeApi
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import RequestCheckpoints, RequestJobCheckpoint, RequestPreemptionCheckpoint
from gpu_autoscaler.model.ids import JobId, PlanId
from gpu_autoscaler_services.scaler import eviction_order

JobRequest = RequestJobCheckpoint | RequestPreemptionCheckpoint


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
        # Karpenter evicts at once and waits for the pod's grace period only; the deletion timestamp is its end.
        deadlines = [
            pod.metadata.deletion_timestamp
            or decision.since + timedelta(seconds=pod.spec.termination_grace_period_seconds)
            for pod in pods
        ]
        await asyncio.gather(*map(self._notify, pods, repeat(now), deadlines))
        return (_requested(decision, plan_id, pods, decision.node_name, deadline_at=max(deadlines), now=now),)

    async def send_to_job(
        self, decision: JobRequest, plan_id: PlanId, now: datetime
    ) -> Sequence[ScalingCheckpointRequested]:
        """Notify the pods of the job that save on request, except those that this decision has notified before; return
        which. Raises as `send`."""
        on_nodes = await asyncio.gather(*map(self._kube.pods_on, decision.node_names))
        pods = [pod for on_node in on_nodes for pod in on_node if _is_asked(pod, decision)]
        if not pods:
            return ()
        await asyncio.gather(*map(self._notify, pods, repeat(decision.requested_at), repeat(decision.deadline_at)))
        return (_requested(decision, plan_id, pods, "", deadline_at=decision.deadline_at, now=now),)

    async def _notify(self, pod: core.Pod, requested_at: datetime, deadline_at: datetime) -> None:
        is_there = await self._kube.annotate_pod(pod, request_annotations(requested_at, deadline_at))
        if is_there and self._hooks is not None:
            self._hooks.notify([pod], deadline_at)


def _is_asked(pod: core.Pod, decision: JobRequest) -> bool:
    metadata = pod.metadata
    request = save_request(metadata.annotations)
    return (
        metadata.labels.get(labels.JOB_ID) == decision.job_id
        and metadata.deletion_timestamp is None
        and pod.status.phase == "Running"
        and can_save(metadata.annotations)
        and (request is None or request.requested_at < decision.requested_at)
    )


def _requested(
    decision: RequestCheckpoints | JobRequest,
    plan_id: PlanId,
    pods: Sequence[core.Pod],
    node_name: str,
    *,
    deadline_at: datetime,
    now: datetime,
) -> ScalingCheckpointRequested:
    return ScalingCheckpointRequested(
        action_id=decision.action_id,
        plan_id=plan_id,
        node_name=node_name,
        pods=tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in pods)),
        job_ids=tuple(sorted({JobId(found) for pod in pods if (found := pod.metadata.labels.get(labels.JOB_ID))})),
        deadline_at=deadline_at,
        requested_at=now,
    )
