"""What a pod requires of the pods near it: spread, affinity and anti-affinity.

Source: Kubernetes documentation, "Pod Topology Spread Constraints" and "Assigning Pods to Nodes" (read 2026-11-21).
"""

from collections.abc import Iterator

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.translate.requirements import requirements
from gpu_autoscaler.model.scheduling import (
    LabelRequirement,
    Nearness,
    NeighbourDemands,
    PodGroup,
    Spread,
)


def neighbour_demands(pod: wire.Pod) -> NeighbourDemands | None:
    """Return what is required, None where that is nothing; preferences (ScheduleAnyway too) bind nobody.

    A rule without a label selector is about no pod. One that chooses namespaces by their labels is read as about every
    namespace: namespaces are not watched, and it is better to keep too far apart than too near.
    """
    spec, own = pod.spec, pod.metadata.labels
    affinity = spec.affinity or wire.Affinity()
    spreads = tuple(
        Spread(
            topology_key=one.topology_key,
            group=PodGroup(
                namespaces=(pod.metadata.namespace,),
                requirements=_selected(one.label_selector, one.match_label_keys, (), own),
            ),
            skew_count_max=one.max_skew,
        )
        for one in spec.topology_spread_constraints
        if one.when_unsatisfiable == "DoNotSchedule" and one.label_selector is not None
    )
    apart = tuple(_nearnesses(pod, affinity.pod_anti_affinity))
    together = tuple(_nearnesses(pod, affinity.pod_affinity))
    if not (spreads or apart or together):
        return None
    return NeighbourDemands(spreads=spreads, apart=apart, together=together)


def _nearnesses(pod: wire.Pod, affinity: wire.PodAffinity | None) -> Iterator[Nearness]:
    for term in affinity.required if affinity else ():
        if term.label_selector is None:
            continue
        named = term.namespaces or (pod.metadata.namespace,)
        yield Nearness(
            topology_key=term.topology_key,
            group=PodGroup(
                namespaces=() if term.namespace_selector is not None else tuple(sorted(named)),
                requirements=_selected(
                    term.label_selector, term.match_label_keys, term.mismatch_label_keys, pod.metadata.labels
                ),
            ),
        )


def _selected(
    selector: wire.LabelSelector, match_keys: tuple[str, ...], mismatch_keys: tuple[str, ...], own: dict[str, str]
) -> tuple[LabelRequirement, ...]:
    """The selector's conditions, and those that compare with the pod's own labels; sorted, so that equals are equal."""
    conditions = [
        *(LabelRequirement(key, "In", (value,)) for key, value in selector.match_labels.items()),
        *requirements(selector.match_expressions),
        *(LabelRequirement(key, "In", (own[key],)) for key in match_keys if key in own),
        *(LabelRequirement(key, "NotIn", (own[key],)) for key in mismatch_keys if key in own),
    ]
    return tuple(sorted(conditions, key=lambda one: (one.key, one.operator, one.values)))
