"""Required rules between pods: anti-affinity and topology spread."""

from collections import Counter
from collections.abc import Iterable, Sequence

from gpu_autoscaler.kube import wire


def has_rules(spec: wire.PodSpec) -> bool:
    """True for a pod with required rules about other pods."""
    return bool(_apart(spec) or spec.topology_spread_constraints)


def allowed(pod: wire.Pod, nodes: Sequence[wire.Node], pods: Iterable[wire.Pod]) -> list[wire.Node]:
    """Return the nodes that the pod's rules about other pods allow."""
    where = {node.metadata.name: node.metadata.labels for node in nodes}
    standing = [
        (other, where[other.spec.node_name])
        for other in pods
        if other.spec.node_name in where and other.metadata.namespace == pod.metadata.namespace
    ]
    found = list(nodes)
    for term in _apart(pod.spec):
        taken = {shown.get(term.topology_key) for other, shown in standing if _selects(term.label_selector, other)}
        found = [node for node in found if node.metadata.labels.get(term.topology_key) not in taken]
    for rule in pod.spec.topology_spread_constraints:
        if rule.when_unsatisfiable == "DoNotSchedule":
            found = _even(found, rule, nodes, standing)
    return found


def _even(
    found: list[wire.Node],
    rule: wire.TopologySpreadConstraint,
    nodes: Sequence[wire.Node],
    standing: list[tuple[wire.Pod, dict[str, str]]],
) -> list[wire.Node]:
    key = rule.topology_key
    counts: Counter[str] = Counter({node.metadata.labels[key]: 0 for node in nodes if key in node.metadata.labels})
    counts.update(shown[key] for other, shown in standing if key in shown and _selects(rule.label_selector, other))
    least = min(counts.values(), default=0)
    return [
        node
        for node in found
        if key in node.metadata.labels and counts[node.metadata.labels[key]] + 1 - least <= rule.max_skew
    ]


def _apart(spec: wire.PodSpec) -> tuple[wire.PodAffinityTerm, ...]:
    rules = None if spec.affinity is None else spec.affinity.pod_anti_affinity
    return () if rules is None else rules.required


def _selects(selector: wire.LabelSelector | None, pod: wire.Pod) -> bool:
    return selector is not None and selector.match_labels.items() <= pod.metadata.labels.items()
