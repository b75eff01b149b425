"""How well nodes are liked, of those that are right: what decides where the cost does not.

What is liked is kept where it costs nothing: among nodes that are there, and among offers of one expected cost. Where
not all of it can be kept, it is dropped in this order, the first first: pods to be near to, pods to be far from, liked
nodes, the order of GPU models, even spread, taints to be avoided (PreferNoSchedule). That is the order in which
Karpenter relaxes preferences (its `pkg/controllers/provisioning/scheduling/preferences.go`), so that a pod is treated
here as there. Within one kind weights are added up, as Kubernetes does. Figures are the smaller, the better liked.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from gpu_autoscaler.core.placement.constraints import NodeMatcher
from gpu_autoscaler.core.placement.pod_affinity import AffinityTerm, Tally
from gpu_autoscaler.core.placement.preferences import NO_PREFERENCES
from gpu_autoscaler.core.placement.resources import Bools, Ints
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.placement.topology import PodTopology
from gpu_autoscaler.model import labels

Keys = tuple[Ints, ...]  # one figure of each kind for each node, the kind that is dropped first first
# A node that is in no domain is no even place: it comes after every other. More pods than any cluster has.
_NOWHERE = 1 << 40


def has_no_preference(shape: Shape, matchers: Iterable[NodeMatcher]) -> bool:
    """True where the shape likes all of these nodes alike."""
    return shape.preferences == NO_PREFERENCES and not any(each.has_taints_to_avoid for each in matchers)


def bin_keys(shape: Shape, matchers: Sequence[NodeMatcher], neighbours: PodTopology, is_there: Bools) -> Keys:
    """Return how well the shape likes each bin."""
    parts_of = (each.preferences(shape) for each in matchers)
    taints, models, nodes = (np.concatenate(parts) for parts in zip(*parts_of, strict=True))
    preferences, size = shape.preferences, is_there.size
    near = {near: neighbours.counts_near(near, is_there) for near in _nears(shape)}
    together, apart, spread = _figures(shape, near, size)
    return (together, apart, nodes, models, spread, taints) if preferences.depends_on_pods else (nodes, models, taints)


class Counts(Protocol):
    """How many pods of a tally stand in each domain."""

    def counts_by_domain(self, key: str, tally: Tally) -> Mapping[str, int]:
        """By the value of the label."""


class NewNodes(Protocol):
    """Nodes that could be bought."""

    def preferences(self, shape: Shape) -> tuple[Ints, Ints, Ints]:
        """Taints, models and liked nodes."""

    def count_by_label(self, key: str, counts: Mapping[str, int]) -> Ints:
        """The count of each node's value of a label; below zero for a node without it."""


class PlannedPods:
    """Pods that are chosen nodes for in one purchase, as those after them see them."""

    def __init__(self, free_capacity: Counts) -> None:
        self._free_capacity = free_capacity
        self._came: list[tuple[Tally, Mapping[str, str]]] = []  # with the labels of their nodes
        self._counts: dict[AffinityTerm, Counter[str]] = {}

    def counts(self, near: AffinityTerm) -> Counter[str]:
        """How many pods of the tally are in each domain, with those to come."""
        found = self._counts.get(near)
        if found is None:
            found = self._counts[near] = Counter(
                dict(self._free_capacity.counts_by_domain(near.topology_key, near.tally))
            )
            for tally, node_labels in self._came:
                _count(near, tally, node_labels, found)
        return found

    def add(self, shape: Shape, node_labels: Mapping[str, str]) -> None:
        """One more pod of the shape will stand on a node with these labels."""
        for tally in shape.pod_constraints.tallies:
            self._came.append((tally, node_labels))
            for near, counts in self._counts.items():
                _count(near, tally, node_labels, counts)


def _count(near: AffinityTerm, tally: Tally, node_labels: Mapping[str, str], counts: Counter[str]) -> None:
    domain = node_labels.get(near.topology_key)
    if domain is not None and near.tally == tally:
        counts[domain] += 1


def offering_keys(shape: Shape, static: NewNodes, planned_pods: PlannedPods) -> Keys:
    """Return how well the shape likes a new node of each sale. A new host is empty."""
    taints, models, nodes = static.preferences(shape)
    near = {
        near: np.zeros(taints.size, dtype=np.int64)
        if near.topology_key == labels.HOSTNAME
        else static.count_by_label(near.topology_key, planned_pods.counts(near))
        for near in _nears(shape)
    }
    together, apart, spread = _figures(shape, near, taints.size)
    return together, apart, nodes, models, spread, taints


def _nears(shape: Shape) -> Iterable[AffinityTerm]:
    preferences = shape.preferences
    yield from (each.near for each in (*preferences.apart, *preferences.together))
    yield from (AffinityTerm(each.topology_key, each.tally) for each in preferences.spreads)


def _figures(shape: Shape, near: Mapping[AffinityTerm, Ints], size: int) -> tuple[Ints, Ints, Ints]:
    """Near pods, far pods and evenness; `near` has the pods in each node's domain, below zero where it is in none."""
    together, apart, spread = (np.zeros(size, dtype=np.int64) for _ in range(3))
    for each in shape.preferences.together:
        together -= each.weight * np.maximum(near[each.near], 0)
    for each in shape.preferences.apart:
        apart += each.weight * np.maximum(near[each.near], 0)
    for rule in shape.preferences.spreads:
        counts = near[AffinityTerm(rule.topology_key, rule.tally)]
        spread += np.where(counts < 0, _NOWHERE, counts)
    return together, apart, spread
