"""The default scheduler: binds pods to nodes, and says why where it cannot.

Works from its own view, kept up by changes. A pod that fits nowhere waits until something changes that could
help it; pods with equal needs share the verdict, so ten thousand of them cost little more than one.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import msgspec

from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.controllers.filters import (
    Needs,
    NodeView,
    fullness,
    lacking,
    needs_of,
    preference,
    standing_refusal,
    view_of,
)
from gpu_autoscaler.simcluster.controllers.recorder import Recorder
from gpu_autoscaler.simcluster.kinds import NODES, PODS
from gpu_autoscaler.simcluster.objects import (
    Json,
    condition,
    is_finished,
    is_terminating,
    requests_milli,
    set_pod_condition,
)
from gpu_autoscaler.simcluster.store import Change
from gpu_autoscaler.simcluster.subresources import assign

SCHEDULER_NAME = "default-scheduler"
# A step must not hold the event loop: about 50 ms with 1,000 nodes.
SEARCHES_PER_STEP_MAX = 100
VERDICTS_PER_STEP_MAX = 1_000
CANDIDATES_MAX = 2_000  # kinds of needs remembered at once


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A pod in the queue."""

    rank: tuple[int, str, int]  # highest priority first, then oldest
    uid: str
    needs: Needs
    signature: bytes


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The nodes that standing rules leave for a kind of pod, and why the others are out."""

    allowed: tuple[tuple[int, NodeView], ...]  # preference, node
    refusals: Counter[str]


class Scheduler:
    """Binds pending pods of the default scheduler, in order of priority and age."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._recorder = Recorder(api, SCHEDULER_NAME)
        self._nodes: dict[str, NodeView] = {}
        self._placed: dict[str, tuple[str, dict[str, int]]] = {}  # pod key -> node, requests
        self._placed_on: dict[str, set[str]] = {}
        self._queue: list[tuple[tuple[int, str, int], str]] = []
        self._waiting: dict[str, _Waiting] = {}  # by pod key: queued or parked
        self._parked: set[str] = set()
        self._candidates: dict[bytes, _Candidates] = {}
        self._hopeless: dict[bytes, str] = {}  # needs that fit nowhere until something is freed, and the message
        self._may_help = False

    def hear(self, change: Change) -> None:
        """Keep the view of nodes and pods current."""
        if change.table == NODES.table:
            self._node_changed(change)
        elif change.table == PODS.table:
            self._pod_changed(change)

    def step(self, now: datetime) -> None:
        """Try waiting pods, best first, up to the limits of a step."""
        if self._may_help:
            self._may_help = False
            self._hopeless.clear()
            for key in self._parked:
                heapq.heappush(self._queue, (self._waiting[key].rank, key))
            self._parked.clear()
        searches = verdicts = 0
        while self._queue and searches < SEARCHES_PER_STEP_MAX and verdicts < VERDICTS_PER_STEP_MAX:
            rank, key = heapq.heappop(self._queue)
            waiting = self._waiting.get(key)
            if waiting is None or waiting.rank != rank or key in self._parked:
                continue
            verdicts += 1
            message = self._hopeless.get(waiting.signature)
            if message is None:
                searches += 1
                message = self._try(key, waiting)
            if message is not None:
                self._parked.add(key)
                self._say_unschedulable(key, message, now)

    def _node_changed(self, change: Change) -> None:
        name = change.record.key
        old = self._nodes.get(name)
        if change.type == "DELETED":
            self._nodes.pop(name, None)
        else:
            new = view_of(change.record.object)
            if old is not None and new.same_shape(old):
                return  # a heartbeat
            for key in self._placed_on.get(name, ()):
                new.take(self._placed[key][1])
            self._nodes[name] = new
        self._candidates.clear()
        self._may_help = True

    def _pod_changed(self, change: Change) -> None:
        key, pod = change.record.key, change.record.object
        gone = change.type == "DELETED" or is_finished(pod)
        node_name = pod["spec"].get("nodeName")
        if node_name and not gone:
            self._waiting.pop(key, None)
            self._parked.discard(key)
            if key not in self._placed:
                self._place(key, node_name, requests_milli(pod))
            return
        if gone:
            self._unplace(key)
        if gone or is_terminating(pod) or not _is_mine(pod):
            self._waiting.pop(key, None)
            self._parked.discard(key)
            return
        known = self._waiting.get(key)
        spec_changed = change.previous is not None and change.previous.object["spec"] != pod["spec"]
        if known is None or known.uid != pod["metadata"]["uid"] or spec_changed:
            self._enqueue(key, pod)

    def _enqueue(self, key: str, pod: Json) -> None:
        requests = requests_milli(pod)
        metadata = pod["metadata"]
        since = known.rank[2] if (known := self._waiting.get(key)) else int(metadata["resourceVersion"])
        rank = (-int(pod["spec"].get("priority") or 0), metadata["creationTimestamp"], since)
        needs = needs_of(pod, requests)
        signature = msgspec.json.encode(needs, order="deterministic")
        self._waiting[key] = _Waiting(rank, metadata["uid"], needs, signature)
        self._parked.discard(key)
        heapq.heappush(self._queue, (rank, key))

    def _place(self, key: str, node_name: str, requests: dict[str, int]) -> None:
        self._placed[key] = (node_name, requests)
        self._placed_on.setdefault(node_name, set()).add(key)
        if node_name in self._nodes:
            self._nodes[node_name].take(requests)

    def _unplace(self, key: str) -> None:
        found = self._placed.pop(key, None)
        if found is None:
            return
        node_name, requests = found
        self._placed_on[node_name].discard(key)
        if node_name in self._nodes:
            self._nodes[node_name].take(requests, -1)
            self._may_help = True

    def _try(self, key: str, waiting: _Waiting) -> str | None:
        """Bind the pod to its best node; return the message where none fits."""
        candidates = self._candidates.get(waiting.signature)
        if candidates is None:
            if len(self._candidates) >= CANDIDATES_MAX:
                self._candidates.clear()
            candidates = self._candidates[waiting.signature] = self._sift(waiting.needs)
        requests = waiting.needs.requests_milli
        best: tuple[int, float, str] | None = None
        refusals = Counter(candidates.refusals)
        for liking, node in candidates.allowed:
            if reasons := lacking(requests, node):
                refusals.update(reasons)
                continue
            score = (liking, fullness(requests, node), node.name)
            best = score if best is None or score > best else best
        if best is not None:
            assign(self._api, key, best[2])
            pod = self._api.find(PODS, key)
            if pod is not None:
                message = f"Successfully assigned {key} to {best[2]}"
                self._recorder.record(PODS, pod, "Normal", "Scheduled", message)
            return None
        message = _unschedulable_message(len(self._nodes), refusals)
        self._hopeless[waiting.signature] = message
        return message

    def _sift(self, needs: Needs) -> _Candidates:
        allowed, refusals = [], Counter[str]()
        for node in self._nodes.values():
            refusal = standing_refusal(needs, node)
            if refusal is None:
                allowed.append((preference(needs, node), node))
            else:
                refusals[refusal] += 1
        return _Candidates(tuple(allowed), refusals)

    def _say_unschedulable(self, key: str, message: str, now: datetime) -> None:
        pod = self._api.find(PODS, key)
        if pod is None:
            return
        told = condition(pod, "PodScheduled")
        if told and told.get("message") == message and told.get("reason") == "Unschedulable":
            return

        def write(new: Json) -> None:
            set_pod_condition(
                new,
                now,
                "PodScheduled",
                status="False",
                reason="Unschedulable",
                message=message,
                observedGeneration=new["metadata"].get("generation", 1),
            )

        self._api.modify(PODS, key, write)
        self._recorder.record(PODS, pod, "Warning", "FailedScheduling", message)


def _is_mine(pod: Json) -> bool:
    spec = pod["spec"]
    return spec.get("schedulerName") == SCHEDULER_NAME and not spec.get("schedulingGates")


def _unschedulable_message(nodes_count: int, refusals: Counter[str]) -> str:
    """Return the message as the real scheduler writes it: `0/3 nodes are available: 1 ..., 2 ....`"""
    if not nodes_count:
        return "no nodes available to schedule pods"
    listed = ", ".join(sorted(f"{count} {reason}" for reason, count in refusals.items()))
    return f"0/{nodes_count} nodes are available: {listed}. preemption: {_preemption(nodes_count, refusals)}"


def _preemption(nodes_count: int, refusals: Iterable[str]) -> str:
    """Return the preemption half of the message. Nothing is preempted here: priorities order the queue only."""
    crowded = any(reason.startswith("Insufficient") or reason == "Too many pods" for reason in refusals)
    why = "No preemption victims found for incoming pod" if crowded else "Preemption is not helpful for scheduling"
    return f"0/{nodes_count} nodes are available: {nodes_count} {why}."
