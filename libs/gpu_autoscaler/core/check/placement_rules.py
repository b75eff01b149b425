"""The part of the second opinion that looks at who would stand beside whom. Called by `core/check/plan_check.py` alone.

Reads pods and their rules itself and counts by domain, where `core/placement/topology.py` keeps arrays. It refuses only
what no scheduler could put right: pods whose place the plan leaves open are given the benefit of the doubt.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import msgspec

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, UnmetDemand
from gpu_autoscaler.model.reasons.drain import NodeDeleted, SpendExhausted, SpotReclaim
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import LabelRequirement, NeighbourDemands, NodeDemands, PodGroup

# What the rules of the second opinion read of all pods, read once for all of them: ten thousand are many to
# go through with each plan. Called by `core/check/plan_check.py` and the rules beside it; `plan` reads them for itself.


class PodSummary(msgspec.Struct, frozen=True):
    """What was found."""

    unbound: tuple[PodObserved, ...]  # on no node, in the order of the state
    has_pod_rules: bool  # some pod has a rule about who stands beside it


@cached_by_identity(2)
def pod_summary(pods: Mapping[PodUid, PodObserved]) -> PodSummary:
    """Return what is to be known of these pods."""
    unbound: list[PodObserved] = []
    has_pod_rules = False
    for pod in pods.values():
        if pod.node_name is None:
            unbound.append(pod)
        if pod.neighbours is not None:
            has_pod_rules = True
    return PodSummary(tuple(unbound), has_pod_rules)


def job_named(key: str) -> JobId | None:
    """Return the job of `job/<id>` and of `member/<id>/<number>`, one beyond its gang; None: it is a pod's."""
    kind, _, name = key.partition("/")
    return JobId(name) if kind == "job" else JobId(name.rpartition("/")[0]) if kind == "member" else None


_Place = NodeObserved | BuyNode
_Placed = tuple[PodObserved, _Place]
_NONE = NeighbourDemands()


