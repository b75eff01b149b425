"""The simulated kube-scheduler: capacity, readiness, taints, selectors, required anti-affinity, topology spread,
preferred hosts.

Independent of the core's placement, which is thereby tested. Source: Kubernetes documentation, "Assigning Pods to
Nodes", "Pod Topology Spread Constraints" (read 2026-11-21).
"""

from collections.abc import Callable, Iterable, Mapping

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.translate.common import amounts, condition
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.resources import Resources

FINISHED = ("Succeeded", "Failed")


def choose(
    pod: wire.Pod,
    nodes: Iterable[wire.Node],
    free: Mapping[str, Resources],
    liked: frozenset[str],
    reaches: Callable[[wire.Pod, wire.Node], bool],
) -> wire.Node | None:
    """Return the node for the pod: a preferred one, else the fullest; None if no node fits or `reaches` its volumes."""
    wanted = pod_requests(pod)
    fitting = [
        node
        for node in nodes
        if is_open(node) and wanted.fits_in(free[node.metadata.name]) and accepts(pod.spec, node) and reaches(pod, node)
    ]
    return min(fitting, key=lambda node: _rank(node, free, liked), default=None)


def free_room(nodes: Iterable[wire.Node], pods: Iterable[wire.Pod]) -> dict[str, Resources]:
    """Return the free capacity of each node by name."""
    free = {node.metadata.name: amounts(node.status.allocatable, of=node.metadata.name) for node in nodes}
    for pod in pods:
        host = pod.spec.node_name
        if host in free and pod.status.phase not in FINISHED:
            free[host] -= pod_requests(pod)
    return free


def is_open(node: wire.Node) -> bool:
    """True for a node that is ready and accepts new pods."""
    ready = condition(node.status.conditions, "Ready")
    is_ready = ready is not None and ready.status == "True"
    return is_ready and not node.spec.unschedulable and node.metadata.deletion_timestamp is None


def accepts(spec: wire.PodSpec, node: wire.Node) -> bool:
    """True if the pod's selectors match the node and it tolerates the node's taints."""
    shown = node.metadata.labels
    if any(shown.get(key) != value for key, value in spec.node_selector.items()):
        return False
    required = spec.affinity.node_affinity.required if spec.affinity and spec.affinity.node_affinity else None
    if required is not None and not any(
        term.match_expressions and all(_holds(one, shown) for one in term.match_expressions)
        for term in required.node_selector_terms
    ):
        return False
    return all(
        taint.effect == "PreferNoSchedule" or any(_tolerates(one, taint) for one in spec.tolerations)
        for taint in node.spec.taints
    )


def liked_hosts(template_spec: Mapping[str, object]) -> frozenset[str]:
    """Return the host names that a Job's template prefers."""
    affinity = template_spec.get("affinity")
    node_affinity = affinity.get("nodeAffinity", {}) if isinstance(affinity, dict) else {}
    return frozenset(
        host
        for term in node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        for one in term["preference"]["matchExpressions"]
        if one["key"] == labels.HOSTNAME
        for host in one["values"]
    )


def _rank(node: wire.Node, free: Mapping[str, Resources], liked: frozenset[str]) -> tuple[bool, int, int, str]:
    name = node.metadata.name
    return name not in liked, free[name].gpu_count, free[name].cpu_milli, name


def _holds(wanted: wire.Requirement, shown: Mapping[str, str]) -> bool:
    value = shown.get(wanted.key)
    match wanted.operator:
        case "In":
            return value in wanted.values
        case "NotIn":
            return value not in wanted.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and value.isdigit() and int(value) > int(wanted.values[0])
        case "Lt":
            return value is not None and value.isdigit() and int(value) < int(wanted.values[0])
        case other:
            raise ValueError(f"no operator of Kubernetes: {other!r}")


def _tolerates(toleration: wire.WireToleration, taint: wire.WireTaint) -> bool:
    if toleration.effect not in ("", taint.effect):
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", taint.key)
    return (toleration.key, toleration.value) == (taint.key, taint.value)
