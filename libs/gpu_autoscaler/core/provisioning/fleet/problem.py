"""What a fleet is chosen for, as arrays, and what the choice is.

Figures are compared, added and multiplied one by one or summed in a stated order, never by a library's matrix product,
whose rounding differs from one processor to the next: the same problem gives the same fleet on any machine.
"""

from dataclasses import dataclass

import numpy as np

from gpu_autoscaler.core.placement.resources import Bools, Floats, Ints

NO_GROUP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetProblem:
    """Classes of equal pods, and offers of which any number of nodes may be had."""

    requests: Ints  # (classes, resources): what one pod of the class asks for
    counts: Ints  # (classes,): how many such pods wait
    groups: Ints  # (classes,): of one group a node takes one pod at most; NO_GROUP: as many as fit
    accepts: Bools  # (classes, offers): labels, taints and models are right; says nothing about room
    capacity: Ints  # (offers, resources): what a new node has for pods
    cost: Floats  # (offers,): what a node costs, above zero, in any unit of money per time


@dataclass(frozen=True, slots=True)
class FleetNode:
    """One node to buy, and the pods that it is bought for."""

    offer: int
    pods: tuple[int, ...]  # the class of each, ascending


@dataclass(frozen=True, slots=True)
class Fleet:
    """Nodes that together take every pod that any offer can take."""

    nodes: tuple[FleetNode, ...]  # those of best worth for their cost first
    floor: float  # below which no fleet takes these pods, in the unit of the offers' cost
    unserved: tuple[int, ...]  # classes that no offer takes, ascending


def distinct_rows(rows: Ints | Bools) -> tuple[Ints, Ints]:
    """Return the place of each distinct row's first occurrence, and for each row the number of its distinct one.

    `numpy.unique` sorts whole rows, which takes a hundred times as long on rows of thousands of offers.
    """
    numbers: dict[bytes, int] = {}
    number_of = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], dtype=np.int64)
    first = np.full(len(numbers), rows.shape[0], dtype=np.int64)
    np.minimum.at(first, number_of, np.arange(rows.shape[0]))
    return first, number_of


def usable_offers(problem: FleetProblem) -> Bools:
    """Return (classes, offers): a new node of the offer takes at least one pod of the class."""
    usable = problem.accepts.copy()
    for resource in range(problem.requests.shape[1]):
        usable &= problem.requests[:, resource, None] <= problem.capacity[None, :, resource]
    return usable
