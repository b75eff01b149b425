"""Garbage: dependents of deleted owners, pods of vanished nodes, content of ended namespaces, old events.

Source: `pkg/controller/{garbagecollector,podgc,namespace}` of Kubernetes 1.36 (read 2026-11-21).
"""

from datetime import datetime, timedelta

from gpu_autoscaler.simcluster.api import FOREGROUND, ORPHAN, Api, DeleteOptions
from gpu_autoscaler.simcluster.controllers.kubelet import end_pod
from gpu_autoscaler.simcluster.controllers.protocol import Agenda
from gpu_autoscaler.simcluster.kinds import EVENTS, NAMESPACES, NODES, PODS, Kind
from gpu_autoscaler.simcluster.objects import Json, is_finished, is_terminating, key_of, mark_disrupted, moment_of
from gpu_autoscaler.simcluster.store import Change

ORPHAN_QUARANTINE_SECONDS = 40.0  # podgc's quarantineTime: the node may be late
EVENT_SECONDS_MAX = 3600.0  # kube-apiserver's --event-ttl
EVENT_SWEEP_SECONDS = 60.0
KILLED = 137  # 128 + 9: nobody asked the program to end


class Garbage:
    """Removes objects that nothing needs any more."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kinds = {kind.table: kind for kind in api.registry if not kind.storage}
        self._owners: dict[tuple[str, str], Json] = {}  # (table, key) -> owners deleted or being deleted
        self._namespaces: dict[str, None] = {}
        self._nodes_gone: Agenda[str] = Agenda()
        self._sweep_at: datetime | None = None

    def on_change(self, change: Change) -> None:
        key, item = change.record.key, change.record.object
        gone = change.type == "DELETED"
        if gone or is_terminating(item):
            if gone or {ORPHAN, FOREGROUND} & set(item["metadata"].get("finalizers") or ()):
                self._owners[change.table, key] = item
            if change.table == NAMESPACES.table and not gone:
                self._namespaces[key] = None
        if gone:
            namespace = item["metadata"].get("namespace")
            ending = self._api.find(NAMESPACES, namespace) if namespace else None
            if namespace and ending and is_terminating(ending):
                self._namespaces[namespace] = None
        self._note_lost_node(change, gone=gone)

    def _note_lost_node(self, change: Change, *, gone: bool) -> None:
        due = self._api.now() + timedelta(seconds=ORPHAN_QUARANTINE_SECONDS)
        if change.table == NODES.table and gone:
            self._nodes_gone.add(due, change.record.key)
        elif change.table == PODS.table and not gone:
            node_name = change.record.object["spec"].get("nodeName")
            was = change.previous.object["spec"].get("nodeName") if change.previous else None
            if node_name and node_name != was and self._api.find(NODES, node_name) is None:
                self._nodes_gone.add(due, node_name)

    def step(self, now: datetime) -> None:
        owners, self._owners = self._owners, {}
        for (table, key), item in owners.items():
            self._settle_dependents(self._kind_of(table), key, item)
        namespaces, self._namespaces = self._namespaces, {}
        for name in namespaces:
            self._empty_namespace(name)
        for node_name in self._nodes_gone.take_due(now):
            if self._api.find(NODES, node_name) is None:
                self._remove_lost_pods(node_name, now)
        if self._sweep_at is None or now >= self._sweep_at:
            self._sweep_at = now + timedelta(seconds=EVENT_SWEEP_SECONDS)
            self._sweep_events(now)

    def _kind_of(self, table: str) -> Kind:
        if table not in self._kinds:  # a custom kind that was added later
            self._kinds = {kind.table: kind for kind in self._api.registry if not kind.storage}
        return self._kinds[table]

    def _settle_dependents(self, kind: Kind, key: str, item: Json) -> None:
        """Delete or orphan the dependents of an owner, then release the owner."""
        uid, finalizers = item["metadata"]["uid"], item["metadata"].get("finalizers") or []
        orphan = ORPHAN in finalizers
        for dependent_kind in list(self._kinds.values()):
            for dependent in self._api.owned_by(dependent_kind, uid):
                dependent_key = key_of(dependent)
                if orphan:
                    self._api.modify(dependent_kind, dependent_key, lambda new: _disown(new, uid))
                elif not is_terminating(dependent):
                    self._api.delete(dependent_kind, dependent_key, DeleteOptions(propagation="Background"))
        left = any(self._api.owned_by(dependent_kind, uid) for dependent_kind in self._kinds.values())
        current = self._api.find(kind, key)
        if current is None or current["metadata"]["uid"] != uid:
            return
        if orphan or not left:
            self._api.modify(kind, key, _release_owner)
        else:
            self._owners[kind.table, key] = item  # foreground deletion: check again once they are gone

    def _empty_namespace(self, name: str) -> None:
        """Delete the namespace's content; once it is empty, the namespace itself."""
        left = False
        for kind in list(self._kinds.values()):
            for item in self._api.objects(kind, name) if kind.namespaced else ():
                left = True
                if not is_terminating(item):
                    self._api.delete(kind, key_of(item), DeleteOptions(propagation="Background"))
        if not left or not any(self._api.objects(kind, name) for kind in self._kinds.values() if kind.namespaced):
            self._api.modify(NAMESPACES, name, lambda new: new["spec"].update(finalizers=[]))

    def _remove_lost_pods(self, node_name: str, now: datetime) -> None:
        for pod in self._api.pods_on(node_name):
            key = key_of(pod)
            if not is_finished(pod):
                self._api.modify(PODS, key, lambda new: _mark_lost(new, now))
            self._api.delete(PODS, key, DeleteOptions(grace_seconds=0))

    def _sweep_events(self, now: datetime) -> None:
        oldest = now - timedelta(seconds=EVENT_SECONDS_MAX)
        for event in self._api.objects(EVENTS):
            last = event.get("lastTimestamp") or event["metadata"]["creationTimestamp"]
            if moment_of(last) < oldest:
                self._api.delete(EVENTS, key_of(event))


def _disown(item: Json, uid: str) -> None:
    owners = item["metadata"].get("ownerReferences") or []
    item["metadata"]["ownerReferences"] = [owner for owner in owners if owner["uid"] != uid]


def _release_owner(item: Json) -> None:
    kept = [name for name in item["metadata"].get("finalizers") or () if name not in (ORPHAN, FOREGROUND)]
    item["metadata"]["finalizers"] = kept


def _mark_lost(pod: Json, now: datetime) -> None:
    mark_disrupted(pod, now, "DeletionByPodGC", "PodGC: node no longer exists")
    end_pod(pod, now, KILLED)
