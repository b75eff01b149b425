"""What a pod requires of the pods near it: spread, affinity and anti-affinity; and what it would like, of its node too.

Source: Kubernetes documentation, "Pod Topology Spread Constraints" and "Assigning Pods to Nodes" (read 2026-11-21).
"""

from collections.abc import Iterable, Iterator

from gpu_autoscaler.kube.translate.requirements import requirements
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.scheduling import (
    LabelRequirement,
    Nearness,
    NearPreference,
    NeighbourDemands,
    NodePreference,
    NodeSelectorTerm,
    PodGroup,
    Preferences,
    Spread,
)


def neighbour_demands(pod: core.Pod) -> NeighbourDemands | None:
    """Return what is required of the pods near it, None where that is nothing.

    A rule without a label selector is about no pod. One that chooses namespaces by their labels is read as about every
    namespace: namespaces are not watched, and it is better to keep too far apart than too near.
    """
    affinity = pod.spec.affinity or core.Affinity()
    spreads = tuple(_spreads(pod, "DoNotSchedule"))
    apart = tuple(_required(pod, affinity.pod_anti_affinity))
    together = tuple(_required(pod, affinity.pod_affinity))
    if not (spreads or apart or together):
        return None
    return NeighbourDemands(spreads=spreads, apart=apart, together=together)


def preferences(pod: core.Pod) -> Preferences | None:
    """Return what the pod would like, None where that is nothing. Rules without a selector are about no pod."""
    affinity = pod.spec.affinity or core.Affinity()
    liked = affinity.node_affinity.preferred if affinity.node_affinity else ()
    nodes = tuple(_liked_nodes(liked))
    spreads = tuple(_spreads(pod, "ScheduleAnyway"))
    apart = tuple(_preferred(pod, affinity.pod_anti_affinity))
    together = tuple(_preferred(pod, affinity.pod_affinity))
    if not (nodes or spreads or apart or together):
        return None
    return Preferences(nodes=nodes, spreads=spreads, apart=apart, together=together)


def _liked_nodes(terms: Iterable[core.PreferredTerm]) -> Iterator[NodePreference]:
    for one in terms:
        conditions = requirements(one.preference.match_expressions) + requirements(one.preference.match_fields)
        if conditions:  # an empty term matches no node
            yield NodePreference(weight=one.weight, term=NodeSelectorTerm(conditions))


def _spreads(pod: core.Pod, when_unsatisfiable: str) -> Iterator[Spread]:
    for one in pod.spec.topology_spread_constraints:
        if one.when_unsatisfiable == when_unsatisfiable and one.label_selector is not None:
            selected = _selected(one.label_selector, one.match_label_keys, (), pod.metadata.labels)
            yield Spread(
                topology_key=one.topology_key,
                group=PodGroup(namespaces=(pod.metadata.namespace,), requirements=selected),
                skew_count_max=one.max_skew,
            )


def _required(pod: core.Pod, affinity: core.PodAffinity | None) -> Iterator[Nearness]:
    for term in affinity.required if affinity else ():
        if (found := _nearness(pod, term)) is not None:
            yield found


def _preferred(pod: core.Pod, affinity: core.PodAffinity | None) -> Iterator[NearPreference]:
    for one in affinity.preferred if affinity else ():
        if (found := _nearness(pod, one.pod_affinity_term)) is not None:
            yield NearPreference(weight=one.weight, nearness=found)


def _nearness(pod: core.Pod, term: core.PodAffinityTerm) -> Nearness | None:
    """Pods near to the pod, None for those of a term that is about none."""
    if term.label_selector is None:
        return None
    named = term.namespaces or (pod.metadata.namespace,)
    return Nearness(
        topology_key=term.topology_key,
        group=PodGroup(
            namespaces=() if term.namespace_selector is not None else tuple(sorted(named)),
            requirements=_selected(
                term.label_selector, term.match_label_keys, term.mismatch_label_keys, pod.metadata.labels
            ),
        ),
    )


def _selected(
    selector: core.LabelSelector, match_keys: tuple[str, ...], mismatch_keys: tuple[str, ...], own: dict[str, str]
) -> tuple[LabelRequirement, ...]:
    """The selector's conditions, and those that compare with the pod's own labels; sorted, so that equals are equal."""
    conditions = [
        *(LabelRequirement(key, "In", (value,)) for key, value in selector.match_labels.items()),
        *requirements(selector.match_expressions),
        *(LabelRequirement(key, "In", (own[key],)) for key in match_keys if key in own),
        *(LabelRequirement(key, "NotIn", (own[key],)) for key in mismatch_keys if key in own),
    ]
    return tuple(sorted(conditions, key=lambda one: (one.key, one.operator, one.values)))
