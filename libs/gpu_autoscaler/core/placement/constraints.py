"""Which bins satisfy a shape's constraints, without and with its amounts.

A condition is evaluated once for each distinct value: thousands of bins share a dozen zones, models and types.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from gpu_autoscaler.core.placement.label_matching import avoided, holds, tolerates
from gpu_autoscaler.core.placement.resources import Bools, Ints, Kinds, has_columns, row
from gpu_autoscaler.core.placement.shapes import Bin, Shape
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeDemands, NodeSelectorTerm, Taint

V = TypeVar("V", bound=Hashable)

# Bounds the cache for a list of offers, which lives for minutes; the bins of one plan never need this many.
_ANSWERS_COUNT_MAX = 1024


class NodeRequirements(NamedTuple):
    """Everything about a shape except its amounts: shapes with equal requirements are accepted by the same bins."""

    gpu_models: tuple[str, ...]
    gpu_memory_bytes_min: int | None
    demands: NodeDemands
    is_spot_allowed: bool

    @classmethod
    def of(cls, shape: Shape) -> "NodeRequirements":
        """Return the requirements of a shape. Those of GPUs apply only if it requests GPUs."""
        models, memory = (shape.gpu_models, shape.gpu_memory_bytes_min) if shape.resources.has_gpus else ((), None)
        return cls(models, memory, shape.demands, shape.is_spot_allowed)


class _Column(Generic[V]):
    """One property of every bin: its distinct values, and the value of each bin."""

    def __init__(self, values: Iterable[V]) -> None:
        self._numbers: dict[V, int] = {}
        self._number_of = _numbered(values, self._numbers)

    def after(self, replaced: Mapping[int, V], removed: Sequence[int], added: Iterable[V]) -> "_Column[V]":
        """Return the column with other values in these places, without some, and with more after them."""
        numbers, number_of = dict(self._numbers), self._number_of.copy()
        number_of[list(replaced)] = _numbered(replaced.values(), numbers)
        column = copy(self)
        vars(column).update(
            _numbers=numbers, _number_of=np.append(np.delete(number_of, removed), _numbered(added, numbers))
        )
        return column

    def where(self, is_accepted: Callable[[V], bool]) -> Bools:
        """Return for each bin whether its value satisfies the predicate."""
        answers: Bools = np.array([is_accepted(value) for value in self._numbers], dtype=np.bool_)
        return answers[self._number_of]

    def figures(self, figure: Callable[[V], int]) -> Ints:
        """Return for each bin the figure of its value."""
        figures: Ints = np.array([figure(value) for value in self._numbers], dtype=np.int64)
        return figures[self._number_of]


def _numbered(values: Iterable[V], numbers: dict[V, int]) -> Ints:
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


# Columns of a NodeMatcher besides those of labels.
_PROPERTIES: Mapping[str, Callable[[Bin], Hashable]] = {
    "_models": attrgetter("gpu_model"),
    "_memories": attrgetter("gpu_memory_bytes"),
    "_capacity_types": attrgetter("capacity_type"),
    "_taints": attrgetter("taints"),
}


class NodeMatcher:
    """The properties of some bins, queried by shape."""

    def __init__(self, bins: Sequence[Bin]) -> None:
        self._bins = bins
        self._labels: dict[str, _Column[str | None]] = {}
        self._requirements: dict[LabelRequirement, Bools] = {}
        self._answers: dict[NodeRequirements, Bools] = {}

    def after(
        self, bins: Sequence[Bin], replaced: Mapping[int, Bin], removed: Sequence[int], added: Sequence[Bin]
    ) -> "NodeMatcher":
        """Return the matcher of the bins that these are after some were replaced, removed by place, and added."""
        matcher = NodeMatcher(bins)
        for name, property_of in _PROPERTIES.items():
            if name in vars(self):
                column = vars(self)[name]
                values = {place: property_of(entry) for place, entry in replaced.items()}
                vars(matcher)[name] = column.after(values, removed, map(property_of, added))
        own_labels: dict[str, _Column[str | None]] = vars(matcher)["_labels"]
        for key, column in dict(self._labels).items():
            labels = {place: entry.labels.get(key) for place, entry in replaced.items()}
            own_labels[key] = column.after(labels, removed, [entry.labels.get(key) for entry in added])
        return matcher

    def by(self, shape: Shape) -> Bools:
        """Return for each bin whether it satisfies everything but the amounts.

        Unknown does not satisfy: a node of unknown capacity type may be spot, one of unknown GPU memory may have too
        little.
        """
        requirements = NodeRequirements.of(shape)
        answer = self._answers.get(requirements)
        if answer is None:
            if len(self._answers) >= _ANSWERS_COUNT_MAX:
                self._answers.clear()
                self._requirements.clear()
            answer = self._answers[requirements] = self._evaluate(requirements)
        return answer

    @cached_property
    def has_taints_to_avoid(self) -> bool:
        """True if some bin has PreferNoSchedule taints."""
        return any(taint.effect == "PreferNoSchedule" for entry in self._bins for taint in entry.taints)

    def preferences(self, shape: Shape) -> tuple[Ints, Ints, Ints]:
        """Return for each bin: taints to avoid, rank of its GPU model, negated weight of satisfied preferences."""
        preferences, tolerations = shape.preferences, shape.demands.tolerations
        taints = self._taints.figures(lambda taints: len(avoided(tolerations, taints)))
        ranks = {model: number for number, model in enumerate(preferences.gpu_models)}
        models = self._models.figures(lambda model: ranks.get(model, len(ranks)) if model is not None else len(ranks))
        weights = np.zeros(len(self._bins), dtype=np.int64)
        for node in preferences.nodes:
            weights -= np.where(self.meets(node.term), node.weight, 0)
        return taints, models, weights

    def meets(self, term: NodeSelectorTerm) -> Bools:
        """Return for each bin whether all conditions of the term hold."""
        return self._any_term_holds((term,))

    def count_by_label(self, key: str, counts: Mapping[str, int]) -> Ints:
        """Return for each bin the count of its label value, 0 if there is none; negative without the label."""
        return self._label(key).figures(lambda value: -1 if value is None else counts.get(value, 0))

    @cached_property
    def _models(self) -> _Column[str | None]:
        return _Column(entry.gpu_model for entry in self._bins)

    @cached_property
    def _memories(self) -> _Column[int | None]:
        return _Column(entry.gpu_memory_bytes for entry in self._bins)

    @cached_property
    def _capacity_types(self) -> _Column[CapacityType | None]:
        return _Column(entry.capacity_type for entry in self._bins)

    @cached_property
    def _taints(self) -> _Column[tuple[Taint, ...]]:
        return _Column(entry.taints for entry in self._bins)

    def _evaluate(self, requirements: NodeRequirements) -> Bools:
        demands, least = requirements.demands, requirements.gpu_memory_bytes_min
        accepted = self._taints.where(lambda taints: tolerates(demands.tolerations, taints))
        if requirements.gpu_models:
            accepted &= self._models.where(lambda model: model in requirements.gpu_models)
        if least is not None:
            accepted &= self._memories.where(lambda memory: memory is not None and memory >= least)
        if not requirements.is_spot_allowed:
            accepted &= self._capacity_types.where(lambda capacity_type: capacity_type not in (CapacityType.SPOT, None))
        for key, value in demands.node_selector:
            accepted &= self._holds(LabelRequirement(key, "In", (value,)))
        if demands.node_affinity:
            accepted &= self._any_term_holds(demands.node_affinity)
        return accepted

    def _any_term_holds(self, terms: Iterable[NodeSelectorTerm]) -> Bools:
        """Return for each bin whether some term holds: terms are alternatives, conditions of one term hold together. "A
        null or empty node selector term matches no objects" (Kubernetes API reference, NodeSelectorTerm)."""
        holds_any = np.zeros(len(self._bins), dtype=np.bool_)
        for term in terms:
            if term.requirements:
                holds_any |= np.logical_and.reduce([self._holds(requirement) for requirement in term.requirements])
        return holds_any

    def _holds(self, requirement: LabelRequirement) -> Bools:
        answer = self._requirements.get(requirement)
        if answer is None:
            answer = self._label(requirement.key).where(lambda value: holds(requirement, value))
            self._requirements[requirement] = answer
        return answer

    def _label(self, key: str) -> _Column[str | None]:
        column = self._labels.get(key)
        if column is None:
            column = self._labels[key] = _Column(entry.labels.get(key) for entry in self._bins)
        return column


