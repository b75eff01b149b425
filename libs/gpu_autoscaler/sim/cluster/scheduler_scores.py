"""Which of several fitting nodes kube-scheduler binds a pod to: the scores of its default plugins, by their weights.

GPUs count for none of them, so that a pod goes to the node with most free CPU and memory. Left out are ImageLocality
(all nodes pull alike) and preferences of pods that already run. Of equal scores kube-scheduler draws one; here the
first by name, which is as good as drawn.
Source: kubernetes/kubernetes, pkg/scheduler/apis/config/v1/default_plugins.go and framework/plugins; Kubernetes
documentation, "Scheduler Configuration" and "Pod Topology Spread Constraints", cluster-level default constraints
(read 2026-11-27).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from gpu_autoscaler.kube.translate.common import amounts
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.sim.cluster.objects import selects
from gpu_autoscaler.sim.cluster.scheduler import holds, tolerates

SCORE_MAX = 100.0
TAINTS_WEIGHT, NODE_AFFINITY_WEIGHT, POD_AFFINITY_WEIGHT, SPREAD_WEIGHT = 3.0, 2.0, 2.0, 2.0
# Of pods of ReplicaSets without constraints of their own: topology key and maximum skew.
_DEFAULT_SPREAD = ((labels.HOSTNAME, 3), (labels.ZONE, 5))


def best_node(
    pod: core.Pod,
    fitting: Sequence[core.Node],
    free: Mapping[str, Resources],
    nodes: Sequence[core.Node],
    pods: Iterable[core.Pod],
) -> core.Node:
    """Return the node with the highest score. `fitting`: at least one, with their capacity in `free`; `nodes` and
    `pods`: all of the cluster.
    """
    if len(fitting) == 1:
        return fitting[0]
    scores = [0.0] * len(fitting)
    for weight, plugin_scores in (
        (TAINTS_WEIGHT, _tolerance(pod.spec, fitting)),
        (NODE_AFFINITY_WEIGHT, _node_affinity(pod.spec, fitting)),
        (1.0, _resources(pod, fitting, free)),
        *_by_other_pods(pod, fitting, nodes, pods),
    ):
        scores = [score + weight * more for score, more in zip(scores, plugin_scores, strict=True)]
    return min(zip(scores, fitting, strict=True), key=lambda scored: (-scored[0], scored[1].metadata.name))[1]


def _resources(pod: core.Pod, nodes: Sequence[core.Node], free: Mapping[str, Resources]) -> list[float]:
    """NodeResourcesFit (LeastAllocated) and NodeResourcesBalancedAllocation, over CPU and memory."""
    requests, scores = pod_requests(pod), list[float]()
    for node in nodes:
        name = node.metadata.name
        capacity, left = amounts(node.status.allocatable, of=name), free[name] - requests
        cpu = left.cpu_milli / max(1, capacity.cpu_milli)
        memory = left.memory_bytes / max(1, capacity.memory_bytes)
        scores.append(int(SCORE_MAX * (cpu + memory) / 2) + int(SCORE_MAX * (1 - abs(cpu - memory) / 2)))
    return scores


def _tolerance(spec: core.PodSpec, nodes: Sequence[core.Node]) -> list[float]:
    """TaintToleration: the fewer taints PreferNoSchedule that the pod does not tolerate, the better."""
    counts = [
        float(
            sum(
                taint.effect == "PreferNoSchedule" and not any(tolerates(item, taint) for item in spec.tolerations)
                for taint in node.spec.taints
            )
        )
        for node in nodes
    ]
    return [SCORE_MAX - score for score in _of_most(counts)]


def _node_affinity(spec: core.PodSpec, nodes: Sequence[core.Node]) -> list[float]:
    """NodeAffinity: the sum of weights of preferred terms that hold."""
    affinity = spec.affinity.node_affinity if spec.affinity else None
    terms = affinity.preferred if affinity else ()
    return _of_most(
        [
            float(
                sum(
                    term.weight
                    for term in terms
                    if all(holds(part, node.metadata.labels) for part in term.preference.match_expressions)
                )
            )
            for node in nodes
        ]
    )


def _of_most(scores: list[float]) -> list[float]:
    most = max(scores)
    return [SCORE_MAX * score / most for score in scores] if most else scores


def _by_other_pods(
    pod: core.Pod, fitting: Sequence[core.Node], nodes: Sequence[core.Node], pods: Iterable[core.Pod]
) -> list[tuple[float, list[float]]]:
    """InterPodAffinity by the pod's own preferred terms, and PodTopologySpread by constraints that may be violated."""
    terms, constraints = _weighted_terms(pod.spec), _soft_constraints(pod)
    if not terms and not constraints:
        return []
    where = {node.metadata.name: node.metadata.labels for node in nodes}
    placed = [other for other in pods if other.metadata.namespace == pod.metadata.namespace and other.spec.node_name]
    affinity, spread = [0.0] * len(fitting), [0.0] * len(fitting)
    for weight, term in terms:
        counts = _counts(term.topology_key, term.label_selector, placed, where)
        affinity = [
            score + weight * counts[node.metadata.labels.get(term.topology_key, "")]
            for score, node in zip(affinity, fitting, strict=True)
        ]
    for key, skew, selector in constraints:
        counts = _counts(key, selector, placed, where)
        domains = {node.metadata.labels.get(key) for node in fitting}
        spread = [
            score + counts[node.metadata.labels.get(key, "")] * math.log(len(domains) + 2) + skew - 1
            for score, node in zip(spread, fitting, strict=True)
        ]
    least, most = min(affinity), max(affinity)
    near = [SCORE_MAX * (score - least) / (most - least) if most > least else 0.0 for score in affinity]
    even = [SCORE_MAX * (max(spread) + min(spread) - score) / (max(spread) or 1.0) for score in spread]
    return [(POD_AFFINITY_WEIGHT, near), (SPREAD_WEIGHT, even)]


def _counts(
    key: str, selector: core.LabelSelector | None, placed: Iterable[core.Pod], where: Mapping[str, Mapping[str, str]]
) -> Counter[str]:
    """Return the number of selected pods in each domain of the nodes."""
    hosts = (where.get(other.spec.node_name or "") for other in placed if selects(selector, other))
    return Counter(node_labels[key] for node_labels in hosts if node_labels is not None and key in node_labels)


def _weighted_terms(spec: core.PodSpec) -> list[tuple[int, core.PodAffinityTerm]]:
    affinity = spec.affinity
    near = affinity.pod_affinity.preferred if affinity and affinity.pod_affinity else ()
    far = affinity.pod_anti_affinity.preferred if affinity and affinity.pod_anti_affinity else ()
    return [
        *((item.weight, item.pod_affinity_term) for item in near),
        *((-item.weight, item.pod_affinity_term) for item in far),
    ]


def _soft_constraints(pod: core.Pod) -> list[tuple[str, int, core.LabelSelector | None]]:
    if pod.spec.topology_spread_constraints:
        return [
            (rule.topology_key, rule.max_skew, rule.label_selector)
            for rule in pod.spec.topology_spread_constraints
            if rule.when_unsatisfiable == "ScheduleAnyway"
        ]
    if any(owner.kind == "ReplicaSet" for owner in pod.metadata.owner_references):
        selector = core.LabelSelector(match_labels=pod.metadata.labels)
        return [(key, skew, selector) for key, skew in _DEFAULT_SPREAD]
    return []
