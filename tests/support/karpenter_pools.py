"""NodePools whose limits are handed to us, and pods that wait for what they make."""

import json
from typing import Any

from tests.bench.peers.real import NODE_CLASS
from tests.controlplane.plane import ControlPlane

POOLS = "/apis/karpenter.sh/v1/nodepools"
GPU = "nvidia.com/gpu"


def node_pool(name: str, instance_type: str, zone: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as the kind has them
    """A pool that makes one type in one place, with the label and the taint of the contract's orders; nothing is ended
    by Karpenter's choice, and nothing may be made yet. `more`: of its spec."""
    group, kind, class_name = NODE_CLASS.split("/")
    asked = (
        ("node.kubernetes.io/instance-type", instance_type),
        ("topology.kubernetes.io/zone", zone),
        ("karpenter.sh/capacity-type", "on-demand"),
    )
    template = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "requirements": [{"key": key, "operator": "In", "values": [value]} for key, value in asked],
            "taints": [{"key": GPU, "value": "true", "effect": "NoSchedule"}],
            "nodeClassRef": {"group": group, "kind": kind, "name": class_name},
            "expireAfter": "Never",
        },
    }
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {
            "template": template,
            "limits": {GPU: "0"},
            "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "Never"},
            **more,
        },
    }


def apply_pools(plane: ControlPlane, *pools: dict[str, Any]) -> None:
    """Have them, ready."""
    for pool in pools:
        plane.kubectl("apply", "-f", "-", text=json.dumps(pool))
        plane.kubectl("wait", "--for=condition=Ready", "--timeout=60s", f"nodepool/{pool['metadata']['name']}")
