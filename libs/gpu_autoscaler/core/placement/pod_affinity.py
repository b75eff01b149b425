"""What a pod asks of the pods near it, as placement counts it: pods of a kind, by what nodes share.

Every rule becomes a count by domain, which is the value of a label that near nodes share: a zone, a host. Semantics:
Kubernetes documentation, "Assigning Pods to Nodes" and "Pod Topology Spread Constraints" (read 2026-11-21).
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain

import msgspec

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.placement.label_matching import holds
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.scheduling import Nearness, NeighbourDemands, PodGroup, Preferences


class Tally(msgspec.Struct, frozen=True, cache_hash=True):
    """Pods that are counted: members of a group, or those that want no member of it near."""

    group: PodGroup
    kept_from: str | None = None  # the topology key, for pods that keep away from the group; None: its members


class AffinityTerm(msgspec.Struct, frozen=True):
    """A tally, and what nodes share that are near each other."""

    topology_key: str
    tally: Tally


class SpreadConstraint(msgspec.Struct, frozen=True):
    """A tally that is to differ by at most so much between the domains with the most and the fewest."""

    topology_key: str
    tally: Tally
    skew_count_max: int


class PodConstraints(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """All that the pods near it mean for a pod, and what it means for theirs."""

    spreads: tuple[SpreadConstraint, ...] = ()
    apart: tuple[AffinityTerm, ...] = ()  # none of these is near
    together: tuple[AffinityTerm, ...] = ()  # one of each is near, or there is none anywhere and this is one
    tallies: tuple[Tally, ...] = ()  # those that it counts in

    @property
    def is_any(self) -> bool:
        """True for a pod that may stand with any others."""
        return not (self.spreads or self.apart or self.together)

    @property
    def concerns_own_kind(self) -> bool:
        """True where only its like matter: even over zones, and few of its kind on a host.

        Such pods are bought for together with others; for all else each node is looked at as it comes.
        """
        spreads = all(each.topology_key == labels.ZONE and each.tally in self.tallies for each in self.spreads)
        apart = all(each.topology_key == labels.HOSTNAME and each.tally in self.tallies for each in self.apart)
        return spreads and apart and not self.together


NO_POD_CONSTRAINTS = PodConstraints()


class Rules(msgspec.Struct, frozen=True):
    """Every tally that some pod's rule counts, by a label that its pods have: a pod looks at those of its own alone."""

    count_by_label: Mapping[
        tuple[str, str] | None, tuple[tuple[int, Tally], ...]
    ] = {}  # None: no label says who is meant

    def about(self, pod: PodObserved) -> tuple[Tally, ...]:
        """Return the tallies whose groups may have the pod, in an order that is the same for all pods."""
        if not self.count_by_label:
            return ()
        found = [each for label in (None, *pod.labels) for each in self.count_by_label.get(label, ())]
        return tuple(tally for _, tally in sorted(found, key=lambda each: each[0]))


NO_RULES = Rules()


@cached_by_identity(4)
def rules_of(pods: Mapping[PodUid, PodObserved]) -> Rules:
    """Return the rules of all pods that have not ended, each once, in order of their first pod's uid."""
    with_rules = [pod for pod in pods.values() if pod.neighbours is not None or pod.preferences is not None]
    alive = (pod for pod in with_rules if pod.phase not in ("succeeded", "failed"))
    in_order = sorted(alive, key=lambda each: each.pod_uid)
    tallies = dict.fromkeys(chain.from_iterable(map(_tallies_of, in_order)))
    if not tallies:
        return NO_RULES
    count_by_label: dict[tuple[str, str] | None, list[tuple[int, Tally]]] = {}
    for number, tally in enumerate(tallies):
        count_by_label.setdefault(_label_of(tally.group), []).append((number, tally))
    return Rules({label: tuple(each) for label, each in count_by_label.items()})


