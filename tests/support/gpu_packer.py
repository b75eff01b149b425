"""Packs pods onto GPUs, which may be shared, one after the other, by the policies of `core/placement/gpu_packing.py`.

A node state is scored once for all shapes and cached; a placement changes one node.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpu_autoscaler.core.placement.gpu_packing import (
    WHOLE,
    Fragmentation,
    PackingPolicy,
    best_fit_scores,
    least_loaded_scores,
    packing_scores,
    scaled_rest,
)
from gpu_autoscaler.core.placement.resources import Ints

_REST_SPAN = 2**40  # more than the difference of any two nodes' remaining amounts
_NO = -(2**62)  # score of a pod that does not fit


@dataclass(frozen=True, slots=True)
class PodShares:
    """The request of a pod: whole GPUs, or a share of one."""

    cpu_milli: int
    memory_bytes: int
    gpu_count: int = 0
    gpu_milli: int = WHOLE  # of each of its GPUs; below WHOLE only of a single one

    @property
    def total_milli(self) -> int:
        """The sum over its GPUs, in thousandths of one."""
        return self.gpu_count * self.gpu_milli


@dataclass(frozen=True, slots=True)
class NodeState:
    """What determines the scores of a node: free CPU and, smallest first, what each GPU has left."""

    cpu_milli: int
    gpus_milli: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Popular:
    """The shapes that make up most of the work, with their counts; they measure fragmentation."""

    shapes: tuple[PodShares, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, pods: Sequence[PodShares], ratio: float = 0.95) -> "Popular":
        """Return the most common shapes until they cover this ratio of the pods; memory is not distinguished."""
        counts: dict[tuple[int, int, int], int] = {}
        for pod in pods:
            key = (pod.cpu_milli, pod.gpu_count, pod.gpu_milli if pod.gpu_count else 0)
            counts[key] = counts.get(key, 0) + 1
        kept: dict[tuple[int, int, int], int] = {}
        for key in sorted(counts, key=lambda key: (-counts[key], key)):
            if sum(kept.values()) >= ratio * len(pods):
                break
            kept[key] = counts[key]
        return cls(tuple(PodShares(cpu, 0, number, milli) for cpu, number, milli in kept), tuple(kept.values()))


class Scores(Fragmentation):
    """Scores of node states for all shapes, each state scored once."""

    def __init__(self, shapes: Sequence[PodShares], policy: PackingPolicy, popular: Popular) -> None:
        self.shapes = tuple(shapes)
        self._score = _SCORES[policy]
        self._known: dict[NodeState, tuple[Ints, Ints]] = {}
        super().__init__([(shape.cpu_milli, shape.gpu_count) for shape in popular.shapes], popular.counts)
        self._milli = np.array([shape.gpu_milli for shape in popular.shapes], dtype=np.int64)

    def of(self, state: NodeState) -> tuple[Ints, Ints]:
        """Return for each shape the score, very low where it does not fit, and what the GPU to be shared has left."""
        known = self._known.get(state)
        if known is None:
            known = self._known[state] = self._scored(state)
        return known

    def fragments(self, cpu_milli: Ints, gpus_milli: Ints) -> Ints:
        """Return (states,): idle GPU shares that popular pods cannot use, times the number of those pods.

        `gpus_milli` is (states, GPUs). Pods without GPUs can use none of them.
        """
        idle = gpus_milli.sum(axis=1)
        enough = gpus_milli[:, :, None] >= self._milli[None, None, :]
        hosts = (enough.sum(axis=1) >= self._number) & (cpu_milli[:, None] >= self._cpu) & (self._number > 0)
        used = np.where(enough, gpus_milli[:, :, None], 0).sum(axis=1)
        wasted = idle[:, None] - np.where(hosts, used, 0)
        return np.asarray((wasted * self._counts).sum(axis=1), dtype=np.int64)

    def _scored(self, state: NodeState) -> tuple[Ints, Ints]:
        after = _Afters(state, self.shapes)
        scores = np.full(len(self.shapes), _NO, dtype=np.int64)
        shared = np.zeros(len(self.shapes), dtype=np.int64)
        if after.shape.size:
            of_states = self._score(self, state, after)
            # The best of a shape's alternatives; among equals the GPU with least left.
            order = np.lexsort((after.left, -of_states, after.shape))
            first = np.unique(after.shape[order], return_index=True)[1]
            best = order[first]
            scores[after.shape[best]], shared[after.shape[best]] = of_states[best], after.left[best]
        return scores, shared


class _Afters:
    """The states of a node with one more pod: one row for each shape and GPU level that it may share."""

    def __init__(self, state: NodeState, shapes: Sequence[PodShares]) -> None:
        levels = sorted(set(state.gpus_milli))
        whole_count = sum(1 for gpu_milli in state.gpus_milli if gpu_milli == WHOLE)
        rows: list[tuple[int, int, int, tuple[int, ...]]] = []
        for number, shape in enumerate(shapes):
            cpu_milli = state.cpu_milli - shape.cpu_milli
            if cpu_milli < 0:
                continue
            if shape.gpu_count == 0:
                rows.append((number, 0, cpu_milli, state.gpus_milli))
            elif shape.gpu_milli == WHOLE:
                if whole_count >= shape.gpu_count:
                    kept = state.gpus_milli[: len(state.gpus_milli) - shape.gpu_count]
                    rows.append((number, WHOLE, cpu_milli, (0,) * shape.gpu_count + kept))
            else:
                rows.extend(
                    (number, level, cpu_milli, with_share(state.gpus_milli, level, shape.gpu_milli))
                    for level in levels
                    if level >= shape.gpu_milli
                )
        self.shape = np.array([row[0] for row in rows], dtype=np.int64)
        self.left = np.array([row[1] for row in rows], dtype=np.int64)
        self.cpu_milli = np.array([row[2] for row in rows], dtype=np.int64)
        self.gpus_milli = np.array([row[3] for row in rows], dtype=np.int64).reshape(len(rows), len(state.gpus_milli))
        self.asked_count = np.array([shapes[row[0]].gpu_count for row in rows], dtype=np.int64)


def with_share(gpus_milli: tuple[int, ...], level: int, share_milli: int) -> tuple[int, ...]:
    """Return the levels after one GPU of this level has given a share."""
    rest = list(gpus_milli)
    rest.remove(level)
    return tuple(sorted((*rest, level - share_milli)))


class Packer:
    """Nodes that are packed pod by pod."""

    def __init__(self, nodes: Mapping[str, tuple[int, int, int]], scores: Scores, policy: PackingPolicy) -> None:
        """`nodes` are CPU in thousandths, memory in bytes and GPUs of each, by name."""
        self.names = sorted(nodes)
        self._policy = policy
        self._scores = scores
        self._states = [NodeState(nodes[name][0], (WHOLE,) * nodes[name][2]) for name in self.names]
        self._memory = np.array([nodes[name][1] for name in self.names], dtype=np.int64)
        self._rows = np.array([scores.of(state)[0] for state in self._states], dtype=np.int64).T.copy()
        self._needs = np.array([shape.memory_bytes for shape in scores.shapes], dtype=np.int64)
        self._next = 0  # where the round continues

    def place(self, number: int, chance: Callable[[int], int]) -> str | None:
        """Place a pod of the shape with this number and return its node; None: it fits nowhere.

        `chance(n)` returns a number below n; only the random policy calls it.
        """
        row = np.where(self._memory >= self._needs[number], self._rows[number], _NO)
        place = self._chosen(row, chance)
        if row[place] == _NO:
            return None
        shape, state = self._scores.shapes[number], self._states[place]
        gpus = state.gpus_milli
        if shape.gpu_count and shape.gpu_milli == WHOLE:
            gpus = (0,) * shape.gpu_count + gpus[: len(gpus) - shape.gpu_count]
        elif shape.gpu_count:
            level = int(self._scores.of(state)[1][number])
            if self._policy is PackingPolicy.RANDOM:
                levels = [gpu for gpu in gpus if gpu >= shape.gpu_milli]
                level = levels[chance(len(levels))]
            gpus = with_share(gpus, level, shape.gpu_milli)
        self._states[place] = state = NodeState(state.cpu_milli - shape.cpu_milli, gpus)
        self._memory[place] -= shape.memory_bytes
        self._rows[:, place] = self._scores.of(state)[0]
        return self.names[place]

    def _chosen(self, row: Ints, chance: Callable[[int], int]) -> int:
        if self._policy not in (PackingPolicy.ROUND_ROBIN, PackingPolicy.RANDOM):
            return int(row.argmax())  # the first of equals, in name order
        fitting = np.flatnonzero(row != _NO)
        if not fitting.size:
            return 0
        if self._policy is PackingPolicy.RANDOM:
            return int(fitting[chance(fitting.size)])
        place = int(fitting[np.searchsorted(fitting, self._next) % fitting.size])
        self._next = place + 1
        return place


_Score = Callable[[Scores, NodeState, _Afters], Ints]


def _gradient(scores: Scores, state: NodeState, after: _Afters) -> Ints:
    now = scores.fragments(np.array([state.cpu_milli]), np.array([state.gpus_milli], dtype=np.int64).reshape(1, -1))
    return np.asarray(now[0] - scores.fragments(after.cpu_milli, after.gpus_milli), dtype=np.int64)


def _gradient_in_steps(scores: Scores, state: NodeState, after: _Afters) -> Ints:
    return scores.in_steps(_gradient(scores, state, after))


def _least_fragments(scores: Scores, state: NodeState, after: _Afters) -> Ints:
    """Return the gradient's step, then best fit: too many nodes are equal within a step to break ties by name."""
    steps = scores.in_steps(_gradient(scores, state, after))
    return steps * _REST_SPAN - scaled_rest(after.cpu_milli, after.gpus_milli.sum(axis=1))


