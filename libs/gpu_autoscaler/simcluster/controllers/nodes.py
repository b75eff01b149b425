"""Node lifecycle: taints that follow a node's state, heartbeats that stop, pods that must leave a dead node.

Source: `pkg/controller/nodelifecycle` and `pkg/controller/tainteviction` of Kubernetes 1.36; the grace period is
kube-controller-manager's `--node-monitor-grace-period` where heartbeats come as leases (read 2026-11-21).
"""

from datetime import datetime, timedelta

from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.controllers.filters import UNSCHEDULABLE_TAINT, toleration_matches
from gpu_autoscaler.simcluster.controllers.protocol import Agenda, Recorder
from gpu_autoscaler.simcluster.defaults import NOT_READY, UNREACHABLE
from gpu_autoscaler.simcluster.kinds import LEASES, NODES, PODS
from gpu_autoscaler.simcluster.objects import (
    Json,
    condition,
    is_terminating,
    key_of,
    mark_disrupted,
    set_condition,
    stamp,
)
from gpu_autoscaler.simcluster.store import Change

LEASE_NAMESPACE = "kube-node-lease"
HEARTBEAT_SECONDS_MAX = 40.0
MONITOR_SECONDS = 5.0  # --node-monitor-period

_LIFECYCLE_KEYS = frozenset({NOT_READY, UNREACHABLE, UNSCHEDULABLE_TAINT})


class NodeLifecycle:
    """Monitors heartbeats, writes taints, evicts by taint."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._recorder = Recorder(api, "node-controller")
        self._seen_at: dict[str, datetime] = {}
        self._changed: dict[str, None] = {}
        self._pods_bound: dict[str, None] = {}
        self._evictions: Agenda[tuple[str, str, str]] = Agenda()  # pod key, pod uid, node
        self._monitor_at: datetime | None = None

    def on_change(self, change: Change) -> None:
        key = change.record.key
        if change.table == LEASES.table and key.startswith(LEASE_NAMESPACE + "/") and change.type != "DELETED":
            self._seen_at[key.partition("/")[2]] = self._api.now()
        elif change.table == NODES.table:
            if change.type == "DELETED":
                self._seen_at.pop(key, None)
            else:
                if change.previous is None or _heartbeat(change.previous.object) != _heartbeat(change.record.object):
                    self._seen_at[key] = self._api.now()
                self._changed[key] = None
        elif change.table == PODS.table and change.type != "DELETED":
            was_bound = change.previous is not None and change.previous.object["spec"].get("nodeName")
            if not was_bound and change.record.object["spec"].get("nodeName"):
                self._pods_bound[key] = None

    def step(self, now: datetime) -> None:
        if self._monitor_at is None or now >= self._monitor_at:
            self._monitor_at = now + timedelta(seconds=MONITOR_SECONDS)
            self._find_silent(now)
        changed, self._changed = self._changed, {}
        for name in changed:
            self._sync_taints(name, now)
        bound, self._pods_bound = self._pods_bound, {}
        for key in bound:
            pod = self._api.find(PODS, key)
            node = self._api.find(NODES, pod["spec"]["nodeName"]) if pod else None
            if pod and node:
                self._plan_eviction(pod, node, now)
        for key, uid, node_name in self._evictions.take_due(now):
            self._evict(key, uid, node_name, now)

    def _find_silent(self, now: datetime) -> None:
        oldest = now - timedelta(seconds=HEARTBEAT_SECONDS_MAX)
        for name, seen_at in self._seen_at.items():
            node = self._api.find(NODES, name) if seen_at < oldest else None
            ready = condition(node, "Ready") if node else None
            if node is None or (ready and ready["status"] == "Unknown"):
                continue
            self._api.modify(NODES, name, lambda new: _mark_unknown(new, now))
            self._recorder.record(NODES, node, "Normal", "NodeNotReady", f"Node {name} status is now: NodeNotReady")

    def _sync_taints(self, name: str, now: datetime) -> None:
        node = self._api.find(NODES, name)
        if node is None:
            return
        spec = node.get("spec") or {}
        wanted = _wanted_taints(node)
        have = [taint for taint in spec.get("taints") or () if taint["key"] in _LIFECYCLE_KEYS]
        if {(taint["key"], taint["effect"]) for taint in have} != set(wanted):

            def write(new: Json) -> None:
                others = [taint for taint in spec.get("taints") or () if taint["key"] not in _LIFECYCLE_KEYS]
                kept = {(taint["key"], taint["effect"]): taint for taint in have}
                fresh = [
                    kept.get(entry) or {"key": entry[0], "effect": entry[1], "timeAdded": stamp(now)}
                    for entry in wanted
                ]
                new["spec"]["taints"] = others + fresh
                if not new["spec"]["taints"]:
                    del new["spec"]["taints"]

            self._api.modify(NODES, name, write)
        if any(effect == "NoExecute" for _, effect in wanted):
            current = self._api.find(NODES, name)
            for pod in self._api.pods_on(name) if current else ():
                self._plan_eviction(pod, current or {}, now)

    def _plan_eviction(self, pod: Json, node: Json, now: datetime) -> None:
        """Schedule the pod's eviction for when its tolerations of NoExecute taints end."""
        taints = [taint for taint in node["spec"].get("taints") or () if taint["effect"] == "NoExecute"]
        wait_seconds = _stay_seconds(pod["spec"].get("tolerations") or [], taints)
        if wait_seconds is not None and not is_terminating(pod):
            entry = (key_of(pod), pod["metadata"]["uid"], node["metadata"]["name"])
            self._evictions.add(now + timedelta(seconds=wait_seconds), entry)

    def _evict(self, key: str, uid: str, node_name: str, now: datetime) -> None:
        pod, node = self._api.find(PODS, key), self._api.find(NODES, node_name)
        if pod is None or node is None or pod["metadata"]["uid"] != uid or is_terminating(pod):
            return
        taints = [taint for taint in node["spec"].get("taints") or () if taint["effect"] == "NoExecute"]
        if _stay_seconds(pod["spec"].get("tolerations") or [], taints) is None:
            return  # the taint went away in time

        message = "Taint manager: deleting due to NoExecute taint"
        self._api.modify(PODS, key, lambda new: mark_disrupted(new, now, "DeletionByTaintManager", message))
        self._api.delete(PODS, key)


