"""The fleet problem as arrays, and its solution.

Figures are summed in a fixed order, never by a library's matrix product, whose rounding differs between processors.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from gpu_autoscaler.core.placement.resources import Bools, Floats, Ints

NO_GROUP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetProblem:
    """Classes of equal pods, and offers of which any number of nodes can be bought."""

    requests: Ints  # (classes, resources): what one pod of the class asks for
    counts: Ints  # (classes,): how many such pods wait
    groups: Ints  # (classes,): a node takes at most one pod of a group; NO_GROUP: as many as fit
    accepts: Bools  # (classes, offers): labels, taints and models match; capacity is not considered
    capacity: Ints  # (offers, resources): of a new node, for pods
    cost: Floats  # (offers,): of a node, above zero, in any unit of money per time

    def digest(self) -> bytes:
        """Return a digest of the content: equal problems have equal fleets."""
        digest = blake2b(repr((self.requests.shape, self.accepts.shape)).encode(), digest_size=16)
        for part in (self.requests, self.counts, self.groups, np.packbits(self.accepts), self.capacity, self.cost):
            digest.update(np.ascontiguousarray(part).data)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class FleetNode:
    """One node to buy, and the pods that it is bought for."""

    offer: int
    pods: tuple[int, ...]  # the class of each, ascending


@dataclass(frozen=True, slots=True)
class Fleet:
    """Nodes that together take every pod that some offer can take."""

    nodes: tuple[FleetNode, ...]  # those of most worth for their cost first
    floor: float  # below which no fleet takes these pods, in the unit of the offers' cost
    unserved: tuple[int, ...]  # classes that no offer takes, ascending


def distinct_rows(rows: Ints | Bools) -> tuple[Ints, Ints]:
    """Return the index of the first of each distinct row, and for each row the number of its distinct row.

    `numpy.unique` sorts whole rows, which takes a hundred times as long on rows of thousands of offers.
    """
    keys = [row.tobytes() for row in rows]
    first: dict[bytes, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(key, place)
    number_of = {key: number for number, key in enumerate(first)}
    return np.array(list(first.values()), dtype=np.int64), np.array([number_of[key] for key in keys], dtype=np.int64)


def usable_offers(problem: FleetProblem) -> Bools:
    """Return (classes, offers): whether a new node of the offer takes at least one pod of the class."""
    usable = problem.accepts.copy()
    for resource in range(problem.requests.shape[1]):
        usable &= problem.requests[:, resource, None] <= problem.capacity[None, :, resource]
    return usable
