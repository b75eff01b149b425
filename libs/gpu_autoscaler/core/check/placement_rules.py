"""Rules of the plan check on pod affinity, anti-affinity and spread, counted from the pods themselves by domain.

Reports only what no scheduler could fix: pods without an assigned place get the benefit of the doubt.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property

from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.lineage import Derivation, part_of
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain, DrainNode, Plan
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, UnmetDemand
from gpu_autoscaler.model.reasons.drain import NodeDeleted, SpendExhausted, SpotReclaim
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import (
    AffinitySelector,
    LabelRequirement,
    NodeDemands,
    PodAffinitySpec,
    PodGroup,
    Spread,
)

# Of ten thousand pods few changed since the last plan. Without an order: what came last is last in one process, and not
# in another that began with a snapshot.
UNBOUND: Derivation[Mapping[PodUid, PodObserved]] = part_of("pods", lambda pod: pod.node_name is None)
_WITH_POD_RULES: Derivation[Mapping[PodUid, PodObserved]] = part_of("pods", lambda pod: pod.pod_affinity is not None)


def has_pod_rules(state: ClusterState) -> bool:
    """True if some pod has affinity, anti-affinity or spread constraints."""
    return bool(_WITH_POD_RULES.of(state))


def job_named(key: str) -> JobId | None:
    """Return the job of the keys `job/<id>` and `member/<id>/<number>`; None: it is a pod's key."""
    kind, _, name = key.partition("/")
    return JobId(name) if kind == "job" else JobId(name.rpartition("/")[0]) if kind == "member" else None


_Demands = tuple[NodeDemands, str | None, tuple[str, ...], int | None]
_Place = NodeObserved | BuyNode
_Placed = tuple[PodObserved, _Place]
_BindOrder = tuple[int, datetime]
_NONE = PodAffinitySpec()


