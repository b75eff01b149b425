"""Scheduling constraints of pods and taints of nodes: selectors, affinity, topology spread, taints, tolerations."""

from itertools import product
from typing import Literal

import msgspec

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]


class LabelRequirement(msgspec.Struct, frozen=True, gc=False):
    """One condition on labels, with the operators of Kubernetes."""

    key: str  # key of the label
    operator: Operator  # how the value is compared
    values: tuple[str, ...] = ()  # values to compare with; empty for Exists and DoesNotExist


class NodeSelectorTerm(msgspec.Struct, frozen=True, gc=False):
    """Conditions that must all hold. The terms of a pod are alternatives."""

    requirements: tuple[LabelRequirement, ...]  # conditions that all hold


Terms = tuple[NodeSelectorTerm, ...]  # alternatives; empty: no condition
# Terms of the pod times those of its volumes; no realistic pod has more.
_TERMS_COUNT_MAX = 256


def all_terms(own: Terms, others: tuple[Terms, ...]) -> Terms:
    """Return terms equivalent to the conjunction of these lists of alternative terms."""
    parts = [terms for terms in (own, *others) if terms]
    if len(parts) <= 1:
        return parts[0] if parts else ()
    combined: dict[NodeSelectorTerm, None] = {}
    for terms in product(*parts):
        conditions = dict.fromkeys(requirement for term in terms for requirement in term.requirements)
        combined[NodeSelectorTerm(tuple(conditions))] = None
        if len(combined) == _TERMS_COUNT_MAX:
            break
    return tuple(combined)


class Taint(msgspec.Struct, frozen=True, gc=False):
    """A taint of a node."""

    key: str  # key of the taint
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]  # what it does to pods without a toleration
    value: str = ""  # value of the taint; may be empty


# Taints that a node registers with and that the component making it ready removes: the cluster's own, those of network
# and storage agents, of Karpenter, and by cluster-autoscaler's convention whatever a pool's nodes are registered with
# under its prefix or ours. Sources: Kubernetes, "Well-Known Labels, Annotations and Taints"; Cilium, "Considerations
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
    """True for a taint that is removed before the node is usable."""
    return taint.effect != "PreferNoSchedule" and (
        taint.key in STARTUP_TAINTS or taint.key.startswith(STARTUP_PREFIXES)
    )


class Toleration(msgspec.Struct, frozen=True, gc=False):
    """A toleration of a pod. An empty key with Exists tolerates all taints; an empty effect, every effect."""

    key: str = ""  # key of the taint; empty: any
    operator: Literal["Equal", "Exists"] = "Equal"  # Equal compares the value, Exists does not
    value: str = ""  # value of the taint
    effect: str = ""  # effect of the taint; empty: any


class NodeDemands(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a pod requires of its node besides resources."""

    node_selector: tuple[tuple[str, str], ...] = ()  # sorted by key
    node_affinity: tuple[NodeSelectorTerm, ...] = ()  # alternatives; empty means no condition
    tolerations: tuple[Toleration, ...] = ()  # of taints of the node


NO_DEMANDS = NodeDemands()


class PodGroup(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Pods selected by namespace and labels."""

    namespaces: tuple[str, ...]  # sorted; empty: those of every namespace
    requirements: tuple[LabelRequirement, ...]  # must all hold; empty selects every pod


class AffinitySelector(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Pods of a group, and the topology label that defines their domain."""

    topology_key: str
    group: PodGroup


class Spread(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A topology spread constraint: pods of a group are spread over the values of a node label."""

    topology_key: str
    group: PodGroup
    skew_count_max: int = 1  # maximum difference between the values with the most and the fewest such pods
    domains_count_min: int = 1  # with fewer values that have a suitable node, the fewest such pods are taken to be none
    is_over_tainted_nodes: bool = True  # also over values whose nodes all have taints that the pod does not tolerate


class PodAffinitySpec(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Required pod affinity, anti-affinity and topology spread. Preferred rules are in `Preferences`."""

    spreads: tuple[Spread, ...] = ()  # topology spread constraints that must hold
    apart: tuple[AffinitySelector, ...] = ()  # anti-affinity: no such pod in the same domain
    together: tuple[AffinitySelector, ...] = ()  # affinity: a pod of each in the same domain, but for the first pod


class NodePreference(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A preferred node affinity of a pod."""

    weight: int  # 1..100, as in Kubernetes; the weights of matching terms add up
    term: NodeSelectorTerm  # conditions on the labels of the node


class AffinityPreference(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A preferred pod affinity or anti-affinity."""

    weight: int  # 1..100, as in Kubernetes
    selector: AffinitySelector  # the pods, and the domain that they share


class Preferences(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Preferred node affinity, pod affinity and topology spread: used where they cost nothing."""

    nodes: tuple[NodePreference, ...] = ()  # preferred node affinity
    spreads: tuple[Spread, ...] = ()  # ScheduleAnyway
    apart: tuple[AffinityPreference, ...] = ()  # preferred pod anti-affinity
    together: tuple[AffinityPreference, ...] = ()  # preferred pod affinity
