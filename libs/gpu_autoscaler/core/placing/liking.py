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

from gpu_autoscaler.core.placing.acceptance import Acceptance
from gpu_autoscaler.core.placing.amounts import Bools, Ints
from gpu_autoscaler.core.placing.company import Near, Tally
from gpu_autoscaler.core.placing.likes import NO_LIKES
from gpu_autoscaler.core.placing.neighbours import Neighbours
from gpu_autoscaler.core.placing.shapes import Shape
from gpu_autoscaler.model import labels

Keys = tuple[Ints, ...]  # one figure of each kind for each node, the kind that is dropped first first
# A node that is in no domain is no even place: it comes after every other. More pods than any cluster has.
_NOWHERE = 1 << 40


def is_all_one(shape: Shape, acceptances: Iterable[Acceptance]) -> bool:
    """True where the shape likes all of these nodes alike."""
    return shape.likes == NO_LIKES and not any(each.has_taints_to_avoid for each in acceptances)


def of_bins(shape: Shape, acceptances: Sequence[Acceptance], neighbours: Neighbours, is_there: Bools) -> Keys:
    """Return how well the shape likes each bin."""
    parts_of = (each.likes(shape) for each in acceptances)
    taints, models, nodes = (np.concatenate(parts) for parts in zip(*parts_of, strict=True))
    likes, size = shape.likes, is_there.size
    near = {near: neighbours.counts_near(near, is_there) for near in _nears(shape)}
    together, apart, even = _figures(shape, near, size)
    return (together, apart, nodes, models, even, taints) if likes.minds_pods else (nodes, models, taints)


class Counts(Protocol):
    """How many pods of a tally stand in each domain."""

    def counts_by_domain(self, key: str, tally: Tally) -> Mapping[str, int]:
        """By the value of the label."""


class Shelf(Protocol):
    """Nodes that could be bought."""

    def likes(self, shape: Shape) -> tuple[Ints, Ints, Ints]:
        """Taints, models and liked nodes."""

    def by_label(self, key: str, counts: Mapping[str, int]) -> Ints:
        """The count of each node's value of a label; below zero for a node without it."""


class Newcomers:
    """Pods that are chosen nodes for in one purchase, as those after them see them."""

    def __init__(self, room: Counts) -> None:
        self._room = room
        self._came: list[tuple[Tally, Mapping[str, str]]] = []  # with the labels of their nodes
        self._counts: dict[Near, Counter[str]] = {}

    def counts(self, near: Near) -> Counter[str]:
        """How many pods of the tally are in each domain, with those to come."""
        found = self._counts.get(near)
        if found is None:
            found = self._counts[near] = Counter(dict(self._room.counts_by_domain(near.topology_key, near.tally)))
            for tally, node_labels in self._came:
                _count(near, tally, node_labels, found)
        return found

    def come(self, shape: Shape, node_labels: Mapping[str, str]) -> None:
        """One more pod of the shape will stand on a node with these labels."""
        for tally in shape.company.tallies:
            self._came.append((tally, node_labels))
            for near, counts in self._counts.items():
                _count(near, tally, node_labels, counts)


def _count(near: Near, tally: Tally, node_labels: Mapping[str, str], counts: Counter[str]) -> None:
    domain = node_labels.get(near.topology_key)
    if domain is not None and near.tally == tally:
        counts[domain] += 1


def of_sales(shape: Shape, shelf: Shelf, newcomers: Newcomers) -> Keys:
    """Return how well the shape likes a new node of each sale. A new host is empty."""
    taints, models, nodes = shelf.likes(shape)
    near = {
        near: np.zeros(taints.size, dtype=np.int64)
        if near.topology_key == labels.HOSTNAME
        else shelf.by_label(near.topology_key, newcomers.counts(near))
        for near in _nears(shape)
    }
    together, apart, even = _figures(shape, near, taints.size)
    return together, apart, nodes, models, even, taints


def _nears(shape: Shape) -> Iterable[Near]:
    likes = shape.likes
    yield from (each.near for each in (*likes.apart, *likes.together))
    yield from (Near(each.topology_key, each.tally) for each in likes.evens)


def _figures(shape: Shape, near: Mapping[Near, Ints], size: int) -> tuple[Ints, Ints, Ints]:
    """Near pods, far pods and evenness; `near` has the pods in each node's domain, below zero where it is in none."""
    together, apart, even = (np.zeros(size, dtype=np.int64) for _ in range(3))
    for each in shape.likes.together:
        together -= each.weight * np.maximum(near[each.near], 0)
    for each in shape.likes.apart:
        apart += each.weight * np.maximum(near[each.near], 0)
    for rule in shape.likes.evens:
        counts = near[Near(rule.topology_key, rule.tally)]
        even += np.where(counts < 0, _NOWHERE, counts)
    return together, apart, even
