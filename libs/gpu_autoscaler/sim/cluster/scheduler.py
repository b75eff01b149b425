"""Where the simulated kube-scheduler may bind a pod: capacity, readiness, taints, selectors, required anti-affinity,
topology spread. `scheduler_scores` chooses among these nodes.

Independent of the core's placement, which is thereby tested. Source: Kubernetes documentation, "Assigning Pods to
Nodes", "Pod Topology Spread Constraints" (read 2026-11-21).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpu_autoscaler.kube.translate.common import amounts
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.sim.cluster.objects import is_true, selects
from gpu_autoscaler.simcluster.selectors import operator_holds

FINISHED = ("Succeeded", "Failed")


def fitting_nodes(
    pod: core.Pod,
    nodes: Iterable[core.Node],
    free: Mapping[str, Resources],
    reaches: Callable[[core.Pod, core.Node], bool],
) -> list[core.Node]:
    """Return the nodes that fit the pod and that `reaches` its volumes."""
    requests = pod_requests(pod)
    return [
        node
        for node in nodes
        if is_open(node)
        and requests.fits_in(free[node.metadata.name])
        and accepts(pod.spec, node)
        and reaches(pod, node)
    ]


def free_capacity(nodes: Iterable[core.Node], pods: Iterable[core.Pod]) -> dict[str, Resources]:
    """Return the free capacity of each node by name."""
    free = {node.metadata.name: amounts(node.status.allocatable, of=node.metadata.name) for node in nodes}
    for pod in pods:
        host = pod.spec.node_name
        if host in free and pod.status.phase not in FINISHED:
            free[host] -= pod_requests(pod)
    return free


def is_open(node: core.Node) -> bool:
    """True for a node that is ready and accepts new pods."""
    is_ready = is_true(node.status.conditions, "Ready")
    return is_ready and not node.spec.unschedulable and node.metadata.deletion_timestamp is None


def accepts(spec: core.PodSpec, node: core.Node) -> bool:
    """True if the pod's selectors match the node and it tolerates the node's taints."""
    node_labels = node.metadata.labels
    if any(node_labels.get(key) != value for key, value in spec.node_selector.items()):
        return False
    required = spec.affinity.node_affinity.required if spec.affinity and spec.affinity.node_affinity else None
    if required is not None and not any(
        term.match_expressions and all(holds(expression, node_labels) for expression in term.match_expressions)
        for term in required.node_selector_terms
    ):
        return False
    return all(
        taint.effect == "PreferNoSchedule" or any(tolerates(expression, taint) for expression in spec.tolerations)
        for taint in node.spec.taints
    )


def holds(requirement: core.Requirement, node_labels: Mapping[str, str]) -> bool:
    """True if the labels meet the requirement."""
    return operator_holds(requirement.operator, node_labels.get(requirement.key), requirement.values)


def tolerates(toleration: core.WireToleration, taint: core.WireTaint) -> bool:
    """True if the toleration covers the taint."""
    if toleration.effect not in ("", taint.effect):
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", taint.key)
    return (toleration.key, toleration.value) == (taint.key, taint.value)


# Required rules between pods: anti-affinity and topology spread.


def has_pod_rules(spec: core.PodSpec) -> bool:
    """True for a pod with required rules about other pods."""
    return bool(_anti_affinity(spec) or spec.topology_spread_constraints)


def allowed_nodes(pod: core.Pod, nodes: Sequence[core.Node], pods: Iterable[core.Pod]) -> list[core.Node]:
    """Return the nodes that the pod's rules about other pods allow."""
    where = {node.metadata.name: node.metadata.labels for node in nodes}
    placed = [
        (other, where[other.spec.node_name])
        for other in pods
        if other.spec.node_name in where and other.metadata.namespace == pod.metadata.namespace
    ]
    candidates = list(nodes)
    for term in _anti_affinity(pod.spec):
        occupied = {
            node_labels.get(term.topology_key) for other, node_labels in placed if selects(term.label_selector, other)
        }
        candidates = [node for node in candidates if node.metadata.labels.get(term.topology_key) not in occupied]
    for rule in pod.spec.topology_spread_constraints:
        if rule.when_unsatisfiable == "DoNotSchedule":
            candidates = _evenly_spread(candidates, rule, nodes, placed)
    return candidates


def _evenly_spread(
    candidates: list[core.Node],
    rule: core.TopologySpreadConstraint,
    nodes: Sequence[core.Node],
    placed: list[tuple[core.Pod, dict[str, str]]],
) -> list[core.Node]:
    key = rule.topology_key
    counts: Counter[str] = Counter({node.metadata.labels[key]: 0 for node in nodes if key in node.metadata.labels})
    counts.update(
        node_labels[key] for other, node_labels in placed if key in node_labels and selects(rule.label_selector, other)
    )
    least = min(counts.values(), default=0) if len(counts) >= (rule.min_domains or 1) else 0
    return [
        node
        for node in candidates
        if key in node.metadata.labels and counts[node.metadata.labels[key]] + 1 - least <= rule.max_skew
    ]


def _anti_affinity(spec: core.PodSpec) -> tuple[core.PodAffinityTerm, ...]:
    rules = None if spec.affinity is None else spec.affinity.pod_anti_affinity
    return () if rules is None else rules.required
