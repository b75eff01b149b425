"""Deletes orphaned nodes: Kubernetes nodes whose instance is gone, as a plan decided.

The cloud must report that instance gone twice, ASKED_AGAIN_SECONDS apart, so that it takes two attempts of the plan; a
restart forgets the first answer.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.state.upkeep_attempts import BACKOFF_SECONDS_MAX
from gpu_autoscaler.events.scaling import ScalingNodeRemoved
from gpu_autoscaler.kube.protocol import NODES, KubeApi
from gpu_autoscaler.kube.translate.common import condition
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import RemoveOrphanedNode
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import NodeUid, ProviderId
from gpu_autoscaler.providers.protocol import CapacityProvider, DescribesInstance

ANSWER_WALL_SECONDS_MAX = 3.0  # a slow cloud must not keep a slot of the executor
# Between the first answer that the instance is gone and the one that counts: answers may be stale
# (EC2 Developer Guide, "Eventual consistency in the Amazon EC2 API", read 2026-11-22).
ASKED_AGAIN_SECONDS = 60.0
# A first answer is forgotten after this long: the plan asks again sooner for as long as the node is orphaned.
FORGOTTEN = timedelta(seconds=2 * BACKOFF_SECONDS_MAX)

log = structlog.get_logger()


class OrphanedNodes:
    """Deletes node objects."""

    def __init__(self, kube: KubeApi, provider: CapacityProvider) -> None:
        """Nothing is deleted if the provider cannot describe a single instance."""
        self._kube = kube
        self._provider = provider
        # Since when every answer was that its instance is gone, and the last of them.
        self._gone_since: dict[NodeUid, tuple[datetime, datetime]] = {}

    async def remove(self, decision: RemoveOrphanedNode, now: datetime) -> Sequence[ScalingNodeRemoved]:
        """Delete the node if the cloud confirms for the second time that its instance is gone; return that it was
        deleted. Raises NotFound, Conflict, TransientError, PermanentError."""
        provider, uid = self._provider, decision.node_uid
        if not isinstance(provider, DescribesInstance):
            return ()
        for known in [known for known, (_, last_at) in self._gone_since.items() if now - last_at > FORGOTTEN]:
            del self._gone_since[known]
        if not await _is_gone(provider, decision.provider_id):
            self._gone_since.pop(uid, None)
            return ()
        asked_at, _ = self._gone_since.get(uid, (now, now))
        self._gone_since[uid] = asked_at, now
        if now - asked_at < timedelta(seconds=ASKED_AGAIN_SECONDS) or not await self._delete(decision):
            return ()
        del self._gone_since[uid]
        log.info("orphaned node removed", node=decision.node_name, provider_id=decision.provider_id)
        removed = ScalingNodeRemoved(
            node_uid=uid,
            node_name=decision.node_name,
            provider_id=decision.provider_id,
            asked_at=asked_at,
            removed_at=now,
        )
        return (removed,)

    async def _delete(self, orphan: RemoveOrphanedNode) -> bool:
        """Delete the node; return False if it is no longer orphaned or somebody else deletes it."""
        node = await self._kube.get(NODES, "", orphan.node_name)
        if not _is_still_orphaned(node, orphan):
            return False
        finalizers = node.metadata.finalizers
        if labels.TERMINATION_FINALIZER in finalizers:
            # Removed before the deletion: with it the deletion would be handled as one by hand, which drains first.
            patch = {
                "metadata": {
                    "uid": node.metadata.uid,
                    "resourceVersion": node.metadata.resource_version,
                    "finalizers": [name for name in finalizers if name != labels.TERMINATION_FINALIZER],
                }
            }
            node = await self._kube.patch_node(orphan.node_name, patch)
        return await self._kube.delete_node(node)


async def _is_gone(provider: DescribesInstance, provider_id: ProviderId) -> bool:
    try:
        async with asyncio.timeout(ANSWER_WALL_SECONDS_MAX):
            instance = await provider.instance(provider_id)
    except TimeoutError as exc:
        raise TransientError(f"instance {provider_id}: no answer within {ANSWER_WALL_SECONDS_MAX:g} s") from exc
    return instance is None or instance.state == "terminated"


def _is_still_orphaned(node: core.Node, orphan: RemoveOrphanedNode) -> bool:
    """Return whether it is the same node, still not ready, and not being deleted."""
    ready = condition(node.status.conditions, "Ready")
    is_ready = ready is not None and ready.status == "True"
    is_same = node.metadata.uid == orphan.node_uid and node.spec.provider_id == orphan.provider_id
    return is_same and not is_ready and node.metadata.deletion_timestamp is None
