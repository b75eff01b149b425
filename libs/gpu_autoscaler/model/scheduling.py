"""What a pod demands of its node, and what a node shows: selectors, affinity, taints, tolerations."""

from typing import Literal

import msgspec

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]


class LabelRequirement(msgspec.Struct, frozen=True, gc=False):
    """One condition on labels, with Kubernetes' operators."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()


class NodeSelectorTerm(msgspec.Struct, frozen=True, gc=False):
    """Conditions that hold together. Terms of a pod are alternatives: one that holds is enough."""

    requirements: tuple[LabelRequirement, ...]


class Taint(msgspec.Struct, frozen=True, gc=False):
    """A mark on a node that keeps pods away."""

    key: str
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
    value: str = ""


# Taints that a node begins with, and that whoever is to make it ready takes away: the cluster's own, those of network
# and storage agents, of Karpenter, and by cluster-autoscaler's convention whatever a pool's nodes are registered with
# under its prefix, or ours. Sources: Kubernetes, "Well-Known Labels, Annotations and Taints"; Cilium, "Considerations
# on node pool taints"; EBS and EFS CSI drivers, "Node Startup Taint"; Karpenter, "NodePools", startupTaints;
# cluster-autoscaler FAQ, "startup taints" (read 2026-11-21).
STARTUP_TAINTS = frozenset(
    {
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/network-unavailable",
        "node.cloudprovider.kubernetes.io/uninitialized",
        "node.cilium.io/agent-not-ready",
        "ebs.csi.aws.com/agent-not-ready",
        "efs.csi.aws.com/agent-not-ready",
        "karpenter.sh/unregistered",
    }
)
STARTUP_PREFIXES = (
    "startup-taint.gpu-autoscaler.io/",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
)


def is_startup(taint: Taint) -> bool:
    """True for a taint that is expected to vanish before the node is of use."""
    return taint.effect != "PreferNoSchedule" and (
        taint.key in STARTUP_TAINTS or taint.key.startswith(STARTUP_PREFIXES)
    )


class Toleration(msgspec.Struct, frozen=True, gc=False):
    """A pod's permission to ignore a taint. An empty key with Exists tolerates all; an empty effect, every effect."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: str = ""


class NodeDemands(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a pod requires of its node besides room."""

    node_selector: tuple[tuple[str, str], ...] = ()  # sorted by key
    node_affinity: tuple[NodeSelectorTerm, ...] = ()  # alternatives; empty means no condition
    tolerations: tuple[Toleration, ...] = ()


NO_DEMANDS = NodeDemands()


class PodGroup(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Pods known by their labels."""

    namespaces: tuple[str, ...]  # sorted; empty: those of every namespace
    requirements: tuple[LabelRequirement, ...]  # hold together; empty selects every pod


class Nearness(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Pods of a group, and the label whose value two nodes share that are near each other."""

    topology_key: str
    group: PodGroup


class Spread(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Pods of a group are spread evenly over the values of a node label."""

    topology_key: str
    group: PodGroup
    skew_count_max: int = 1  # between the values with the most and the fewest such pods


class NeighbourDemands(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a pod requires of the pods near it. What it would merely like is in `Preferences`."""

    spreads: tuple[Spread, ...] = ()
    apart: tuple[Nearness, ...] = ()  # no pod of these is near
    together: tuple[Nearness, ...] = ()  # a pod of each of these is near, unless the pod is its group's first


class NodePreference(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Nodes that a pod would rather be on."""

    weight: int  # 1..100, as in Kubernetes; those that hold are added up
    term: NodeSelectorTerm


class NearPreference(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Pods that a pod would rather be near to, or far from."""

    weight: int  # 1..100, as in Kubernetes
    nearness: Nearness


class Preferences(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a pod would like of its node and of the pods near it. They bind nobody: `core/preferences.py` says when."""

    nodes: tuple[NodePreference, ...] = ()
    spreads: tuple[Spread, ...] = ()  # ScheduleAnyway
    apart: tuple[NearPreference, ...] = ()
    together: tuple[NearPreference, ...] = ()