def members_that_fit(shape: Shape, free: Ints, accepted: Bools, kinds: Kinds = ()) -> Ints:
    """Return how many members each bin takes; `free` is (bins, columns), with slices of these kinds."""
    return np.where(accepted, members_by_amounts(shape.resources, free, kinds), 0)


def members_by_amounts(asked: Resources, free: Ints, kinds: Kinds = ()) -> Ints:
    """Return how many members with these requests each bin has capacity for, whatever else they require."""
    if not has_columns(asked, kinds):
        return np.zeros(free.shape[0], dtype=np.int64)
    # A bin that is overcommitted in any resource takes no member. Column by column: numpy reduces short rows slowly.
    needs = row(asked, kinds)
    takes: Bools = free[:, 0] >= needs[0]
    for column in range(1, len(needs)):
        takes &= free[:, column] >= needs[column]
    members = takes.astype(np.int64)
    if any(needs):  # divided only where one fits: most bins of a cluster are full, and divisions are slow
        places = np.flatnonzero(takes)
        fitting = free[places]
        members[places] = np.minimum.reduce([fitting[:, column] // need for column, need in enumerate(needs) if need])
    return members


def fits(shape: Shape, target: Bin) -> bool:
    """True when one member of this shape has its place in the bin."""
    return shape.resources.fits_in(target.free) and bool(NodeMatcher((target,)).by(shape)[0])
