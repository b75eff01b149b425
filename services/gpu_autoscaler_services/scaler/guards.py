"""The executor's hand on the finalizer of our nodes: what `core/removing/deleted.py` finds due is written, no more.

It looks before it writes, with the version that it saw: other people's finalizers stay as they are. Whoever begins with
the state as it is goes on where another one stopped, so nothing of this is on record.
"""

import asyncio
from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.removing.deleted import Guard, guards_due
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.kube.protocol import NODES, Conflict, KubeApi, NotFound
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError, TransientError

GUARDS_PER_TICK_MAX = 32
_AT_ONCE_COUNT = 8
_NEW_FOR = timedelta(seconds=15)

log = structlog.get_logger()


class Guards:
    """Writes finalizers."""

    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube
        self._refused: set[str] = set()  # nodes of which it was told already that nothing can be written

    async def keep(
        self, state: ClusterState, policy: ScalingPolicy, now: datetime, *, is_late_only: bool = False
    ) -> None:
        """Write what is due, within the limit of one tick, a few at once; or that alone which does not suffer delay:
        nodes that go, and those that have been there for a while."""
        due = guards_due(state, policy, now)
        if is_late_only:
            due = tuple(guard for guard in due if not guard.is_wanted or _is_old(guard, now))
        due = due[:GUARDS_PER_TICK_MAX]
        for first in range(0, len(due), _AT_ONCE_COUNT):
            written = await asyncio.gather(*(self._keep(guard) for guard in due[first : first + _AT_ONCE_COUNT]))
            if not all(written):
                return

    async def _keep(self, guard: Guard) -> bool:
        """Return whether the API server answers."""
        name = guard.view.name
        try:
            await self._write(guard)
        except (NotFound, Conflict):
            pass  # gone, or changed under way: what is due shows at the next look
        except TransientError as exc:
            log.warning("finalizer not written, tried again", node=name, error=str(exc))
            return False
        except PermanentError as exc:
            if name not in self._refused:
                log.warning("finalizer not written, the node is not held", node=name, error=str(exc))
            self._refused.add(name)
        return True

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


def _is_old(guard: Guard, now: datetime) -> bool:
    node = guard.view.node
    return node is None or node.created_at <= now - _NEW_FOR
