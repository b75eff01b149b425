"""Pod affinity, anti-affinity and topology spread: counts of pods by domain, the value of a label that nodes share.

Semantics: Kubernetes, "Assigning Pods to Nodes" and "Pod Topology Spread Constraints" (read 2026-11-21).
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.placement.label_matching import holds
from gpu_autoscaler.core.state.lineage import Changes, Derivation
from gpu_autoscaler.core.state.queries import pod_index
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.scheduling import AffinitySelector, PodAffinitySpec, PodGroup, Preferences


class Tally(msgspec.Struct, frozen=True, cache_hash=True):
    """Pods that are counted: members of a group, or pods with anti-affinity to it."""

    group: PodGroup
    anti_affinity_key: str | None = None  # topology key of the anti-affinity of counted pods; None: members are counted


class AffinityTerm(msgspec.Struct, frozen=True):
    """A tally, and the label whose value nodes of one domain share."""

    topology_key: str
    tally: Tally


class SpreadConstraint(msgspec.Struct, frozen=True):
    """The most by which a tally may differ between the domains with the most and the fewest pods."""

    topology_key: str
    tally: Tally
    skew_count_max: int
    domains_count_min: int = 1  # with fewer domains the fewest pods are taken to be none
    is_over_tainted_nodes: bool = True  # their domains count although the pod does not tolerate them


class PodConstraints(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Constraints of a pod on the pods around it, and the tallies that count it."""

    spreads: tuple[SpreadConstraint, ...] = ()
    apart: tuple[AffinityTerm, ...] = ()  # anti-affinity: none of these in the domain
    together: tuple[AffinityTerm, ...] = ()  # affinity: one of each in the domain, or none anywhere and this pod is one
    tallies: tuple[Tally, ...] = ()  # that count this pod

    @property
    def is_any(self) -> bool:
        """True for a pod without constraints."""
        return not (self.spreads or self.apart or self.together)

    @property
    def concerns_own_kind(self) -> bool:
        """True if all constraints are about pods of its own kind: zone spread and host anti-affinity.

        Such pods are bought for in one fleet with others; for all other constraints nodes are bought one by one.
        """
        spreads = all(spread.topology_key == labels.ZONE and spread.tally in self.tallies for spread in self.spreads)
        apart = all(term.topology_key == labels.HOSTNAME and term.tally in self.tallies for term in self.apart)
        return spreads and apart and not self.together


NO_POD_CONSTRAINTS = PodConstraints()


class Rules(msgspec.Struct, frozen=True):
    """Every tally that some pod's constraint counts, indexed by a label of its pods."""

    by_label: Mapping[
        tuple[str, str] | None, tuple[tuple[int, Tally], ...]
    ] = {}  # None: no single label identifies the pods

    def about(self, pod: PodObserved) -> tuple[Tally, ...]:
        """Return the tallies whose groups may contain the pod, in an order that is the same for all pods."""
        if not self.by_label:
            return ()
        rules = [rule for label in (None, *pod.labels) for rule in self.by_label.get(label, ())]
        return tuple(tally for _, tally in sorted(rules, key=lambda rule: rule[0]))


NO_RULES = Rules()


def rules_of(state: ClusterState) -> Rules:
    """Return the rules of all unfinished pods, each once, in order of their first pod's uid."""
    return _RULES.of(state).rules


class _PodRules(NamedTuple):
    """The rules of pods, the same object while the pods with rules do not change."""

    with_rules: Mapping[PodUid, PodObserved]
    rules: Rules

    @classmethod
    def of(cls, state: ClusterState) -> "_PodRules":
        with_rules = pod_index(state).with_rules
        alive = (pod for pod in with_rules.values() if pod.phase not in ("succeeded", "failed"))
        tallies = dict.fromkeys(chain.from_iterable(map(_tallies_of, sorted(alive, key=lambda pod: pod.pod_uid))))
        by_label: dict[tuple[str, str] | None, list[tuple[int, Tally]]] = {}
        for number, tally in enumerate(tallies):
            by_label.setdefault(_label_of(tally.group), []).append((number, tally))
        rules = Rules({label: tuple(rules) for label, rules in by_label.items()}) if tallies else NO_RULES
        return cls(with_rules, rules)

    def updated(self, state: ClusterState, _: Changes) -> "_PodRules | None":
        return self if pod_index(state).with_rules is self.with_rules else None


