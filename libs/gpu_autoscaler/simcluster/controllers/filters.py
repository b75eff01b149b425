"""Where a pod may run: one node's view, the scheduler's filters and scores. Pure; no store, no clock.

Order and wording of the refusals: the filter plugins of kube-scheduler 1.36, `pkg/scheduler/framework/plugins`
(read 2026-11-21). Without plugins that no workload here uses: ports, pod affinity, spread.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_autoscaler.simcluster.objects import Json, labels_of, quantity_milli
from gpu_autoscaler.simcluster.selectors import requirement_met

UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"
NOT_ENOUGH_PODS = "Too many pods"
_UNSCHEDULABLE = "node(s) were unschedulable"
_VOLUMES = "node(s) had volume node affinity conflict"
_DEVICES = "cannot allocate all claims"
_AFFINITY = "node(s) didn't match Pod's node affinity/selector"


@dataclass(slots=True)
class NodeView:
    """A node as the scheduler sees it: properties and usage."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Json, ...]
    unschedulable: bool
    allocatable_milli: Mapping[str, int]
    used_milli: dict[str, int] = field(default_factory=dict)

    def take(self, requests: Mapping[str, int], sign: int = 1) -> None:
        """Count a pod's requests as used, or with sign -1 as free again."""
        for name, amount in requests.items():
            self.used_milli[name] = self.used_milli.get(name, 0) + sign * amount

    def same_shape(self, other: "NodeView") -> bool:
        mine = (self.labels, self.taints, self.unschedulable, self.allocatable_milli)
        return mine == (other.labels, other.taints, other.unschedulable, other.allocatable_milli)


def view_of(node: Json) -> NodeView:
    """Return the view of an unused node."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    allocatable = status.get("allocatable") or status.get("capacity") or {}
    return NodeView(
        name=node["metadata"]["name"],
        labels=dict(labels_of(node)),
        taints=tuple(taint for taint in spec.get("taints") or ()),
        unschedulable=bool(spec.get("unschedulable")),
        allocatable_milli={name: quantity_milli(str(text)) for name, text in allocatable.items()},
    )


@dataclass(frozen=True, slots=True)
class Needs:
    """What decides where a pod may run; pods with equal needs share the result."""

    requests_milli: Mapping[str, int]
    node_selector: Mapping[str, str]
    required_terms: tuple[Json, ...] | None  # None: no required affinity; any one term is enough
    preferred_terms: tuple[Json, ...]
    tolerations: tuple[Json, ...]
    volume_terms: tuple[Json, ...] = ()  # node conditions of its volumes, all required
    hopeless: str = ""  # why no node is possible for now
    device_nodes: tuple[str, ...] | None = None  # nodes for its device claims; None: no claims


def needs_of(
    pod: Json,
    requests: Mapping[str, int],
    volume_terms: tuple[Json, ...] = (),
    hopeless: str = "",
    device_nodes: tuple[str, ...] | None = None,
) -> Needs:
    """Return the needs of a pod, including its volumes and device claims."""
    spec = pod["spec"]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return Needs(
        requests_milli=requests,
        node_selector=spec.get("nodeSelector") or {},
        required_terms=tuple(required.get("nodeSelectorTerms") or ()) if required else None,
        preferred_terms=tuple(affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()),
        tolerations=tuple(spec.get("tolerations") or ()),
        volume_terms=volume_terms,
        hopeless=hopeless,
        device_nodes=device_nodes,
    )


def tolerates(tolerations: tuple[Json, ...], taint: Json) -> bool:
    """Return whether any toleration covers the taint."""
    return any(toleration_matches(toleration, taint) for toleration in tolerations)


def toleration_matches(toleration: Json, taint: Json) -> bool:
    """Return whether one toleration covers the taint (documentation, "Taints and Tolerations", read 2026-11-21)."""
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("key")) and (toleration.get("value") or "") == (taint.get("value") or "")


def standing_refusal(needs: Needs, node: NodeView) -> str | None:
    """Return why the node is excluded regardless of its usage; None if it is not."""
    if needs.hopeless:
        return needs.hopeless
    cordon = {"key": UNSCHEDULABLE_TAINT, "effect": "NoSchedule"}
    if node.unschedulable and not tolerates(needs.tolerations, cordon):
        return _UNSCHEDULABLE
    for taint in node.taints:
        if taint["effect"] != "PreferNoSchedule" and not tolerates(needs.tolerations, taint):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value') or ''}}}"
    if any(node.labels.get(key) != value for key, value in needs.node_selector.items()):
        return _AFFINITY
    if needs.required_terms is not None and not any(_term_met(term, node) for term in needs.required_terms):
        return _AFFINITY
    if not all(requirement_met(entry, node.labels) for entry in needs.volume_terms):
        return _VOLUMES
    if needs.device_nodes is not None and node.name not in needs.device_nodes:
        return _DEVICES
    return None


def _term_met(term: Json, node: NodeView) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False  # an empty term selects nothing
    own = {"metadata.name": node.name}
    return all(requirement_met(entry, node.labels) for entry in expressions) and all(
        requirement_met(entry, own) for entry in fields
    )


def lacking(requests: Mapping[str, int], node: NodeView) -> list[str]:
    """Return the reasons why the pod does not fit into the node's free resources; [] if it fits."""
    allocatable, used = node.allocatable_milli, node.used_milli
    return [
        NOT_ENOUGH_PODS if name == "pods" else f"Insufficient {name}"
        for name, amount in requests.items()
        if amount and used.get(name, 0) + amount > allocatable.get(name, 0)
    ]


