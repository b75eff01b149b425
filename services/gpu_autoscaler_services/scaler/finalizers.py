"""Adds and removes our finalizer on nodes, as a plan decided.

Each write carries the resource version that was read, so that the finalizers of others are kept.
"""

import structlog

from gpu_autoscaler.kube.protocol import NODES, KubeApi
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import AddFinalizer, RemoveFinalizer

log = structlog.get_logger()


class Finalizers:
    """Writes finalizers."""

    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube

    async def write(self, decision: AddFinalizer | RemoveFinalizer) -> None:
        """Write one change, unless it is written already or comes too late.

        Raises NotFound, Conflict, TransientError, PermanentError.
        """
        is_wanted = isinstance(decision, AddFinalizer)
        node = await self._kube.get(NODES, "", decision.node_name)
        finalizers = node.metadata.finalizers
        is_present = labels.TERMINATION_FINALIZER in finalizers
        is_late = is_wanted and node.metadata.deletion_timestamp is not None
        if node.metadata.uid != decision.node_uid or is_present == is_wanted or is_late:
            return
        others = [name for name in finalizers if name != labels.TERMINATION_FINALIZER]
        patch = {
            "metadata": {
                "uid": node.metadata.uid,
                "resourceVersion": node.metadata.resource_version,
                "finalizers": [*others, labels.TERMINATION_FINALIZER] if is_wanted else others,
            }
        }
        await self._kube.patch_node(decision.node_name, patch)
        if not is_wanted:
            log.info(
                "finalizer removed", node=decision.node_name, is_deleted=node.metadata.deletion_timestamp is not None
            )