def pod_constraint_violations(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each pod that would have to stand where a rule of its own, or of another pod, forbids it."""
    bought = [each for each in plan.decisions if isinstance(each, BuyNode)]
    assigned = list(_assigned(bought, state))
    drains = [
        each
        for each in plan.decisions
        if isinstance(each, DrainNode) and not isinstance(each.reason, SpendExhausted | NodeDeleted | SpotReclaim)
    ]
    if not assigned and not drains:
        return
    if not pod_summary(state.pods).has_pod_rules:
        return  # nobody minds who stands beside it
    sight = _Sight(plan, state, assigned)
    for pod, place in assigned:
        for what in (
            *sight.anti_affinity_violations(pod, place),
            *sight.spread_violations(pod, place),
            *sight.affinity_violations(pod, place),
        ):
            yield f"{place.offer.key} is bought for pod {pod.namespace}/{pod.name}, {what}"
    for drain in drains:
        yield from sight.unplaced_pods(drain)


def _assigned(bought: Iterable[BuyNode], state: ClusterState) -> Iterator[tuple[PodObserved, BuyNode]]:
    """Pods with the node that is bought for them. What replaces nodes together does not say which takes which."""
    for decision in bought:
        if isinstance(decision.reason, UnmetDemand | ReplacesAtRiskNode):
            for key in decision.reason.demand:
                pod = state.pods.get(PodUid(key.removeprefix("pod/"))) if key.startswith("pod/") else None
                if pod is not None:
                    yield pod, decision


class _Sight:
    """Where everybody would stand: those that stay where they are, and those that nodes are bought for."""

    def __init__(self, plan: Plan, state: ClusterState, assigned: list[tuple[PodObserved, BuyNode]]) -> None:
        self._nodes = {node.name: node for node in state.nodes.values()}
        going = {each.node_name for each in plan.decisions if isinstance(each, DrainNode)}
        for record in state.drains.values():
            if isinstance(record.decision, DrainNode) and record.cancelled is None:
                going.add(record.decision.node_name)
        doomed = {each.notice.provider_id for each in state.notices.values() if each.is_active}
        self._staying_nodes = [
            node for node in self._nodes.values() if node.name not in going and node.provider_id not in doomed
        ]
        names = {node.name for node in self._staying_nodes}
        moved = {pod.pod_uid for pod, _ in assigned}
        self._pods = [pod for pod in state.pods.values() if pod.phase not in ("succeeded", "failed")]
        self._staying_pods: list[_Placed] = [
            (pod, self._nodes[pod.node_name])
            for pod in self._pods
            if pod.node_name in names and pod.deleting_since is None and pod.pod_uid not in moved
        ]
        self._all: list[_Placed] = [*self._staying_pods, *assigned]
        placed = {pod.pod_uid for pod, _ in self._all}
        self._unplaced = [pod for pod in self._pods if pod.pod_uid not in placed]
        # Asked once for each pod of a group, of which there may be thousands: read once for each group.
        self._counts: dict[tuple[PodGroup, str], Counter[str]] = {}
        self._alike: dict[tuple[PodGroup, str], defaultdict[NodeDemands, set[str]]] = {}
        self._found: dict[PodGroup, list[_Placed]] = {}
        self._unplaced_counts: dict[PodGroup, int] = {}

    # ---- what is wrong with a place

    def anti_affinity_violations(self, pod: PodObserved, place: _Place, *, is_there: bool = True) -> Iterator[str]:
        """Pods that it keeps away from, or that keep it away, are in the same domain. `is_there`: it counts itself."""
        for rule in (pod.neighbours or _NONE).apart:
            own = int(is_there and _is_in(pod, rule.group))
            if self._count(rule.group, rule.topology_key)[_domain(place, rule.topology_key)] > own:
                yield f"which keeps away from pods that share its {rule.topology_key} there"
        for (group, key), domains in self._kept_free.items():
            if _is_in(pod, group) and _domain(place, key) in domains:
                yield f"which others keep away from their {key} there"

    def spread_violations(self, pod: PodObserved, place: _Place, *, more_count: int = 0) -> Iterator[str]:
        """Where it would stand are more of its group than the fewest elsewhere, those without a place counted there."""
        for rule in (pod.neighbours or _NONE).spreads:
            counts = self._count(rule.group, rule.topology_key)
            alike = self._domains_by_demands(rule.group, rule.topology_key)[pod.demands]
            open_count = self._unplaced_count(rule.group)
            least = min((counts[domain] for domain in alike if domain), default=0)
            here = counts[_domain(place, rule.topology_key)]
            if here - least > rule.skew_count_max + open_count + more_count:
                yield f"whose group would stand unevenly over {rule.topology_key}: {here} there, {least} elsewhere"

    def affinity_violations(self, pod: PodObserved, place: _Place) -> Iterator[str]:
        """Pods that it wants near stand elsewhere, and none of them there."""
        for rule in (pod.neighbours or _NONE).together:
            counts = self._count(rule.group, rule.topology_key)
            own = int(_is_in(pod, rule.group))
            if sum(counts.values()) > own and counts[_domain(place, rule.topology_key)] <= own:
                yield f"and those that it wants to share its {rule.topology_key} with are elsewhere"

    def unplaced_pods(self, drain: DrainNode) -> Iterator[str]:
        """Pods of a node that goes by choice for which every other node has the wrong neighbours."""
        moved = [pod for pod in self._pods if pod.node_name == drain.node_name and pod.deleting_since is None]
        for pod in moved:
            if pod.owner_kind in ("DaemonSet", "Node") or not (pod.neighbours or self._kept_free):
                continue
            rooms = [node for node in self._staying_nodes if node.is_ready and not node.is_cordoned]
            rooms = [node for node in rooms if pod.gpu_model in (None, node.gpu_model)]
            if not any(self._is_right(pod, node, len(moved)) for node in rooms):
                name = f"{pod.namespace}/{pod.name}"
                yield f"node {drain.node_name} is drained by choice, but pod {name} may stand beside nobody elsewhere"

    def _is_right(self, pod: PodObserved, node: NodeObserved, more_count: int) -> bool:
        taken = sum((each.requests for each, at in self._staying_pods if at is node), start=Resources())
        if not (taken + pod.requests).fits_in(node.allocatable):
            return False
        return not any(self.anti_affinity_violations(pod, node, is_there=False)) and not any(
            self.spread_violations(pod, node, more_count=more_count)
        )

    # ---- counts

    @cached_property
    def _kept_free(self) -> dict[tuple[PodGroup, str], set[str]]:
        """Domains that pods which stay keep free of a group; of a rule that they follow themselves, nothing new."""
        found: dict[tuple[PodGroup, str], set[str]] = {}
        for pod, place in self._staying_pods:
            for rule in (pod.neighbours or _NONE).apart:
                domain = _domain(place, rule.topology_key)
                if domain:
                    found.setdefault((rule.group, rule.topology_key), set()).add(domain)
        return found

    @cached_property
    def _by_label(self) -> dict[tuple[str, str], list[_Placed]]:
        found: dict[tuple[str, str], list[_Placed]] = {}
        for stands in self._all:
            for label in stands[0].labels:
                found.setdefault(label, []).append(stands)
        return found

    @cached_property
    def _unplaced_by_label(self) -> dict[tuple[str, str], list[PodObserved]]:
        found: dict[tuple[str, str], list[PodObserved]] = {}
        for pod in self._unplaced:
            for label in pod.labels:
                found.setdefault(label, []).append(pod)
        return found

    def _members(self, group: PodGroup) -> list[_Placed]:
        """The group's pods that have a place, with it."""
        members = self._found.get(group)
        if members is None:
            first = _label_of(group)
            among = self._all if first is None else self._by_label.get(first, [])
            members = self._found[group] = [stands for stands in among if _is_in(stands[0], group)]
        return members

    def _unplaced_count(self, group: PodGroup) -> int:
        """How many of the group's pods have no place."""
        count = self._unplaced_counts.get(group)
        if count is None:
            first = _label_of(group)
            among = self._unplaced if first is None else self._unplaced_by_label.get(first, [])
            count = self._unplaced_counts[group] = sum(1 for pod in among if _is_in(pod, group))
        return count

    def _domains_by_demands(self, group: PodGroup, key: str) -> defaultdict[NodeDemands, set[str]]:
        """Where the group's pods stand, by what they ask of a node."""
        domains = self._alike.get((group, key))
        if domains is None:
            domains = self._alike[group, key] = defaultdict(set)
            for pod, place in self._members(group):
                domains[pod.demands].add(_domain(place, key))
        return domains

    def _count(self, group: PodGroup, key: str) -> Counter[str]:
        counts = self._counts.get((group, key))
        if counts is None:
            counts = Counter(_domain(place, key) for _, place in self._members(group))
            del counts[""]
            self._counts[group, key] = counts
        return counts


def _label_of(group: PodGroup) -> tuple[str, str] | None:
    """A label that each member has, where a condition names one."""
    named = (each for each in group.requirements if each.operator == "In" and len(each.values) == 1)
    return next(((each.key, each.values[0]) for each in named), None)


def _domain(place: _Place, key: str) -> str:
    """The value that near places share; empty: not known, which is near nobody."""
    if isinstance(place, BuyNode):
        known = {labels.ZONE: place.offer.zone, labels.HOSTNAME: f"order {place.action_id}"}
    else:
        known = {labels.ZONE: place.zone or "", labels.HOSTNAME: place.name}
    return known[key] if key in known else dict(place.labels).get(key, "")


def _is_in(pod: PodObserved, group: PodGroup) -> bool:
    if group.namespaces and pod.namespace not in group.namespaces:
        return False
    marks = dict(pod.labels)
    return all(_holds(need, marks.get(need.key)) for need in group.requirements)


def _holds(need: LabelRequirement, value: str | None) -> bool:
    answers = {
        "In": value in need.values,
        "NotIn": value not in need.values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }
    return answers.get(need.operator, False)
