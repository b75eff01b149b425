"""Adds and removes our finalizer on nodes, as `core/disruption/deleted_nodes.py` finds due.

Each write carries the resource version that was read, so that the finalizers of others are kept.
"""

import asyncio
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.disruption.deleted_nodes import FinalizerChange, finalizer_changes
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.kube.protocol import NODES, Conflict, KubeApi, NotFound
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError

GUARDS_PER_TICK_MAX = 32
_AT_ONCE_COUNT = 8
_NEW_FOR = timedelta(seconds=15)

log = structlog.get_logger()


class Finalizers:
    """Writes finalizers."""

    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube
        self._refused: set[str] = set()  # nodes whose refusal is already logged

    async def write_due(
        self, state: ClusterState, policy: ScalingPolicy, now: datetime, *, is_late_only: bool = False
    ) -> None:
        """Write what is due, within the limits of one tick.

        `is_late_only`: only removals, and additions to nodes that are older than _NEW_FOR.
        """
        due = finalizer_changes(state, policy, now)
        if is_late_only:
            new_since = now - _NEW_FOR
            due = tuple(
                change
                for change in due
                if not change.is_wanted or change.view.node is None or change.view.node.created_at <= new_since
            )
        due = due[:GUARDS_PER_TICK_MAX]
        for first in range(0, len(due), _AT_ONCE_COUNT):
            written = await asyncio.gather(*(self._apply(change) for change in due[first : first + _AT_ONCE_COUNT]))
            if not all(written):
                return

    async def _apply(self, change: FinalizerChange) -> bool:
        """Write one change; return whether the API server answers."""
        name = change.view.name
        try:
            await self._write(change)
        except (NotFound, Conflict):
            pass  # deleted or changed meanwhile: the next tick sees it
        except TransientError as exc:
            log.warning("finalizer write failed, retried", node=name, error=str(exc))
            return False
        except PermanentError as exc:
            if name not in self._refused:
                log.warning("finalizer write refused", node=name, error=str(exc))
            self._refused.add(name)
        return True

    async def _write(self, change: FinalizerChange) -> None:
        node = await self._kube.get(NODES, "", change.view.name)
        finalizers = node.metadata.finalizers
        is_present = labels.TERMINATION_FINALIZER in finalizers
        is_late = change.is_wanted and node.metadata.deletion_timestamp is not None
        if node.metadata.uid != change.view.node_uid or is_present == change.is_wanted or is_late:
            return
        others = [name for name in finalizers if name != labels.TERMINATION_FINALIZER]
        patch = {
            "metadata": {
                "uid": node.metadata.uid,
                "resourceVersion": node.metadata.resource_version,
                "finalizers": [*others, labels.TERMINATION_FINALIZER] if change.is_wanted else others,
            }
        }
        await self._kube.patch_node(change.view.name, patch)
        if not change.is_wanted:
            log.info(
                "finalizer removed", node=change.view.name, is_deleted=node.metadata.deletion_timestamp is not None
            )
