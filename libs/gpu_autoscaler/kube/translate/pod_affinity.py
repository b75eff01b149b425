"""Translates topology spread constraints, pod affinity and anti-affinity, and preferences, also of nodes.

Source: Kubernetes documentation, "Pod Topology Spread Constraints" and "Assigning Pods to Nodes" (read 2026-11-21).
"""

from collections.abc import Iterable, Iterator

from gpu_autoscaler.kube.translate.common import requirements
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.scheduling import (
    AffinityPreference,
    AffinitySelector,
    LabelRequirement,
    NodePreference,
    NodeSelectorTerm,
    PodAffinitySpec,
    PodGroup,
    Preferences,
    Spread,
)


def pod_constraints(pod: core.Pod) -> PodAffinitySpec | None:
    """Return the pod's required spread, affinity and anti-affinity, None without any.

    A term without a label selector matches no pod. A term with a namespace selector is taken to match every namespace:
    namespaces are not watched, and too strict is safer than too loose.
    """
    affinity = pod.spec.affinity or core.Affinity()
    spreads = tuple(_spreads(pod, "DoNotSchedule"))
    apart = tuple(_required(pod, affinity.pod_anti_affinity))
    together = tuple(_required(pod, affinity.pod_affinity))
    if not (spreads or apart or together):
        return None
    return PodAffinitySpec(spreads=spreads, apart=apart, together=together)


def preferences(pod: core.Pod) -> Preferences | None:
    """Return the pod's preferences, None without any. A term without a label selector matches no pod."""
    affinity = pod.spec.affinity or core.Affinity()
    terms = affinity.node_affinity.preferred if affinity.node_affinity else ()
    nodes = tuple(_node_preferences(terms))
    spreads = tuple(_spreads(pod, "ScheduleAnyway"))
    apart = tuple(_preferred(pod, affinity.pod_anti_affinity))
    together = tuple(_preferred(pod, affinity.pod_affinity))
    if not (nodes or spreads or apart or together):
        return None
    return Preferences(nodes=nodes, spreads=spreads, apart=apart, together=together)


def _node_preferences(terms: Iterable[core.PreferredTerm]) -> Iterator[NodePreference]:
    for preferred in terms:
        term = preferred.preference
        conditions = requirements(term.match_expressions) + requirements(term.match_fields)
        if conditions:  # an empty term matches no node
            yield NodePreference(weight=preferred.weight, term=NodeSelectorTerm(conditions))


def _spreads(pod: core.Pod, when_unsatisfiable: str) -> Iterator[Spread]:
    for constraint in pod.spec.topology_spread_constraints:
        if constraint.when_unsatisfiable == when_unsatisfiable and constraint.label_selector is not None:
            selected = _selected(constraint.label_selector, constraint.match_label_keys, (), pod.metadata.labels)
            yield Spread(
                topology_key=constraint.topology_key,
                group=PodGroup(namespaces=(pod.metadata.namespace,), requirements=selected),
                skew_count_max=constraint.max_skew,
                domains_count_min=constraint.min_domains or 1,
                is_over_tainted_nodes=constraint.node_taints_policy != "Honor",
            )


def _required(pod: core.Pod, affinity: core.PodAffinity | None) -> Iterator[AffinitySelector]:
    for term in affinity.required if affinity else ():
        if (selector := _selector(pod, term)) is not None:
            yield selector


def _preferred(pod: core.Pod, affinity: core.PodAffinity | None) -> Iterator[AffinityPreference]:
    for preferred in affinity.preferred if affinity else ():
        if (selector := _selector(pod, preferred.pod_affinity_term)) is not None:
            yield AffinityPreference(weight=preferred.weight, selector=selector)


def _selector(pod: core.Pod, term: core.PodAffinityTerm) -> AffinitySelector | None:
    """Return the pods and topology of a term, None for a term that matches no pod."""
    if term.label_selector is None:
        return None
    namespaces = term.namespaces or (pod.metadata.namespace,)
    return AffinitySelector(
        topology_key=term.topology_key,
        group=PodGroup(
            namespaces=() if term.namespace_selector is not None else tuple(sorted(namespaces)),
            requirements=_selected(
                term.label_selector, term.match_label_keys, term.mismatch_label_keys, pod.metadata.labels
            ),
        ),
    )


def _selected(
    selector: core.LabelSelector, match_keys: tuple[str, ...], mismatch_keys: tuple[str, ...], own: dict[str, str]
) -> tuple[LabelRequirement, ...]:
    """Return the conditions of the selector and of the label keys, sorted so that equal selectors compare equal."""
    conditions = [
        *(LabelRequirement(key, "In", (value,)) for key, value in selector.match_labels.items()),
        *requirements(selector.match_expressions),
        *(LabelRequirement(key, "In", (own[key],)) for key in match_keys if key in own),
        *(LabelRequirement(key, "NotIn", (own[key],)) for key in mismatch_keys if key in own),
    ]
    return tuple(sorted(conditions, key=lambda item: (item.key, item.operator, item.values)))
