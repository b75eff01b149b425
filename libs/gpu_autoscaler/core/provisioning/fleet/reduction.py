"""Classes that differ in their group alone are one class while a fleet is chosen, and are told apart afterwards.

Hundreds of groups of which each node takes one pod would make every class a crowd of small ones; where groups are many,
which of them a pod is of hardly matters for the choice.
"""

from dataclasses import dataclass, replace

import numpy as np

from gpu_autoscaler.core.placement.resources import Bools, Floats, Ints
from gpu_autoscaler.core.provisioning.fleet.problem import NO_GROUP, FleetProblem, distinct_rows


@dataclass(frozen=True, slots=True)
class ReducedProblem:
    """A problem with fewer classes, and what each of them stands for."""

    origin: FleetProblem
    problem: FleetProblem  # without groups
    members: tuple[tuple[int, ...], ...]  # of each folded class: the classes it stands for
    is_grouped: Bools  # (folded classes,)

    @classmethod
    def of(cls, problem: FleetProblem, classes: Ints) -> "ReducedProblem":
        """Fold those of these classes that ask for equal amounts of equal offers; ones with groups for themselves."""
        _, kinds = distinct_rows(problem.accepts[classes])
        is_grouped = problem.groups[classes] != NO_GROUP
        first, folded_of = distinct_rows(np.column_stack((problem.requests[classes], kinds, is_grouped)))
        members: list[list[int]] = [[] for _ in first]
        for class_number, reduced_class in zip(classes.tolist(), folded_of.tolist(), strict=True):
            members[reduced_class].append(class_number)
        return cls(
            origin=problem,
            problem=replace(
                problem,
                requests=problem.requests[classes[first]],
                counts=np.array([int(problem.counts[each].sum()) for each in members], dtype=np.int64),
                groups=np.full(len(members), NO_GROUP, dtype=np.int64),
                accepts=problem.accepts[classes[first]],
            ),
            members=tuple(tuple(each) for each in members),
            is_grouped=is_grouped[first],
        )

    def expanded(self, by_reduced: Floats) -> Floats:
        """Return (classes,): each class's figure from that of the folded one; zero for those not folded."""
        by_class = np.zeros(self.origin.counts.size)
        for reduced_class, members in enumerate(self.members):
            by_class[list(members)] = by_reduced[reduced_class]
        return by_class


class ClassAssigner:
    """Hands out the classes behind the folded ones, node by node."""

    def __init__(self, reduced: ReducedProblem) -> None:
        self._members = reduced.members
        self._groups = reduced.origin.groups.tolist()
        self._left = {each: int(reduced.origin.counts[each]) for members in reduced.members for each in members}

    def fill(self, pods: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """Return the classes of the pods of one node, ascending; fewer where groups are in each other's way."""
        used: set[int] = set()
        taken: list[int] = []
        for reduced_class, count in pods:
            for _ in range(count):
                chosen = self._next(reduced_class, used)
                if chosen is None:
                    break
                self._left[chosen] -= 1
                used.add(self._groups[chosen])
                taken.append(chosen)
        return tuple(sorted(taken))

    def left(self) -> Ints:
        """How many pods of each folded class have no node yet."""
        return np.array([sum(self._left[each] for each in members) for members in self._members], dtype=np.int64)

    def groups_count(self) -> int:
        """How many groups have pods without a node."""
        return len({self._groups[each] for each, count in self._left.items() if count} - {NO_GROUP})

    def _next(self, reduced_class: int, used: set[int]) -> int | None:
        """The class to take from: of a group not on the node yet, and of those the one with most pods left."""
        free = (each for each in self._members[reduced_class] if self._left[each] > 0)
        allowed = (each for each in free if self._groups[each] == NO_GROUP or self._groups[each] not in used)
        return max(allowed, key=lambda each: (self._left[each], -each), default=None)
