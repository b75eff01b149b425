"""What one pod of each class is worth: the least that serving it has to cost, were nodes divisible.

The dual of the linear programme "cover all pods at least cost": every offer splits its cost over its resources, a class
is worth what it costs at its cheapest offer, and the splits move towards what is short, so that the demand as a whole
is worth the most. Multiplicative weights come within one per cent of the optimum in some dozen rounds, where an exact
solver takes seconds once constraints multiply the classes (Arora, Hazan, Kale, "The Multiplicative Weights Update
Method", Theory of Computing 8, 2012).
"""

from dataclasses import dataclass

import numpy as np

from gpu_autoscaler.core.placement.resources import Bools, Floats, Ints
from gpu_autoscaler.core.provisioning.fleet.problem import FleetProblem, distinct_rows

# Small problems can afford to come closer; large ones are near enough after the least of rounds.
_ROUNDS_MIN, _ROUNDS_MAX = 40, 400
_CELLS_OF_ALL_ROUNDS = 30_000_000
_ROUNDS_OF_A_CLASS = 10
# Between full rounds only offers are looked at that were this near to the cheapest for some class.
_FULL_EVERY_ROUNDS = 10
_NEAR_RATIO = 1.25
_STEP_FIRST = 0.6
_STEP_HALVED_AFTER_ROUNDS = 10
# A split of zero could never grow again.
_SPLIT_MIN = 1e-4
# Where the search begins: GPUs, whole or in slices, are what such nodes are bought for, and places for pods are seldom
# short.
_SPLIT_FIRST = (3.0, 1.0, 1.0, 0.05, 0.05)
_SPLIT_FIRST_OF_SLICES = 3.0


@dataclass(frozen=True, slots=True)
class ShadowPrices:
    """Prices that no fleet can undercut, in the unit of the offers' cost."""

    by_class: Floats  # (classes,)
    per_amount: Floats  # (offers, resources): an offer's cost, split over what it has

    def floor(self, counts: Ints) -> float:
        """The cost below which no fleet takes all these pods."""
        return sum(float(each) * int(count) for each, count in zip(self.by_class, counts, strict=True))


def undominated_offers(problem: FleetProblem) -> Ints:
    """Return the offers, cheapest first, that no other beats in all of cost, room and who may use it."""
    first_class, _ = distinct_rows(problem.accepts)
    accepted = np.ascontiguousarray(problem.accepts[first_class].T)
    first_offer, kind_of = distinct_rows(accepted)
    kinds = np.packbits(accepted[first_offer], axis=1)  # by eights: of all pairs each is looked at
    covers = np.array([~(kinds & ~large).any(axis=1) for large in kinds], dtype=np.bool_)
    left = np.lexsort((np.arange(problem.cost.size), problem.cost))
    # Of those that are left, cheapest first: who may use each, and its room, column by column.
    kinds_left, rooms_left = kind_of[left], list(problem.capacity[left].T.copy())
    kept: list[int] = []
    while left.size:
        kept.append(int(left[0]))
        stays = ~covers[kinds_left[0]][kinds_left]
        for room in rooms_left:
            stays |= room > room[0]
        left, kinds_left = left[stays], kinds_left[stays]  # an offer beats itself
        rooms_left = [room[stays] for room in rooms_left]
    return np.array(kept, dtype=np.int64)


def shadow_prices(problem: FleetProblem, usable: Bools) -> ShadowPrices:
    """Return what each class is worth; `usable` (classes, offers) says which offers take its pods (some)."""
    capacity = problem.capacity.astype(np.float64)
    per_share = np.where(capacity > 0, problem.cost[:, None] / np.where(capacity > 0, capacity, 1.0), 0.0)
    first = _SPLIT_FIRST + (_SPLIT_FIRST_OF_SLICES,) * (capacity.shape[1] - len(_SPLIT_FIRST))
    split = np.where(capacity > 0, np.array(first), 0.0)
    split /= _row_sums(split)[:, None]
    demand = (problem.requests * problem.counts[:, None]).astype(np.float64)
    requests, barred = problem.requests.astype(np.float64), np.where(usable, 0.0, np.inf)
    looked_at = np.arange(problem.cost.size)
    best, best_floor = ShadowPrices(np.zeros(problem.counts.size), split * per_share), 0.0
    for number in range(_rounds(*usable.shape) + 1):
        is_full = number % _FULL_EVERY_ROUNDS == 0
        if is_full:
            looked_at = np.arange(problem.cost.size)
        costs = _costs(requests, split[looked_at] * per_share[looked_at]) + barred[:, looked_at]
        cheapest = costs.argmin(axis=1)
        by_class = costs[np.arange(cheapest.size), cheapest]
        if is_full:
            candidate = ShadowPrices(by_class, split * per_share)
            floor = candidate.floor(problem.counts)
            if floor > best_floor:
                best, best_floor = candidate, floor
            looked_at = np.flatnonzero((costs <= by_class[:, None] * _NEAR_RATIO).any(axis=0))
            cheapest = np.searchsorted(looked_at, cheapest)
        _move(split, looked_at[cheapest], demand, per_share, number)
    return best


def _rounds(classes_count: int, offers_count: int) -> int:
    """Few classes settle soon: one alone is worth the same relative to itself at any split."""
    most = min(_ROUNDS_MAX, _ROUNDS_OF_A_CLASS * (classes_count - 1))
    rounds = min(max(_CELLS_OF_ALL_ROUNDS // (classes_count * offers_count), _ROUNDS_MIN), most)
    return rounds - rounds % _FULL_EVERY_ROUNDS  # the last round is a full one, whose figures count


def _costs(requests: Floats, per_amount: Floats) -> Floats:
    """Return (classes, offers): what a pod costs at each offer's split; summed resource by resource, always alike."""
    total = requests[:, 0, None] * per_amount[None, :, 0]
    for resource in range(1, requests.shape[1]):
        total += requests[:, resource, None] * per_amount[None, :, resource]
    return total


def _move(split: Floats, chosen: Ints, demand: Floats, per_share: Floats, number: int) -> None:
    """Let each chosen offer's split move towards the resources of which it is asked for most."""
    load = np.empty_like(split)
    for resource in range(split.shape[1]):
        load[:, resource] = np.bincount(chosen, weights=demand[:, resource], minlength=split.shape[0])
    used = np.flatnonzero(load.max(axis=1) > 0)
    asked = load[used] * per_share[used]
    asked /= asked.max(axis=1)[:, None]
    mean = _row_sums(asked * split[used])[:, None]
    step = _STEP_FIRST / (1 + number / _STEP_HALVED_AFTER_ROUNDS)
    # A straight line instead of an exponential: equal to the last bit wherever it is computed.
    moved = split[used] * (1.0 + step * (asked - mean))
    moved = np.maximum(moved, np.where(per_share[used] > 0, _SPLIT_MIN, 0.0))
    split[used] = moved / _row_sums(moved)[:, None]


def _row_sums(rows: Floats) -> Floats:
    """Sums of each row, added from left to right."""
    total = rows[:, 0].copy()
    for column in range(1, rows.shape[1]):
        total += rows[:, column]
    return total