def _best_fit(_scores: Scores, _state: NodeState, after: _Afters) -> Ints:
    return best_fit_scores(after.cpu_milli, after.gpus_milli.sum(axis=1))


def _packing(_scores: Scores, state: NodeState, after: _Afters) -> Ints:
    idle_count = sum(1 for gpu_milli in state.gpus_milli if gpu_milli == WHOLE)
    return packing_scores(
        np.full(after.shape.size, idle_count, dtype=np.int64),
        np.full(after.shape.size, len(state.gpus_milli), dtype=np.int64),
        after.asked_count,
        after.left,
    )


def _spreading(_scores: Scores, _state: NodeState, after: _Afters) -> Ints:
    return np.asarray(after.gpus_milli.sum(axis=1), dtype=np.int64)


def _least_loaded(_scores: Scores, state: NodeState, after: _Afters) -> Ints:
    gpus_count = np.full(after.shape.size, len(state.gpus_milli), dtype=np.int64)
    return least_loaded_scores(after.gpus_milli.sum(axis=1), gpus_count)


def _equal(_scores: Scores, _state: NodeState, after: _Afters) -> Ints:
    """Return equal scores; among GPUs to share the one with least left is used."""
    return np.zeros(after.shape.size, dtype=np.int64)


_SCORES: Mapping[PackingPolicy, _Score] = {
    PackingPolicy.FRAGMENTATION_GRADIENT: _gradient_in_steps,
    PackingPolicy.LEAST_FRAGMENTS: _least_fragments,
    PackingPolicy.BEST_FIT: _best_fit,
    PackingPolicy.PACKING: _packing,
    PackingPolicy.SPREADING: _spreading,
    PackingPolicy.LEAST_LOADED: _least_loaded,
    PackingPolicy.ROUND_ROBIN: _equal,
    PackingPolicy.RANDOM: _equal,
}