_RULES = Derivation(("pods",), _PodRules.of, _PodRules.updated)


@cached_by_identity(8192)
def _tallies_of(pod: PodObserved) -> tuple[Tally, ...]:
    own, preferred = pod.pod_affinity or PodAffinitySpec(), pod.preferences or Preferences()
    tallies = (
        *(Tally(spread.group) for spread in preferred.spreads),
        *(Tally(term.selector.group) for term in (*preferred.apart, *preferred.together)),
        *(Tally(spread.group) for spread in own.spreads),
        *(Tally(term.group) for term in (*own.apart, *own.together)),
        *(Tally(term.group, term.topology_key) for term in own.apart),
    )
    return tuple(map(_known, tallies))


@lru_cache(maxsize=4096)
def _known(tally: Tally) -> Tally:
    """Return one object for all equal tallies, so that lookups compare by identity."""
    return tally


def _label_of(group: PodGroup) -> tuple[str, str] | None:
    """Return a label that each member has, if a requirement names one."""
    conditions = (
        requirement
        for requirement in group.requirements
        if requirement.operator == "In" and len(requirement.values) == 1
    )
    return next(((requirement.key, requirement.values[0]) for requirement in conditions), None)


def pod_constraints_of(pod: PodObserved, rules: Rules) -> PodConstraints:
    """Return the constraints of this pod; `rules` are those of all pods, including its own."""
    tallies = tuple(tally for tally in rules.about(pod) if is_in(pod, tally.group))
    if not tallies and pod.pod_affinity is None:
        return NO_POD_CONSTRAINTS
    own = pod.pod_affinity or PodAffinitySpec()
    kept = (Tally(term.group, term.topology_key) for term in own.apart)
    counted = dict.fromkeys((*(tally for tally in tallies if tally.anti_affinity_key is None), *kept))
    repelled = (
        AffinityTerm(tally.anti_affinity_key, tally) for tally in tallies if tally.anti_affinity_key is not None
    )
    own_apart = (AffinityTerm(term.topology_key, Tally(term.group)) for term in own.apart)
    pod_constraints = PodConstraints(
        spreads=tuple(
            SpreadConstraint(
                topology_key=spread.topology_key,
                tally=Tally(spread.group),
                skew_count_max=spread.skew_count_max,
                domains_count_min=spread.domains_count_min,
                is_over_tainted_nodes=spread.is_over_tainted_nodes,
            )
            for spread in own.spreads
        ),
        apart=tuple(dict.fromkeys([*own_apart, *repelled])),
        together=tuple(AffinityTerm(term.topology_key, Tally(term.group)) for term in own.together),
        tallies=tuple(counted),
    )
    return pod_constraints if counted or not pod_constraints.is_any else NO_POD_CONSTRAINTS


def counts_in(pod: PodObserved, tally: Tally) -> bool:
    """True if the tally counts the pod."""
    if tally.anti_affinity_key is None:
        return is_in(pod, tally.group)
    own = pod.pod_affinity
    return own is not None and AffinitySelector(topology_key=tally.anti_affinity_key, group=tally.group) in own.apart


def is_in(pod: PodObserved, group: PodGroup) -> bool:
    """True for a member of the group."""
    return _matches(pod.namespace, pod.labels, group)


@lru_cache(maxsize=65_536)  # pods repeat, and many plans evaluate the same labels
def _matches(namespace: str, own: tuple[tuple[str, str], ...], group: PodGroup) -> bool:
    if group.namespaces and namespace not in group.namespaces:
        return False
    values = dict(own)
    return all(holds(requirement, values.get(requirement.key)) for requirement in group.requirements)


def describe_rules(pod_constraints: PodConstraints) -> tuple[str, ...]:
    """Return the constraints as sentences."""
    spreads = (
        f"spread over {spread.topology_key} with skew of at most {spread.skew_count_max}"
        for spread in pod_constraints.spreads
    )
    apart = (f"apart by {term.topology_key}" for term in pod_constraints.apart)
    together = (f"together by {term.topology_key}" for term in pod_constraints.together)
    return tuple(dict.fromkeys((*spreads, *apart, *together)))


def count(pods: Iterable[PodObserved], tally: Tally) -> int:
    """Return how many of the pods the tally counts; pods being deleted count until they are gone."""
    return sum(1 for pod in pods if counts_in(pod, tally))
