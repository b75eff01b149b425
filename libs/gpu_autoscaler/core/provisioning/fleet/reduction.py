"""Reduction of a fleet problem: classes that differ only in their group are merged, and separated afterwards.

Hundreds of groups would make every class many small ones.
"""

from dataclasses import dataclass, replace

import numpy as np

from gpu_autoscaler.core.placement.resources import Bools, Floats, Ints
from gpu_autoscaler.core.provisioning.fleet.problem import NO_GROUP, FleetProblem


@dataclass(frozen=True, slots=True)
class ReducedProblem:
    """A problem with fewer classes, and the original classes of each."""

    origin: FleetProblem
    problem: FleetProblem  # without groups
    members: tuple[tuple[int, ...], ...]  # of each reduced class: the original classes
    is_grouped: Bools  # (reduced classes,)

    @classmethod
    def of(cls, problem: FleetProblem, classes: Ints) -> "ReducedProblem":
        """Merge classes with equal requests and equal offers; those with groups separately from those without."""
        equal: dict[tuple[bytes, bytes, bool], list[int]] = {}
        for number in classes.tolist():
            kind = problem.requests[number].tobytes(), problem.accepts[number].tobytes()
            equal.setdefault((*kind, bool(problem.groups[number] != NO_GROUP)), []).append(number)
        members = list(equal.values())
        first = [member[0] for member in members]
        return cls(
            origin=problem,
            problem=replace(
                problem,
                requests=problem.requests[first],
                counts=np.array([int(problem.counts[member].sum()) for member in members], dtype=np.int64),
                groups=np.full(len(members), NO_GROUP, dtype=np.int64),
                accepts=problem.accepts[first],
            ),
            members=tuple(tuple(member) for member in members),
            is_grouped=problem.groups[first] != NO_GROUP,
        )

    def expanded(self, by_reduced: Floats) -> Floats:
        """Return (classes,): each original class's figure from that of its reduced class; zero for classes left out."""
        by_class = np.zeros(self.origin.counts.size)
        for reduced_class, members in enumerate(self.members):
            by_class[list(members)] = by_reduced[reduced_class]
        return by_class


class ClassAssigner:
    """Assigns original classes to the pods of reduced classes, node by node."""

    def __init__(self, reduced: ReducedProblem) -> None:
        self._members = reduced.members
        self._groups = reduced.origin.groups.tolist()
        self._left = {member: int(reduced.origin.counts[member]) for members in reduced.members for member in members}

    def fill(self, pods: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """Return the classes of the pods of one node, ascending; fewer where groups conflict."""
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
        """Return how many pods of each reduced class have no node yet."""
        return np.array([sum(self._left[member] for member in members) for members in self._members], dtype=np.int64)

    def groups_count(self) -> int:
        """Return how many groups have pods without a node."""
        return len({self._groups[number] for number, count in self._left.items() if count} - {NO_GROUP})

    def _next(self, reduced_class: int, used: set[int]) -> int | None:
        """Return the class to take from: of a group not on the node yet, the one with most pods left."""
        free = (member for member in self._members[reduced_class] if self._left[member] > 0)
        allowed = (number for number in free if self._groups[number] == NO_GROUP or self._groups[number] not in used)
        return max(allowed, key=lambda number: (self._left[number], -number), default=None)