@cached_by_identity(8192)
def _tallies_of(pod: PodObserved) -> tuple[Tally, ...]:
    """Return what the pod's rules count, liked or demanded."""
    own, liked = pod.neighbours or NeighbourDemands(), pod.preferences or Preferences()
    tallies = (
        *(Tally(each.group) for each in liked.spreads),
        *(Tally(each.nearness.group) for each in (*liked.apart, *liked.together)),
        *(Tally(each.group) for each in own.spreads),
        *(Tally(each.group) for each in (*own.apart, *own.together)),
        *(Tally(each.group, each.topology_key) for each in own.apart),
    )
    return tuple(map(_known, tallies))


@lru_cache(maxsize=4096)
def _known(tally: Tally) -> Tally:
    """One object for all equal ones: those are found without being compared."""
    return tally


def _label_of(group: PodGroup) -> tuple[str, str] | None:
    """A label that each member has, where a condition names one."""
    conditions = (each for each in group.requirements if each.operator == "In" and len(each.values) == 1)
    return next(((each.key, each.values[0]) for each in conditions), None)


def pod_constraints_of(pod: PodObserved, rules: Rules) -> PodConstraints:
    """Return what the pods near it mean for this pod; `rules` are those of all pods, its own among them."""
    tallies = tuple(tally for tally in rules.about(pod) if is_in(pod, tally.group))
    if not tallies and pod.neighbours is None:
        return NO_POD_CONSTRAINTS
    own = pod.neighbours or NeighbourDemands()
    kept = (Tally(each.group, each.topology_key) for each in own.apart)
    counted = dict.fromkeys((*(tally for tally in tallies if tally.kept_from is None), *kept))
    keepers = (AffinityTerm(tally.kept_from, tally) for tally in tallies if tally.kept_from is not None)
    wanted_away = (AffinityTerm(each.topology_key, Tally(each.group)) for each in own.apart)
    pod_constraints = PodConstraints(
        spreads=tuple(
            SpreadConstraint(each.topology_key, Tally(each.group), each.skew_count_max) for each in own.spreads
        ),
        apart=tuple(dict.fromkeys([*wanted_away, *keepers])),
        together=tuple(AffinityTerm(each.topology_key, Tally(each.group)) for each in own.together),
        tallies=tuple(counted),
    )
    return pod_constraints if counted or not pod_constraints.is_any else NO_POD_CONSTRAINTS


def counts_in(pod: PodObserved, tally: Tally) -> bool:
    """True where the pod is one of those counted."""
    if tally.kept_from is None:
        return is_in(pod, tally.group)
    own = pod.neighbours
    return own is not None and Nearness(topology_key=tally.kept_from, group=tally.group) in own.apart


def is_in(pod: PodObserved, group: PodGroup) -> bool:
    """True for a member of the group."""
    return _matches(pod.namespace, pod.labels, group)


@lru_cache(maxsize=65_536)  # of equal pods there are many, and of a pod's labels many plans ask
def _matches(namespace: str, own: tuple[tuple[str, str], ...], group: PodGroup) -> bool:
    if group.namespaces and namespace not in group.namespaces:
        return False
    values = dict(own)
    return all(holds(each, values.get(each.key)) for each in group.requirements)


def describe_rules(pod_constraints: PodConstraints) -> tuple[str, ...]:
    """Return the rules in words, as people write them."""
    spreads = (f"even over {each.topology_key} within {each.skew_count_max}" for each in pod_constraints.spreads)
    apart = (f"apart by {each.topology_key}" for each in pod_constraints.apart)
    together = (f"together by {each.topology_key}" for each in pod_constraints.together)
    return tuple(dict.fromkeys((*spreads, *apart, *together)))


def count(pods: Iterable[PodObserved], tally: Tally) -> int:
    """Return how many of the pods are counted; those that are on their way out count until they are gone."""
    return sum(1 for pod in pods if counts_in(pod, tally))
