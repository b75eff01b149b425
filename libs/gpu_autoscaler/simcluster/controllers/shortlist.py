"""Ranked nodes for one kind of pod, without examining all of them for every pod.

A node's score changes only with its pods, so only touched nodes are scored again; outdated entries are dropped when
they come up. Rebuilt when a node itself changes.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from gpu_autoscaler.simcluster.controllers.filters import (
    Needs,
    NodeView,
    fullness,
    lacking,
    preference,
    standing_refusal,
)

_Entry = tuple[int, float, str]  # least first: less preferred, less full, name


class Shortlist:
    """Nodes that permanent rules allow for pods with these needs."""

    def __init__(self, needs: Needs, nodes: Iterable[NodeView], touched_count: int) -> None:
        """`touched_count`: touches of nodes so far."""
        self._requests = needs.requests_milli
        self._refusals = Counter[str]()
        self._allowed: dict[str, tuple[int, NodeView]] = {}
        self._touches_seen = touched_count
        for node in nodes:
            refusal = standing_refusal(needs, node)
            if refusal is None:
                self._allowed[node.name] = (-preference(needs, node), node)
            else:
                self._refusals[refusal] += 1
        self._heap = [self._entry(name) for name, (_, node) in self._allowed.items() if self._fits(node)]
        heapq.heapify(self._heap)

    def best(self, touched: Sequence[str]) -> str | None:
        """Return the node to use: the most preferred, then the fullest, then the first by name."""
        for name in set(touched[self._touches_seen :]) & self._allowed.keys():
            if self._fits(self._allowed[name][1]):
                heapq.heappush(self._heap, self._entry(name))
        self._touches_seen = len(touched)
        while self._heap:
            entry = self._heap[0]
            if self._fits(self._allowed[entry[2]][1]) and entry == self._entry(entry[2]):
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def why_none(self) -> Counter[str]:
        """Return how many nodes are excluded for which reason; a node may have several."""
        reasons = Counter(self._refusals)
        for _, node in self._allowed.values():
            reasons.update(lacking(self._requests, node))
        return reasons

    def _fits(self, node: NodeView) -> bool:
        return not lacking(self._requests, node)

    def _entry(self, name: str) -> _Entry:
        dislike, node = self._allowed[name]
        return (dislike, -fullness(self._requests, node), name)
