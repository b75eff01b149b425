"""The choice of a fleet: the load of best worth for its cost is bought as often as pods last, then the next best."""

import heapq
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gpu_autoscaler.core.fleet.filling import Filler, Filling
from gpu_autoscaler.core.fleet.folding import Folding, Slots
from gpu_autoscaler.core.fleet.problem import Fleet, FleetNode, FleetProblem, usable_offers
from gpu_autoscaler.core.fleet.worth import worth, worthwhile_offers
from gpu_autoscaler.core.placing.amounts import Floats, Ints

# Rounds in which groups may be in each other's way; each leaves a small part of the one before.
_ROUNDS_OF_GROUPS = 8
# The share of the cost, from the worst loads up, that is taken apart and chosen for again.
_SECOND_LOOK_RATIO = 0.1

Load = tuple[tuple[int, int], ...]  # (class, pods of it on one node)


def cheapest_fleet(problem: FleetProblem) -> Fleet:
    """Return nodes for all pods that any offer takes, at little more than the least cost.

    Time grows with classes times offers, hardly with pods.
    """
    has_offer = usable_offers(problem).any(axis=1)
    waiting = np.flatnonzero(has_offer & (problem.counts > 0))
    nodes, of_class = _choose(problem, waiting)
    return Fleet(
        nodes=_after_second_look(problem, nodes, of_class),
        floor=sum(float(of_class[each]) * int(problem.counts[each]) for each in waiting),
        unserved=tuple(int(each) for each in np.flatnonzero(~has_offer & (problem.counts > 0))),
    )


def _after_second_look(problem: FleetProblem, nodes: list[FleetNode], of_class: Floats) -> tuple[FleetNode, ...]:
    """Return the nodes, with the worst of them chosen anew where that is cheaper: last loads are what was left over."""

    def worth_ratio(node: FleetNode) -> float:
        return sum(float(of_class[each]) for each in node.pods) / float(problem.cost[node.offer])

    ranked = sorted(nodes, key=worth_ratio, reverse=True)
    cost = np.cumsum([problem.cost[node.offer] for node in reversed(ranked)])
    kept_count = len(nodes) - int((cost <= _SECOND_LOOK_RATIO * cost[-1]).sum()) if nodes else 0
    kept, apart = ranked[:kept_count], ranked[kept_count:]
    pods = np.array([each for node in apart for each in node.pods], dtype=np.int64)
    counts = np.bincount(pods, minlength=problem.counts.size).astype(np.int64)
    again, _ = _choose(replace(problem, counts=counts), np.flatnonzero(counts))
    return (*kept, *(again if _cost(problem, again) < _cost(problem, apart) else apart))


def _cost(problem: FleetProblem, nodes: list[FleetNode]) -> float:
    return sum(float(problem.cost[node.offer]) for node in nodes)


def _choose(problem: FleetProblem, waiting: Ints) -> tuple[list[FleetNode], Floats]:
    """Return nodes for all pods of these classes, and what a pod of each is worth; every one has an offer."""
    if not waiting.size:
        return [], np.zeros(problem.counts.size)
    folding = Folding.of(problem, waiting)
    kept = worthwhile_offers(folding.problem)
    folded = replace(
        folding.problem,
        accepts=folding.problem.accepts[:, kept],
        capacity=problem.capacity[kept],
        cost=problem.cost[kept],
    )
    usable = usable_offers(folded)
    worths = worth(folded, usable)
    fillers = [
        Filler(folded, worths, offer, np.flatnonzero(usable[:, offer]), folding.is_grouped)
        for offer in range(kept.size)
    ]
    slots, nodes = Slots(folding), []
    # Pods whose groups were in each other's way are left over for the next round, in which fewer groups are left; in
    # the last one each node takes one pod with a group, which is always possible.
    for rounds_left in reversed(range(_ROUNDS_OF_GROUPS)):
        left = slots.left()
        if not left.any():
            break
        for offer, load in _loads(fillers, left, slots.groups_count() if rounds_left else 1):
            pods = slots.fill(load)
            if pods:
                nodes.append(FleetNode(int(kept[offer]), pods))
    return nodes, folding.unfolded(worths.of_class)


def _loads(fillers: list[Filler], left: Ints, grouped_max: int) -> Iterator[tuple[int, Load]]:
    """Yield one load after the other until nothing is left. Worth only falls as pods run out, so old bests wait."""
    heap: list[tuple[float, int, Filling]] = []

    def look_at(offer: int) -> None:
        filling = fillers[offer].fill(left, grouped_max)
        if filling is not None:
            heapq.heappush(heap, (-filling.worth_ratio, offer, filling))

    for offer in range(len(fillers)):
        look_at(offer)
    while heap:
        _, offer, filling = heapq.heappop(heap)
        nodes_count = min(int(left[each]) // count for each, count in filling.pods)
        for each, count in filling.pods:
            left[each] -= count * nodes_count
        for _ in range(nodes_count):
            yield offer, filling.pods
        look_at(offer)
