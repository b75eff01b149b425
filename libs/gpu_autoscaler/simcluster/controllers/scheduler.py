"""The default scheduler: binds pods to nodes, or reports why it cannot.

Uses its own view, updated by changes. A pod that fits nowhere waits until a change could help it; pods with equal needs
share the result, so ten thousand of them cost little more than one.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import msgspec

from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.controllers.devices import DEVICE_TABLES, allocate, created_claims, device_reach
from gpu_autoscaler.simcluster.controllers.filters import Needs, NodeView, Shortlist, needs_of, view_of
from gpu_autoscaler.simcluster.controllers.protocol import Recorder
from gpu_autoscaler.simcluster.controllers.volumes import STORAGE_TABLES, claims_of, reach
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
# A step must not block the event loop: with 1,000 nodes a survey takes about 5 ms, a verdict 0.1 ms.
SURVEYS_PER_STEP_MAX = 10
VERDICTS_PER_STEP_MAX = 500
SHORTLISTS_MAX = 1_000  # kinds of needs remembered at once
TOUCHES_MAX = 50_000


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A pod in the queue."""

    rank: tuple[int, str, int]  # highest priority first, then oldest
    uid: str
    needs: Needs
    signature: bytes


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
        self._with_claims: set[str] = set()  # pods whose needs change with their volumes
        self._shortlists: dict[bytes, Shortlist] = {}
        self._touched: list[str] = []  # nodes whose usage changed, in order
        self._surveys_left = 0
        self._hopeless: dict[bytes, str] = {}  # needs that fit nowhere until something is released, and the message
        self._may_help = False

    def on_change(self, change: Change) -> None:
        if change.table == NODES.table:
            self._node_changed(change)
        elif change.table == PODS.table:
            self._pod_changed(change)
        elif change.table in STORAGE_TABLES | DEVICE_TABLES:
            self._storage_changed()

    def step(self, now: datetime) -> None:
        """Try waiting pods, best first, up to the limits of a step."""
        if self._may_help:
            self._may_help = False
            self._hopeless.clear()
            for key in self._parked:
                heapq.heappush(self._queue, (self._waiting[key].rank, key))
            self._parked.clear()
        self._surveys_left, verdicts = SURVEYS_PER_STEP_MAX, 0
        while self._queue and self._surveys_left > 0 and verdicts < VERDICTS_PER_STEP_MAX:
            rank, key = heapq.heappop(self._queue)
            waiting = self._waiting.get(key)
            if waiting is None or waiting.rank != rank or key in self._parked:
                continue
            verdicts += 1
            message = self._hopeless.get(waiting.signature)
            if message is None:
                message = self._try(key, waiting)
            if message is not None:
                self._parked.add(key)
                self._report_unschedulable(key, message, now)

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
        self._forget_shortlists()
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
        before = None if change.previous is None else change.previous.object
        spec_changed = before is not None and (
            before["spec"] != pod["spec"] or created_claims(before) != created_claims(pod)
        )
        if known is None or known.uid != pod["metadata"]["uid"] or spec_changed:
            self._enqueue(key, pod)

    def _storage_changed(self) -> None:
        self._with_claims &= self._waiting.keys()
        for key in sorted(self._with_claims):
            pod = self._api.find(PODS, key)
            if pod is not None:
                self._enqueue(key, pod)

    def _enqueue(self, key: str, pod: Json) -> None:
        requests = requests_milli(pod)
        metadata = pod["metadata"]
        since = known.rank[2] if (known := self._waiting.get(key)) else int(metadata["resourceVersion"])
        rank = (-int(pod["spec"].get("priority") or 0), metadata["creationTimestamp"], since)
        terms, hopeless = reach(self._api, pod)
        device_nodes, unclaimed = device_reach(self._api, pod)
        where = None if device_nodes is None else tuple(sorted(device_nodes))
        needs = needs_of(pod, requests, terms, hopeless or unclaimed, where)
        if any(claims_of(pod)) or device_nodes is not None:
            self._with_claims.add(key)
        signature = msgspec.json.encode(needs, order="deterministic")
        self._waiting[key] = _Waiting(rank, metadata["uid"], needs, signature)
        self._parked.discard(key)
        heapq.heappush(self._queue, (rank, key))

    def _place(self, key: str, node_name: str, requests: dict[str, int]) -> None:
        self._placed[key] = (node_name, requests)
        self._placed_on.setdefault(node_name, set()).add(key)
        self._take(node_name, requests, 1)

    def _unplace(self, key: str) -> None:
        placement = self._placed.pop(key, None)
        if placement is None:
            return
        node_name, requests = placement
        self._placed_on[node_name].discard(key)
        self._take(node_name, requests, -1)
        self._may_help = True

    def _take(self, node_name: str, requests: dict[str, int], sign: int) -> None:
        if node_name in self._nodes:
            self._nodes[node_name].take(requests, sign)
            self._touched.append(node_name)
            if len(self._touched) > TOUCHES_MAX:
                self._forget_shortlists()

    def _forget_shortlists(self) -> None:
        self._shortlists.clear()
        self._touched.clear()

    def _try(self, key: str, waiting: _Waiting) -> str | None:
        """Bind the pod to its best node; return the message if none fits."""
        shortlist = self._shortlists.get(waiting.signature)
        if shortlist is None:
            if len(self._shortlists) >= SHORTLISTS_MAX:
                self._forget_shortlists()
            self._surveys_left -= 1
            shortlist = Shortlist(waiting.needs, self._nodes.values(), len(self._touched))
            self._shortlists[waiting.signature] = shortlist
        node_name = shortlist.best(self._touched)
        if node_name is None:
            self._surveys_left -= 1
            message = _unschedulable_message(len(self._nodes), shortlist.why_none())
            self._hopeless[waiting.signature] = message
            return message
        pod = self._api.find(PODS, key)
        if pod is not None and waiting.needs.device_nodes is not None and not allocate(self._api, pod, node_name):
            self._enqueue(key, pod)  # another pod just got the devices
            return None
        assign(self._api, key, node_name)
        pod = self._api.find(PODS, key)
        if pod is not None:
            self._recorder.record(PODS, pod, "Normal", "Scheduled", f"Successfully assigned {key} to {node_name}")
        return None

    def _report_unschedulable(self, key: str, message: str, now: datetime) -> None:
        pod = self._api.find(PODS, key)
        if pod is None:
            return
        reported = condition(pod, "PodScheduled")
        if reported and reported.get("message") == message and reported.get("reason") == "Unschedulable":
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
