"""Preferred rules of replicas: a zone, a GPU model, near each other, far apart, or evenly spread."""

import random

from msgspec.structs import replace

from gpu_autoscaler.kube import wire
from gpu_autoscaler.model import labels
from gpu_autoscaler.simcluster.offers import ZONES

_MODELS = ("T4", "A10G", "L4")
_KINDS = (None, None, None, "zone", "model", "near", "far", "even")


def with_likes(pod: wire.PodSpec, name: str, chance: random.Random) -> wire.PodSpec:
    """Return the pod spec with the service's preferences; some services have none."""
    kind = chance.choice(_KINDS)
    affinity = pod.affinity or wire.Affinity()
    selector = wire.LabelSelector(match_labels={"app": name})
    near = (_weighted(wire.PodAffinityTerm(topology_key=labels.ZONE, label_selector=selector), chance),)
    match kind:
        case "zone":
            return replace(pod, affinity=replace(affinity, node_affinity=_two_of(labels.ZONE, ZONES, chance)))
        case "model":
            return replace(pod, affinity=replace(affinity, node_affinity=_two_of(labels.GPU_MODEL, _MODELS, chance)))
        case "near":
            return replace(pod, affinity=replace(affinity, pod_affinity=wire.PodAffinity(preferred=near)))
        case "far":
            rules = affinity.pod_anti_affinity or wire.PodAffinity()
            return replace(pod, affinity=replace(affinity, pod_anti_affinity=replace(rules, preferred=near)))
        case "even":
            even = wire.TopologySpreadConstraint(
                topology_key=labels.ZONE, label_selector=selector, when_unsatisfiable="ScheduleAnyway"
            )
            return replace(pod, topology_spread_constraints=(*pod.topology_spread_constraints, even))
        case _:
            return pod


def _two_of(key: str, values: tuple[str, ...], chance: random.Random) -> wire.NodeAffinity:
    """Prefer two values, each with its own weight."""
    conditions = [wire.Requirement(key=key, operator="In", values=(value,)) for value in chance.sample(values, 2)]
    return wire.NodeAffinity(
        preferred=tuple(
            wire.PreferredTerm(
                weight=chance.randint(1, 100), preference=wire.SelectorTerm(match_expressions=(condition,))
            )
            for condition in conditions
        )
    )


def _weighted(term: wire.PodAffinityTerm, chance: random.Random) -> wire.WeightedPodAffinityTerm:
    return wire.WeightedPodAffinityTerm(weight=chance.randint(1, 100), pod_affinity_term=term)
