"""Asks pods on nodes that Karpenter deletes to save a checkpoint. Evicts nothing.

`core/disruption/deleted_nodes.py` finds the nodes. Each pod is read first, so that none is notified twice.
"""

import asyncio
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.disruption.deleted_nodes import UnannouncedDeletion, is_announced, unannounced_deletions
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.protocol import KubeApi
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler_services.scaler import eviction_order

NODES_PER_TICK_MAX = 32

log = structlog.get_logger()


class CheckpointNotices:
    """Notifies pods by annotation and by their HTTP hook."""

    def __init__(self, kube: KubeApi, hooks: CheckpointHooks | None = None) -> None:
        """Without `hooks` pods are notified by annotation only."""
        self._kube = kube
        self._hooks = hooks
        self._refused: set[str] = set()  # nodes whose refusal is already logged

    async def send(self, state: ClusterState) -> None:
        """Notify the pods that are due; failures are retried with the next tick."""
        due = unannounced_deletions(state)
        self._refused &= {departure.node_name for departure in due}
        await asyncio.gather(*(self._tell_on(departure) for departure in due[:NODES_PER_TICK_MAX]))

    async def _tell_on(self, departure: UnannouncedDeletion) -> None:
        name = departure.node_name
        try:
            on_node = eviction_order.leaving(await self._kube.pods_on(name))
            pods = [pod for pod in on_node if not is_announced(pod.metadata.annotations, departure.since)]
            await asyncio.gather(*(self._tell_pod(pod, departure.since) for pod in pods))
        except TransientError as exc:
            log.warning("checkpoint notice failed, retried", node=name, error=str(exc))
        except PermanentError as exc:
            if name not in self._refused:
                log.warning("checkpoint notice refused", node=name, error=str(exc))
            self._refused.add(name)

    async def _tell_pod(self, pod: core.Pod, since: datetime) -> None:
        # Karpenter evicts at once and waits for the pod's grace period only; the deletion timestamp is its end.
        grace = timedelta(seconds=pod.spec.termination_grace_period_seconds)
        deadline_at = pod.metadata.deletion_timestamp or since + grace
        is_there = await self._kube.annotate_pod(pod, {labels.CHECKPOINT_REQUESTED: deadline_at.isoformat()})
        if is_there and self._hooks is not None:
            self._hooks.notify([pod], deadline_at)
