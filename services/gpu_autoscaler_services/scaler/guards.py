"""The executor's hand on the finalizer of our nodes: what `core/deleted.py` finds due is written, and nothing else.

It looks before it writes, with the version that it saw: other people's finalizers stay as they are. Whoever begins with
the state as it is goes on where another one stopped, so nothing of this is on record.
"""

from datetime import datetime

import structlog

from gpu_autoscaler.core.deleted import Guard, guards_due
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.kube.protocol import NODES, Conflict, KubeApi, NotFound
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError

GUARDS_PER_TICK_MAX = 32

log = structlog.get_logger()


class Guards:
    """Writes finalizers."""

    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube
        self._refused: set[str] = set()  # nodes of which it was told already that nothing can be written

    async def keep(self, state: ClusterState, policy: ScalingPolicy, now: datetime) -> None:
        """Write what is due, within the limit of one tick."""
        for guard in guards_due(state, policy, now)[:GUARDS_PER_TICK_MAX]:
            name = guard.view.name
            try:
                await self._write(guard)
            except (NotFound, Conflict):
                continue  # gone, or changed under way: what is due shows at the next look
            except TransientError as exc:
                log.warning("finalizer not written, tried again", node=name, error=str(exc))
                return
            except PermanentError as exc:
                if name not in self._refused:
                    log.warning("finalizer not written, the node is not held", node=name, error=str(exc))
                self._refused.add(name)

    async def _write(self, guard: Guard) -> None:
        node = await self._kube.get(NODES, "", guard.view.name)
        held = node.metadata.finalizers
        is_there = labels.TERMINATION_FINALIZER in held
        is_late = guard.is_wanted and node.metadata.deletion_timestamp is not None
        if node.metadata.uid != guard.view.node_uid or is_there == guard.is_wanted or is_late:
            return
        others = [one for one in held if one != labels.TERMINATION_FINALIZER]
        patch = {
            "metadata": {
                "uid": node.metadata.uid,
                "resourceVersion": node.metadata.resource_version,
                "finalizers": [*others, labels.TERMINATION_FINALIZER] if guard.is_wanted else others,
            }
        }
        await self._kube.patch_node(guard.view.name, patch)
        if not guard.is_wanted:
            log.info(
                "finalizer taken away", node=guard.view.name, is_deleted=node.metadata.deletion_timestamp is not None
            )
