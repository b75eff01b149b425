"""Preference scores of suitable nodes, which decide among nodes of equal cost. A smaller figure is better.

If not all preferences can be satisfied, they are dropped in Karpenter's order: pod affinity, pod anti-affinity, node
affinity, order of GPU models, spread, taints to avoid (PreferNoSchedule); its source is
`pkg/controllers/provisioning/scheduling/preferences.go`. Within one kind weights are added up, as Kubernetes does.
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

Keys = tuple[Ints, ...]  # one figure of each kind for each node, in the order of dropping
# Spread figure of a node in no domain, which comes after every other. More pods than any cluster has.
_NOWHERE = 1 << 40


def has_no_preference(shape: Shape, matchers: Iterable[NodeMatcher]) -> bool:
    """True if the shape prefers none of these nodes."""
    return shape.preferences == NO_PREFERENCES and not any(matcher.has_taints_to_avoid for matcher in matchers)


def bin_keys(shape: Shape, matchers: Sequence[NodeMatcher], neighbors: PodTopology, is_there: Bools) -> Keys:
    """Return the sort keys of each bin."""
    parts_of = (matcher.preferences(shape) for matcher in matchers)
    taints, models, nodes = (np.concatenate(parts) for parts in zip(*parts_of, strict=True))
    preferences, size = shape.preferences, is_there.size
    near = {near: neighbors.counts_near(near, is_there) for near in _terms(shape)}
    together, apart, spread = _figures(shape, near, size)
    return (together, apart, nodes, models, spread, taints) if preferences.depends_on_pods else (nodes, models, taints)


class Counts(Protocol):
    """Counts of a tally's pods by domain."""

    def counts_by_domain(self, key: str, tally: Tally) -> Mapping[str, int]:
        """Return the counts by the value of the label."""


class NewNodes(Protocol):
    """Nodes that could be bought."""

    def preferences(self, shape: Shape) -> tuple[Ints, Ints, Ints]:
        """Return taints, models and node affinity, as `NodeMatcher.preferences` does."""

    def count_by_label(self, key: str, counts: Mapping[str, int]) -> Ints:
        """Return the count of each node's value of a label; negative for a node without it."""


class PlannedPods:
    """Pods placed on nodes of the same purchase, as later pods see them."""

    def __init__(self, free_capacity: Counts) -> None:
        self._free_capacity = free_capacity
        self._planned: list[tuple[Tally, Mapping[str, str]]] = []  # with the labels of their nodes
        self._counts: dict[AffinityTerm, Counter[str]] = {}

    def counts(self, near: AffinityTerm) -> Counter[str]:
        """Return how many pods of the tally are in each domain, including planned ones."""
        by_domain = self._counts.get(near)
        if by_domain is None:
            by_domain = self._counts[near] = Counter(
                dict(self._free_capacity.counts_by_domain(near.topology_key, near.tally))
            )
            for tally, node_labels in self._planned:
                _count(near, tally, node_labels, by_domain)
        return by_domain

    def add(self, shape: Shape, node_labels: Mapping[str, str]) -> None:
        """Add a pod of the shape on a node with these labels."""
        for tally in shape.pod_constraints.tallies:
            self._planned.append((tally, node_labels))
            for near, counts in self._counts.items():
                _count(near, tally, node_labels, counts)


def _count(near: AffinityTerm, tally: Tally, node_labels: Mapping[str, str], counts: Counter[str]) -> None:
    domain = node_labels.get(near.topology_key)
    if domain is not None and near.tally == tally:
        counts[domain] += 1


def offering_keys(shape: Shape, new_nodes: NewNodes, planned_pods: PlannedPods) -> Keys:
    """Return the sort keys of a new node of each offering. A new host is empty."""
    taints, models, nodes = new_nodes.preferences(shape)
    near = {
        near: np.zeros(taints.size, dtype=np.int64)
        if near.topology_key == labels.HOSTNAME
        else new_nodes.count_by_label(near.topology_key, planned_pods.counts(near))
        for near in _terms(shape)
    }
    together, apart, spread = _figures(shape, near, taints.size)
    return together, apart, nodes, models, spread, taints


def _terms(shape: Shape) -> Iterable[AffinityTerm]:
    preferences = shape.preferences
    yield from (term.near for term in (*preferences.apart, *preferences.together))
    yield from (AffinityTerm(spread.topology_key, spread.tally) for spread in preferences.spreads)


def _figures(shape: Shape, near: Mapping[AffinityTerm, Ints], size: int) -> tuple[Ints, Ints, Ints]:
    """Return affinity, anti-affinity and spread figures. `near` are the pods in each node's domain, negative where it
    is in none."""
    together, apart, spread = (np.zeros(size, dtype=np.int64) for _ in range(3))
    for weighted in shape.preferences.together:
        together -= weighted.weight * np.maximum(near[weighted.near], 0)
    for term in shape.preferences.apart:
        apart += term.weight * np.maximum(near[term.near], 0)
    for rule in shape.preferences.spreads:
        counts = near[AffinityTerm(rule.topology_key, rule.tally)]
        spread += np.where(counts < 0, _NOWHERE, counts)
    return together, apart, spread