def _heartbeat(node: Json) -> tuple[object, object]:
    """Return the part of the node's status that its kubelet's heartbeat changes."""
    ready = condition(node, "Ready") or {}
    return ready.get("status"), ready.get("lastHeartbeatTime")


def _mark_unknown(node: Json, now: datetime) -> None:
    set_condition(
        node, now, "Ready", status="Unknown", reason="NodeStatusUnknown", message="Kubelet stopped posting node status."
    )


def _wanted_taints(node: Json) -> list[tuple[str, str]]:
    """Return the (key, effect) that a node's state requires."""
    ready = condition(node, "Ready")
    wanted: list[tuple[str, str]] = []
    if ready is None:
        wanted.append((NOT_READY, "NoSchedule"))
    elif ready["status"] == "False":
        wanted += [(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")]
    elif ready["status"] == "Unknown":
        wanted += [(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")]
    if node["spec"].get("unschedulable"):
        wanted.append((UNSCHEDULABLE_TAINT, "NoSchedule"))
    return wanted


def _stay_seconds(tolerations: list[Json], taints: list[Json]) -> float | None:
    """Return how long a pod may stay under these NoExecute taints: 0 at once, None for ever."""
    stays: list[float] = []
    for taint in taints:
        matching = [entry for entry in tolerations if toleration_matches(entry, taint)]
        if not matching:
            return 0.0
        stays += [float(entry["tolerationSeconds"]) for entry in matching if entry.get("tolerationSeconds") is not None]
    return min(stays) if stays else None
