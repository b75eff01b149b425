"""The shadow price of each class: the least cost of serving one pod of it, if nodes were divisible.

The dual of the linear program "cover all pods at least cost": every offer splits its cost over its resources, and the
splits move towards scarce ones. Multiplicative weights come within one per cent of the optimum in some dozen rounds
(Arora, Hazan, Kale, "The Multiplicative Weights Update Method", Theory of Computing 8, 2012).
"""

from dataclasses import dataclass

import numpy as np

from gpu_autoscaler.core.placement.resources import Bools, Floats, Ints
from gpu_autoscaler.core.provisioning.fleet.problem import FleetProblem, distinct_rows

# Small problems can afford more precision; large ones are close enough after the fewest rounds.
_ROUNDS_MIN, _ROUNDS_MAX = 40, 400
_CELLS_OF_ALL_ROUNDS = 30_000_000
_ROUNDS_OF_A_CLASS = 10
# Between full rounds only offers within this ratio of the cheapest for some class are considered.
_FULL_EVERY_ROUNDS = 10
_NEAR_RATIO = 1.25
_STEP_FIRST = 0.6
_STEP_HALVED_AFTER_ROUNDS = 10
# A split of zero could never grow again.
_SPLIT_MIN = 1e-4
# Start of the search: nodes are bought for their GPUs, whole or in slices, and pod slots are rarely scarce.
_SPLIT_FIRST = (3.0, 1.0, 1.0, 0.05, 0.05)
_SPLIT_FIRST_OF_SLICES = 3.0


@dataclass(frozen=True, slots=True)
class ShadowPrices:
    """Prices that no fleet can undercut, in the unit of the offers' cost."""

    by_class: Floats  # (classes,)
    per_amount: Floats  # (offers, resources): an offer's cost, split over what it has

    def floor(self, counts: Ints) -> float:
        """Return the cost below which no fleet takes all these pods."""
        return sum(float(price) * int(count) for price, count in zip(self.by_class, counts, strict=True))


def undominated_offers(problem: FleetProblem) -> Ints:
    """Return the offers, cheapest first, that no other offer beats in all of cost, capacity and accepted classes."""
    first_class, _ = distinct_rows(problem.accepts)
    accepted = np.ascontiguousarray(problem.accepts[first_class].T)
    first_offer, kind_of = distinct_rows(accepted)
    kinds = np.packbits(accepted[first_offer], axis=1)  # packed into bits: all pairs are compared
    covers = np.array([~(kinds & ~large).any(axis=1) for large in kinds], dtype=np.bool_)
    left = np.lexsort((np.arange(problem.cost.size), problem.cost))
    # Of those that are left, cheapest first: the classes that each accepts, and its capacity by column.
    kinds_left, columns_left = kind_of[left], list(problem.capacity[left].T.copy())
    kept: list[int] = []
    while left.size:
        kept.append(int(left[0]))
        stays = ~covers[kinds_left[0]][kinds_left]
        for column in columns_left:
            stays |= column > column[0]
        left, kinds_left = left[stays], kinds_left[stays]  # an offer beats itself
        columns_left = [column[stays] for column in columns_left]
    return np.array(kept, dtype=np.int64)


def shadow_prices(problem: FleetProblem, usable: Bools) -> ShadowPrices:
    """Return the shadow price of each class; `usable` (classes, offers) marks offers that take its pods (some)."""
    capacity = problem.capacity.astype(np.float64)
    per_share = np.where(capacity > 0, problem.cost[:, None] / np.where(capacity > 0, capacity, 1.0), 0.0)
    first = _SPLIT_FIRST + (_SPLIT_FIRST_OF_SLICES,) * (capacity.shape[1] - len(_SPLIT_FIRST))
    split = np.where(capacity > 0, np.array(first), 0.0)
    split /= _row_sums(split)[:, None]
    demand = (problem.requests * problem.counts[:, None]).astype(np.float64)
    requests, barred = problem.requests.astype(np.float64), np.where(usable, 0.0, np.inf)
    best, best_floor = ShadowPrices(np.zeros(problem.counts.size), split * per_share), 0.0
    rounds_count, near = _rounds(*usable.shape), np.arange(problem.cost.size)
    for number in range(rounds_count + 1):
        is_full = number % _FULL_EVERY_ROUNDS == 0
        looked_at = slice(None) if is_full else near
        per_amount = split[looked_at] * per_share[looked_at]
        costs = _costs(requests, per_amount) + barred[:, looked_at]
        cheapest = costs.argmin(axis=1)
        by_class = costs[np.arange(cheapest.size), cheapest]
        if is_full:
            candidate = ShadowPrices(by_class, per_amount)
            floor = candidate.floor(problem.counts)
            if floor > best_floor:
                best, best_floor = candidate, floor
            if number == rounds_count:
                break
            near = np.flatnonzero((costs <= by_class[:, None] * _NEAR_RATIO).any(axis=0))
        _move(split, cheapest if is_full else near[cheapest], demand, per_share, number)
    return best


def _rounds(classes_count: int, offers_count: int) -> int:
    """Return the number of rounds. Few classes converge soon: a single one has the same price at any split."""
    most = min(_ROUNDS_MAX, _ROUNDS_OF_A_CLASS * (classes_count - 1))
    rounds = min(max(_CELLS_OF_ALL_ROUNDS // (classes_count * offers_count), _ROUNDS_MIN), most)
    return rounds - rounds % _FULL_EVERY_ROUNDS  # the last round is a full one


def _costs(requests: Floats, per_amount: Floats) -> Floats:
    """Return (classes, offers): the cost of a pod at each offer's split; summed by resource in a fixed order."""
    total = requests[:, 0, None] * per_amount[None, :, 0]
    for resource in range(1, requests.shape[1]):
        total += requests[:, resource, None] * per_amount[None, :, resource]
    return total


def _move(split: Floats, chosen: Ints, demand: Floats, per_share: Floats, number: int) -> None:
    """Move each chosen offer's split towards the resources that are most requested of it."""
    load = np.empty_like(split)
    for resource in range(split.shape[1]):
        load[:, resource] = np.bincount(chosen, weights=demand[:, resource], minlength=split.shape[0])
    used = np.flatnonzero(load.max(axis=1) > 0)
    asked = load[used] * per_share[used]
    asked /= asked.max(axis=1)[:, None]
    mean = _row_sums(asked * split[used])[:, None]
    step = _STEP_FIRST / (1 + number / _STEP_HALVED_AFTER_ROUNDS)
    # Linear instead of exponential: bit for bit equal on any machine.
    moved = split[used] * (1.0 + step * (asked - mean))
    moved = np.maximum(moved, np.where(per_share[used] > 0, _SPLIT_MIN, 0.0))
    split[used] = moved / _row_sums(moved)[:, None]


def _row_sums(rows: Floats) -> Floats:
    """Sums of each row, added from left to right."""
    total = rows[:, 0].copy()
    for column in range(1, rows.shape[1]):
        total += rows[:, column]
    return total
