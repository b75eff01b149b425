"""Classes that differ in their group alone are one class while a fleet is chosen, and are told apart afterwards.

Hundreds of groups of which each node takes one pod would make every class a crowd of small ones; where groups are many,
which of them a pod is of hardly matters for the choice.
"""

from dataclasses import dataclass, replace

import numpy as np

from gpu_autoscaler.core.fleet.problem import NO_GROUP, FleetProblem, distinct_rows
from gpu_autoscaler.core.placing.amounts import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Folding:
    """A problem with fewer classes, and what each of them stands for."""

    origin: FleetProblem
    problem: FleetProblem  # without groups
    members: tuple[tuple[int, ...], ...]  # of each folded class: the classes it stands for
    is_grouped: Bools  # (folded classes,)

    @classmethod
    def of(cls, problem: FleetProblem, classes: Ints) -> "Folding":
        """Fold those of these classes that ask for equal amounts of equal offers; ones with groups for themselves."""
        _, kinds = distinct_rows(problem.accepts[classes])
        is_grouped = problem.groups[classes] != NO_GROUP
        first, folded_of = distinct_rows(np.column_stack((problem.requests[classes], kinds, is_grouped)))
        members: list[list[int]] = [[] for _ in first]
        for class_number, folded in zip(classes.tolist(), folded_of.tolist(), strict=True):
            members[folded].append(class_number)
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

    def unfolded(self, of_folded: Floats) -> Floats:
        """Return (classes,): each class's figure from that of the folded one; zero for those not folded."""
        of_class = np.zeros(self.origin.counts.size)
        for folded, members in enumerate(self.members):
            of_class[list(members)] = of_folded[folded]
        return of_class


class Slots:
    """Hands out the classes behind the folded ones, node by node."""

    def __init__(self, folding: Folding) -> None:
        self._members = folding.members
        self._groups = folding.origin.groups.tolist()
        self._left = {each: int(folding.origin.counts[each]) for members in folding.members for each in members}

    def fill(self, pods: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """Return the classes of the pods of one node, ascending; fewer where groups are in each other's way."""
        used: set[int] = set()
        taken: list[int] = []
        for folded, count in pods:
            for _ in range(count):
                chosen = self._next(folded, used)
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

    def _next(self, folded: int, used: set[int]) -> int | None:
        """The class to take from: of a group not on the node yet, and of those the one with most pods left."""
        free = (each for each in self._members[folded] if self._left[each] > 0)
        allowed = (each for each in free if self._groups[each] == NO_GROUP or self._groups[each] not in used)
        return max(allowed, key=lambda each: (self._left[each], -each), default=None)
