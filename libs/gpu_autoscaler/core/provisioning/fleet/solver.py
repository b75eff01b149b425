"""The fleet solver: the load worth most for its cost is bought as often as pods last, then the next best."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from gpu_autoscaler.core.placement.resources import Floats, Ints
from gpu_autoscaler.core.provisioning.fleet.packing import NodeLoad, NodePacker
from gpu_autoscaler.core.provisioning.fleet.pricing import shadow_prices, undominated_offers
from gpu_autoscaler.core.provisioning.fleet.problem import Fleet, FleetNode, FleetProblem, usable_offers
from gpu_autoscaler.core.provisioning.fleet.reduction import ClassAssigner, ReducedProblem

# Rounds in which groups may conflict; each leaves a small part of the previous one.
_ROUNDS_OF_GROUPS = 8
# The share of the cost, from the worst loads up, that is solved again.
_SECOND_PASS_RATIO = 0.1

Load = tuple[tuple[int, int], ...]  # (class, pods of it on one node)


def cheapest_fleet(problem: FleetProblem) -> Fleet:
    """Return nodes for all pods that some offer takes, at close to the least cost.

    Time grows with classes times offers, hardly with pods.
    """
    has_offer = usable_offers(problem).any(axis=1)
    waiting = np.flatnonzero(has_offer & (problem.counts > 0))
    nodes, by_class = _choose(problem, waiting)
    return Fleet(
        nodes=_with_second_pass(problem, nodes, by_class),
        floor=sum(float(by_class[number]) * int(problem.counts[number]) for number in waiting),
        unserved=tuple(int(number) for number in np.flatnonzero(~has_offer & (problem.counts > 0))),
    )


def _with_second_pass(problem: FleetProblem, nodes: list[FleetNode], by_class: Floats) -> tuple[FleetNode, ...]:
    """Return the nodes, with the worst of them solved again if that is cheaper: the last loads are leftovers."""

    def value_ratio(node: FleetNode) -> float:
        return sum(float(by_class[pod]) for pod in node.pods) / float(problem.cost[node.offer])

    ranked = sorted(nodes, key=value_ratio, reverse=True)
    cost = np.cumsum([problem.cost[node.offer] for node in reversed(ranked)])
    kept_count = len(nodes) - int((cost <= _SECOND_PASS_RATIO * cost[-1]).sum()) if nodes else 0
    kept, apart = ranked[:kept_count], ranked[kept_count:]
    if not apart:
        return tuple(kept)
    pods = np.array([pod for node in apart for pod in node.pods], dtype=np.int64)
    counts = np.bincount(pods, minlength=problem.counts.size).astype(np.int64)
    again, _ = _choose(replace(problem, counts=counts), np.flatnonzero(counts))
    return (*kept, *(again if _cost(problem, again) < _cost(problem, apart) else apart))


def _cost(problem: FleetProblem, nodes: list[FleetNode]) -> float:
    return sum(float(problem.cost[node.offer]) for node in nodes)


def _choose(problem: FleetProblem, waiting: Ints) -> tuple[list[FleetNode], Floats]:
    """Return nodes for all pods of these classes, and the shadow price of each; every class has an offer."""
    if not waiting.size:
        return [], np.zeros(problem.counts.size)
    reduced = ReducedProblem.of(problem, waiting)
    if len(reduced.members) == 1:
        return _choose_for_one_class(reduced)
    kept = undominated_offers(reduced.problem)
    reduced_class = replace(
        reduced.problem,
        accepts=reduced.problem.accepts[:, kept],
        capacity=problem.capacity[kept],
        cost=problem.cost[kept],
    )
    usable = usable_offers(reduced_class)
    prices = shadow_prices(reduced_class, usable)
    packers = [
        NodePacker(reduced_class, prices, offer, np.flatnonzero(usable[:, offer]), reduced.is_grouped)
        for offer in range(kept.size)
    ]
    loads = partial(_loads, packers)
    return _assigned(reduced, loads, kept), reduced.expanded(prices.by_class)


def _choose_for_one_class(reduced: ReducedProblem) -> tuple[list[FleetNode], Floats]:
    """Return the same for equal pods: each offer takes as many as fit, so nothing has to be tried."""
    problem = reduced.problem
    asked = problem.requests[0] > 0
    fitting = (problem.capacity[:, asked] // problem.requests[0, asked]).min(axis=1)
    offers = np.flatnonzero(problem.accepts[0] & (fitting > 0))
    offers = offers[problem.cost[offers].argsort(kind="stable")]
    fitting, cost = fitting[offers], problem.cost[offers]
    accepts = problem.accepts[:, offers]
    by_class = shadow_prices(replace(problem, capacity=problem.capacity[offers], cost=cost), accepts).by_class

    def loads(left: Ints, grouped_max: int) -> Iterator[tuple[int, Load]]:
        most = np.minimum(fitting, grouped_max) if reduced.is_grouped[0] else fitting
        while (count := int(left[0])) > 0:
            counts = np.minimum(most, count)
            offer = int((by_class[0] * counts / cost).argmax())
            nodes_count = count // int(counts[offer])
            left[0] -= nodes_count * counts[offer]
            yield from [(offer, ((0, int(counts[offer])),))] * nodes_count

    return _assigned(reduced, loads, offers), reduced.expanded(by_class)


def _assigned(
    reduced: ReducedProblem, loads: Callable[[Ints, int], Iterator[tuple[int, Load]]], offers: Ints
) -> list[FleetNode]:
    """Return nodes of these offers for all pods, with the original classes of the pods."""
    assigner, nodes = ClassAssigner(reduced), []
    # Pods whose groups conflict are left for the next round, in which fewer groups are left. In the last round each
    # node takes one pod with a group, which is always possible.
    for rounds_left in reversed(range(_ROUNDS_OF_GROUPS)):
        left = assigner.left()
        if not left.any():
            break
        for offer, load in loads(left, assigner.groups_count() if rounds_left else 1):
            pods = assigner.fill(load)
            if pods:
                nodes.append(FleetNode(int(offers[offer]), pods))
    return nodes


def _loads(packers: list[NodePacker], left: Ints, grouped_max: int) -> Iterator[tuple[int, Load]]:
    """Yield one load after the other until nothing is left. The worth of an offer only falls as pods run out."""
    heap: list[tuple[float, int, NodeLoad]] = []

    def look_at(offer: int) -> None:
        load = packers[offer].fill(left, grouped_max)
        if load is not None:
            heapq.heappush(heap, (-load.value_ratio, offer, load))

    for offer in range(len(packers)):
        look_at(offer)
    while heap:
        _, offer, load = heapq.heappop(heap)
        nodes_count = min(int(left[number]) // count for number, count in load.pods)
        for number, count in load.pods:
            left[number] -= count * nodes_count
        for _ in range(nodes_count):
            yield offer, load.pods
        look_at(offer)