def preference(needs: Needs, node: NodeView) -> int:
    """Return the sum of the preferred terms' weights that hold, less one for each taint to be avoided."""
    weights = sum(term["weight"] for term in needs.preferred_terms if _term_met(term["preference"], node))
    avoided = [
        taint
        for taint in node.taints
        if taint["effect"] == "PreferNoSchedule" and not tolerates(needs.tolerations, taint)
    ]
    return int(weights) - len(avoided)


def fullness(requests: Mapping[str, int], node: NodeView) -> float:
    """Return how full the node would be with the pod, 0 to 1, over the resources it asks for."""
    shares = [
        (node.used_milli.get(name, 0) + amount) / node.allocatable_milli[name]
        for name, amount in requests.items()
        if amount and name != "pods"
    ]
    return sum(shares) / len(shares) if shares else 0.0


_Entry = tuple[int, float, str]  # least first: less preferred, less full, name


class Shortlist:
    """Nodes that permanent rules allow for pods with these needs."""

    def __init__(self, needs: Needs, nodes: Iterable[NodeView], touched_count: int) -> None:
        """`touched_count`: touches of nodes so far."""
        self._requests = needs.requests_milli
        self._refusals = Counter[str]()
        self._allowed: dict[str, tuple[int, NodeView]] = {}
        self._touches_seen = touched_count
        for node in nodes:
            refusal = standing_refusal(needs, node)
            if refusal is None:
                self._allowed[node.name] = (-preference(needs, node), node)
            else:
                self._refusals[refusal] += 1
        self._heap = [self._entry(name) for name, (_, node) in self._allowed.items() if self._fits(node)]
        heapq.heapify(self._heap)

    def best(self, touched: Sequence[str]) -> str | None:
        """Return the node to use: the most preferred, then the fullest, then the first by name."""
        for name in set(touched[self._touches_seen :]) & self._allowed.keys():
            if self._fits(self._allowed[name][1]):
                heapq.heappush(self._heap, self._entry(name))
        self._touches_seen = len(touched)
        while self._heap:
            entry = self._heap[0]
            if self._fits(self._allowed[entry[2]][1]) and entry == self._entry(entry[2]):
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def why_none(self) -> Counter[str]:
        """Return how many nodes are excluded for which reason; a node may have several."""
        reasons = Counter(self._refusals)
        for _, node in self._allowed.values():
            reasons.update(lacking(self._requests, node))
        return reasons

    def _fits(self, node: NodeView) -> bool:
        return not lacking(self._requests, node)

    def _entry(self, name: str) -> _Entry:
        dislike, node = self._allowed[name]
        return (dislike, -fullness(self._requests, node), name)