def pod_constraint_violations(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each pod that the plan places in violation of its own or another pod's constraint."""
    bought = plan.purchases
    assigned = list(_assigned(bought, state))
    drains = [
        decision
        for decision in plan.drains
        if not isinstance(decision.reason, SpendExhausted | NodeDeleted | SpotReclaim)
    ]
    if not assigned and not drains:
        return
    if not has_pod_rules(state):
        return
    placements = _Placements(plan, state, assigned)
    for pod, place in assigned:
        for what in (
            *placements.anti_affinity_violations(pod, place),
            *placements.spread_violations(pod, place),
            *placements.affinity_violations(pod, place),
        ):
            sentence = f"{place.offer.key} is bought for pod {pod.namespace}/{pod.name}, {what}"
            yield Violation(sentence, place, demand=placements.related_demand(pod))
    for drain in drains:
        yield from placements.unplaced_pods(drain)


def _assigned(bought: Iterable[BuyNode], state: ClusterState) -> Iterator[tuple[PodObserved, BuyNode]]:
    """Yield pods with the node bought for them. Replacements bought together do not declare which pod goes where."""
    for decision in bought:
        if isinstance(decision.reason, UnmetDemand | ReplacesAtRiskNode):
            for key in decision.reason.demand:
                pod = state.pods.get(PodUid(key.removeprefix("pod/"))) if key.startswith("pod/") else None
                if pod is not None:
                    yield pod, decision


class _Placements:
    """Planned placements: pods on nodes that stay, and pods on nodes bought for them."""

    def __init__(self, plan: Plan, state: ClusterState, assigned: list[tuple[PodObserved, BuyNode]]) -> None:
        self._nodes = {node.name: node for node in state.nodes.values()}
        going = {decision.node_name for decision in plan.drains}
        canceled = {decision.drain_action_id for decision in plan.decisions if isinstance(decision, CancelDrain)}
        for action_id, record in state.drains.items():
            is_canceled = action_id in canceled or record.cancel is not None or record.cancelled is not None
            if isinstance(record.decision, DrainNode) and not is_canceled:
                going.add(record.decision.node_name)
        at_risk = {record.notice.provider_id for record in state.notices.values() if record.is_active}
        offers = () if state.offers is None else state.offers.offers
        self._zones = {node.zone for node in self._nodes.values() if node.zone} | {offer.zone for offer in offers}
        self._staying_nodes = [
            node for node in self._nodes.values() if node.name not in going and node.provider_id not in at_risk
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
        # Cached by group: each may have thousands of pods.
        self._counts: dict[tuple[PodGroup, str], Counter[str]] = {}
        self._alike: dict[tuple[PodGroup, str, bool], defaultdict[_Demands, set[str]]] = {}
        self._firsts: dict[AffinitySelector, set[str]] = {}
        self._members_by_group: dict[PodGroup, list[_Placed]] = {}
        self._unplaced_counts: dict[PodGroup, int] = {}
        self._unruled: dict[tuple[PodGroup, str], defaultdict[str, list[_BindOrder]]] = {}  # by domain
        self._demand: dict[PodGroup, tuple[str, ...]] = {}

    def related_demand(self, pod: PodObserved) -> tuple[str, ...]:
        """Return the keys of the pods of this plan whose places its own rules depend on: they are planned together."""
        rules = pod.pod_affinity or _NONE
        groups = {rule.group: None for rule in rules.apart}
        groups |= {rule.group: None for rule in rules.spreads} | {rule.group: None for rule in rules.together}
        return tuple(key for group in groups for key in self._demand_of(group))

    def _demand_of(self, group: PodGroup) -> tuple[str, ...]:
        keys = self._demand.get(group)
        if keys is None:
            places = self._members(group)
            keys = tuple(f"pod/{pod.pod_uid}" for pod, place in places if isinstance(place, BuyNode))
            self._demand[group] = keys
        return keys

    # ---- violations at a place

    def anti_affinity_violations(self, pod: PodObserved, place: _Place, *, is_there: bool = True) -> Iterator[str]:
        """Yield pods in the same domain of its anti-affinity, or with anti-affinity to it.

        `is_there`: the counts include the pod itself.
        """
        for rule in (pod.pod_affinity or _NONE).apart:
            own = int(is_there and _is_in(pod, rule.group))
            if self._count(rule.group, rule.topology_key)[_domain(place, rule.topology_key)] > own:
                yield f"which violates its anti-affinity over {rule.topology_key} there"
        for (group, key), domains in self._kept_free.items():
            if _is_in(pod, group) and _domain(place, key) in domains:
                yield f"which violates the anti-affinity of other pods over {key} there"

    def _later_count(self, pod: PodObserved, rule: Spread, domain: str) -> int:
        """Count the planned pods of the domain that have no such rule, count for it, and are bound after this one."""
        key = (rule.group, rule.topology_key)
        if key not in self._unruled:
            orders = self._unruled[key] = defaultdict(list)
            for member, place in self._members(rule.group):
                own = ((each.group, each.topology_key) for each in (member.pod_affinity or _NONE).spreads)
                if isinstance(place, BuyNode) and key not in own:
                    insort(orders[_domain(place, rule.topology_key)], _bind_order(member))
        orders = self._unruled[key]
        if domain not in orders:
            return 0
        # Of two that are made again elsewhere, either may be the first.
        earlier_count = (bisect_left if pod.node_name else bisect_right)(orders[domain], _bind_order(pod))
        return len(orders[domain]) - earlier_count

    def spread_violations(self, pod: PodObserved, place: _Place, *, more_count: int = 0) -> Iterator[str]:
        """Yield spreads whose domain would have too many more pods than the fewest elsewhere, with unplaced ones.

        Pods that the rule counts, and that do not have it, are no obstacle if kube-scheduler binds them after this one.
        """
        for rule in (pod.pod_affinity or _NONE).spreads:
            counts = self._count(rule.group, rule.topology_key)
            alike = self._domains_by_demands(rule).get(_demands_of(pod), set())
            open_count = self._unplaced_count(rule.group)
            here = counts[_domain(place, rule.topology_key)]
            least = min((counts[domain] for domain in alike if domain), default=here)
            if rule.topology_key == labels.ZONE and len(self._zones) < rule.domains_count_min:
                least = 0
            here -= self._later_count(pod, rule, _domain(place, rule.topology_key))
            if here - least > rule.skew_count_max + open_count + more_count:
                yield f"whose spread over {rule.topology_key} would be uneven: {here} there, {least} elsewhere"

    def affinity_violations(self, pod: PodObserved, place: _Place) -> Iterator[str]:
        """Yield affinities whose pods are elsewhere, and not in this domain.

        A pod of the group may be the first of it, where no other has to be placed before. Pods without a place, or that
        leave theirs, may come here.
        """
        for rule in (pod.pod_affinity or _NONE).together:
            counts = self._count(rule.group, rule.topology_key)
            own, here = int(_is_in(pod, rule.group)), _domain(place, rule.topology_key)
            if sum(counts.values()) <= own or counts[here] > own:
                continue
            if self._unplaced_count(rule.group):
                continue
            if not own or self._first_domains(rule) - {here}:
                yield f"whose affinity over {rule.topology_key} requires pods that are elsewhere"

    def _first_domains(self, rule: AffinitySelector) -> set[str]:
        """Return the domains of the group where some member runs, or where each requires another to be there first."""
        domains = self._firsts.get(rule)
        if domains is None:
            members = self._members(rule.group)
            running = {_domain(place, rule.topology_key) for _, place in members if not isinstance(place, BuyNode)}
            all_domains = {_domain(place, rule.topology_key) for _, place in members}
            without_rule = {
                _domain(place, rule.topology_key)
                for pod, place in members
                if rule not in (pod.pod_affinity or _NONE).together
            }
            domains = self._firsts[rule] = (running | (all_domains - without_rule)) - {""}
        return domains

    def unplaced_pods(self, drain: DrainNode) -> Iterator[str]:
        """Yield pods of a node drained by choice whose constraints every other node violates."""
        moved = [pod for pod in self._pods if pod.node_name == drain.node_name and pod.deleting_since is None]
        for pod in moved:
            if pod.owner_kind in ("DaemonSet", "Node") or not (pod.pod_affinity or self._kept_free):
                continue
            rooms = [node for node in self._staying_nodes if node.is_ready and not node.is_cordoned]
            rooms = [node for node in rooms if pod.gpu_model in (None, node.gpu_model)]
            if not any(self._is_right(pod, node, len(moved)) for node in rooms):
                name = f"{pod.namespace}/{pod.name}"
                yield Violation(
                    f"node {drain.node_name} is drained by choice, but no other node suits pod {name}", drain
                )

    def _is_right(self, pod: PodObserved, node: NodeObserved, more_count: int) -> bool:
        taken = sum((other.requests for other, at in self._staying_pods if at is node), start=Resources())
        if not (taken + pod.requests).fits_in(node.allocatable):
            return False
        return not any(self.anti_affinity_violations(pod, node, is_there=False)) and not any(
            self.spread_violations(pod, node, more_count=more_count)
        )

    # ---- counts

    @cached_property
    def _kept_free(self) -> dict[tuple[PodGroup, str], set[str]]:
        """Domains from which staying pods repel a group by anti-affinity."""
        domains: dict[tuple[PodGroup, str], set[str]] = {}
        for pod, place in self._staying_pods:
            for rule in (pod.pod_affinity or _NONE).apart:
                domain = _domain(place, rule.topology_key)
                if domain:
                    domains.setdefault((rule.group, rule.topology_key), set()).add(domain)
        return domains

    @cached_property
    def _by_label(self) -> dict[tuple[str, str], list[_Placed]]:
        by_label: dict[tuple[str, str], list[_Placed]] = {}
        for placed in self._all:
            for label in placed[0].labels:
                by_label.setdefault(label, []).append(placed)
        return by_label

    @cached_property
    def _unplaced_by_label(self) -> dict[tuple[str, str], list[PodObserved]]:
        by_label: dict[tuple[str, str], list[PodObserved]] = {}
        for pod in self._unplaced:
            for label in pod.labels:
                by_label.setdefault(label, []).append(pod)
        return by_label

    def _members(self, group: PodGroup) -> list[_Placed]:
        """Return the group's placed pods, with their places."""
        members = self._members_by_group.get(group)
        if members is None:
            first = _label_of(group)
            among = self._all if first is None else self._by_label.get(first, [])
            members = self._members_by_group[group] = [placed for placed in among if _is_in(placed[0], group)]
        return members

    def _unplaced_count(self, group: PodGroup) -> int:
        count = self._unplaced_counts.get(group)
        if count is None:
            first = _label_of(group)
            among = self._unplaced if first is None else self._unplaced_by_label.get(first, [])
            count = self._unplaced_counts[group] = sum(1 for pod in among if _is_in(pod, group))
        return count

    def _domains_by_demands(self, rule: Spread) -> defaultdict[_Demands, set[str]]:
        """Return the domains of the rule's pods, by what they require of a node; with `nodeTaintsPolicy: Honor` of
        those that tolerate their node."""
        key = (rule.group, rule.topology_key, rule.is_over_tainted_nodes)
        domains = self._alike.get(key)
        if domains is None:
            domains = self._alike[key] = defaultdict(set)
            for pod, place in self._members(rule.group):
                if rule.is_over_tainted_nodes or _is_tolerated(place, pod):
                    domains[_demands_of(pod)].add(_domain(place, rule.topology_key))
        return domains

    def _count(self, group: PodGroup, key: str) -> Counter[str]:
        counts = self._counts.get((group, key))
        if counts is None:
            counts = Counter(_domain(place, key) for _, place in self._members(group))
            del counts[""]
            self._counts[group, key] = counts
        return counts


def _is_tolerated(place: _Place, pod: PodObserved) -> bool:
    """True if the pod tolerates every taint that keeps pods off the node."""
    for taint in place.taints:
        covers = (
            (toleration.key == taint.key or not toleration.key)
            and (toleration.operator == "Exists" or toleration.value == taint.value)
            and toleration.effect in ("", taint.effect)
            for toleration in pod.demands.tolerations
        )
        if taint.effect != "PreferNoSchedule" and not any(covers):
            return False
    return True


def _label_of(group: PodGroup) -> tuple[str, str] | None:
    """Return a label that each member has, if a requirement names one."""
    named = (
        requirement
        for requirement in group.requirements
        if requirement.operator == "In" and len(requirement.values) == 1
    )
    return next(((requirement.key, requirement.values[0]) for requirement in named), None)


def _bind_order(pod: PodObserved) -> _BindOrder:
    """Return what kube-scheduler sorts waiting pods by: priority, then for how long they wait. A running pod waits only
    when it is made again elsewhere."""
    waits_since = datetime.max.replace(tzinfo=UTC) if pod.node_name else pod.unschedulable_since or pod.created_at
    return -pod.priority, waits_since


def _domain(place: _Place, key: str) -> str:
    """Return the value that nodes of one domain share; empty: unknown, which is in no domain."""
    if isinstance(place, BuyNode):
        known = {labels.ZONE: place.offer.zone, labels.HOSTNAME: f"order {place.action_id}"}
    else:
        known = {labels.ZONE: place.zone or "", labels.HOSTNAME: place.name}
    return known[key] if key in known else dict(place.labels).get(key, "")


def _demands_of(pod: PodObserved) -> _Demands:
    """Return what the pod requires of a node besides amounts: pods with equal demands are spread over equal domains."""
    return pod.demands, pod.gpu_model, pod.gpu_models, pod.gpu_memory_bytes_min


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
