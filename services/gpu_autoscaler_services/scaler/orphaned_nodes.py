"""Deletes orphaned nodes: Kubernetes nodes whose instance is gone, as `core/disruption/orphaned_nodes.py` finds due.

The cloud must report that instance gone twice, ASKED_AGAIN_SECONDS apart; a restart forgets the first answer.
"""

import asyncio
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.disruption.orphaned_nodes import OrphanedNode, orphaned_nodes
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingNodeRemoved
from gpu_autoscaler.kube.protocol import NODES, Conflict, KubeApi, NotFound
from gpu_autoscaler.kube.translate.common import condition
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import NodeUid, ProviderId
from gpu_autoscaler.providers.protocol import CapacityProvider, DescribesInstance

NODES_PER_TICK_MAX = 8  # concurrently
ANSWER_WALL_SECONDS_MAX = 3.0  # the next plan waits for this tick, so a slow cloud must not hold it up
# Between the first answer that the instance is gone and the one that counts: answers may be stale
# (EC2 Developer Guide, "Eventual consistency in the Amazon EC2 API", read 2026-11-22).
ASKED_AGAIN_SECONDS = 60.0
REFUSED_SECONDS = 600.0  # until a node whose removal was refused is tried again

log = structlog.get_logger()


class OrphanedNodes:
    """Deletes node objects."""

    def __init__(self, kube: KubeApi, provider: CapacityProvider) -> None:
        """Nothing is deleted if the provider cannot describe a single instance."""
        self._kube = kube
        self._provider = provider
        self._gone_since: dict[NodeUid, datetime] = {}  # since when every answer was that its instance is gone
        self._retry_at: dict[NodeUid, datetime] = {}
        self._refused: set[NodeUid] = set()  # nodes whose refusal is already logged

    async def remove(self, state: ClusterState, policy: ScalingPolicy, now: datetime) -> list[ScalingNodeRemoved]:
        """Delete the nodes that are due, within the limit of one tick; return those that were deleted."""
        provider = self._provider
        if not isinstance(provider, DescribesInstance):
            return []
        due = orphaned_nodes(state, policy, now)
        uids = {orphan.node_uid for orphan in due}
        for instants in (self._gone_since, self._retry_at):
            for uid in instants.keys() - uids:
                del instants[uid]
        self._refused &= uids
        due = tuple(orphan for orphan in due if self._retry_at.get(orphan.node_uid, now) <= now)[:NODES_PER_TICK_MAX]
        results = await asyncio.gather(*(self._remove(orphan, provider, now) for orphan in due))
        return [removed for removed in results if removed is not None]

    async def _remove(
        self, orphan: OrphanedNode, provider: DescribesInstance, now: datetime
    ) -> ScalingNodeRemoved | None:
        uid, name = orphan.node_uid, orphan.node_name
        self._retry_at[uid] = now + timedelta(seconds=ASKED_AGAIN_SECONDS)
        try:
            if not await _is_gone(provider, orphan.provider_id):
                self._gone_since.pop(uid, None)
                return None
            asked_at = self._gone_since.setdefault(uid, now)
            if now - asked_at < timedelta(seconds=ASKED_AGAIN_SECONDS) or not await self._delete(orphan):
                return None
        except (NotFound, Conflict):
            return None  # deleted or changed meanwhile: the next tick sees it
        except TransientError as exc:
            self._retry_at.pop(uid)
            log.warning("orphaned node removal failed, retried", node=name, error=str(exc))
            return None
        except PermanentError as exc:
            self._retry_at[uid] = now + timedelta(seconds=REFUSED_SECONDS)
            if uid not in self._refused:
                log.warning("orphaned node removal refused", node=name, error=str(exc))
            self._refused.add(uid)
            return None
        log.info("orphaned node removed", node=name, provider_id=orphan.provider_id)
        return ScalingNodeRemoved(
            node_uid=uid, node_name=name, provider_id=orphan.provider_id, asked_at=asked_at, removed_at=now
        )

    async def _delete(self, orphan: OrphanedNode) -> bool:
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


def _is_still_orphaned(node: core.Node, orphan: OrphanedNode) -> bool:
    """Return whether it is the same node, still not ready, and not being deleted."""
    ready = condition(node.status.conditions, "Ready")
    is_ready = ready is not None and ready.status == "True"
    is_same = node.metadata.uid == orphan.node_uid and node.spec.provider_id == orphan.provider_id
    return is_same and not is_ready and node.metadata.deletion_timestamp is None
