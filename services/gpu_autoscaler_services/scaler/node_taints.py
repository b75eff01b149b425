"""Adds and removes our taint on nodes that new pods are to avoid, as a plan decided.

Each write carries the resource version that was read, so that the taints of others are kept.
"""

import msgspec

from gpu_autoscaler.kube.protocol import NODES, KubeApi
from gpu_autoscaler.kube.wire.core import WireTaint
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import AvoidNode, OpenNode


class NodeTaints:
    """Writes taints."""

    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube

    async def write(self, decision: AvoidNode | OpenNode) -> None:
        """Write one change, unless it is written already.

        Raises NotFound, Conflict, TransientError, PermanentError.
        """
        is_wanted = isinstance(decision, AvoidNode)
        node = await self._kube.get(NODES, "", decision.node_name)
        others = [taint for taint in node.spec.taints if taint.key != labels.AVOID_TAINT]
        is_present = len(others) < len(node.spec.taints)
        if node.metadata.uid != decision.node_uid or is_present == is_wanted:
            return
        ours = [WireTaint(key=labels.AVOID_TAINT, effect="PreferNoSchedule")] if is_wanted else []
        patch = {
            "metadata": {"uid": node.metadata.uid, "resourceVersion": node.metadata.resource_version},
            "spec": {"taints": msgspec.to_builtins([*others, *ours])},
        }
        await self._kube.patch_node(decision.node_name, patch)
