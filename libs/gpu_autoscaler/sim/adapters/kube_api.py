"""Kubernetes as one process reaches it: `KubeApi` over the simulated cluster, with faults injected."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.kube.checkpoint_hooks import SECONDS_MAX, CheckpointHooks
from gpu_autoscaler.kube.protocol import (
    JOBS,
    NODES,
    PODS,
    PROVISIONING_REQUESTS,
    QUOTAS,
    Bookmark,
    Changed,
    Cluster,
    Conflict,
    Deleted,
    Eviction,
    Kind,
    Listed,
    NotFound,
    Patch,
    WatchItem,
)
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.kube.wire.provisioning import ProvisioningRequestStatus
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.sim.adapters.call_boundary import CallBoundary
from gpu_autoscaler.sim.cluster.controllers import GARBAGE_COLLECTED_SECONDS, Workloads
from gpu_autoscaler.sim.cluster.objects import Entry, Kubernetes, selected
from gpu_autoscaler.sim.cluster.replica_sets import ReplicaSets
from gpu_autoscaler.sim.invariants.observer import Observer
from gpu_autoscaler.simcluster.patch import merge

ObjectT = TypeVar("ObjectT", bound=core.Object)

BOOKMARK_SECONDS = 60.0  # the API server's own interval (KEP-956, read 2026-11-21)
STALE_SECONDS = 20.0  # entries of the history that a stale list lacks at most
CALL_SECONDS = RETRIED_SECONDS = 5.0  # while it is unavailable: timeout of a call, wait between two lists
BROKEN_SECONDS = (1.0, 60.0)  # until a broken watch is noticed and reopened


class SilentHooks(CheckpointHooks):
    """Checkpoint hooks of one process: every pod has one, and none answers in time."""

    def __init__(self, boundary: CallBoundary) -> None:
        super().__init__()
        self._boundary = boundary

    def notify(self, pods: Sequence[core.Pod], deadline_at: datetime) -> None:
        super().notify([_with_hook(pod) for pod in pods], deadline_at)

    async def _post(self, name: str, url: str, deadline_at: datetime) -> None:  # noqa: ARG002 - nobody reads it
        await self._boundary.sleep(SECONDS_MAX)


def _with_hook(pod: core.Pod) -> core.Pod:
    annotations = {**pod.metadata.annotations, labels.CHECKPOINT_HOOK: ":8080/checkpoint"}
    metadata, status = replace(pod.metadata, annotations=annotations), replace(pod.status, pod_ip="10.0.0.1")
    return replace(pod, metadata=metadata, status=status)


@dataclass(slots=True)
class WatchFaults:
    """Active faults of the watches of a run; set by the fault schedule."""

    breaks_count: int = 0  # a watch that sees it change breaks, and resumes where it stopped
    losses_count: int = 0  # a watch that sees it change lists again, as the history is lost
    is_away: bool = False  # the API server is unavailable


@dataclass(frozen=True, slots=True, eq=False)
class SimKube:
    """A KubeApi."""

    _boundary: CallBoundary
    _clock: Clock
    _identity: Cluster
    _workloads: Workloads
    _replica_sets: ReplicaSets
    _watch_faults: WatchFaults
    _observer: Observer

    @property
    def _cluster(self) -> Kubernetes:
        return self._workloads.cluster

    # ---- reading

    async def watch(self, kind: Kind[Any], *, label_selector: str = "") -> AsyncIterator[WatchItem]:
        cluster, boundary = self._cluster, self._boundary
        if not cluster.has(kind):
            yield Listed(kind=kind, objects=(), version=cluster.version, seen_at=self._clock.now())
            await asyncio.Event().wait()  # the kind has no objects
        history = cluster.history[kind.plural]
        signal = _ChangeSignal(cluster, kind.plural, boundary)
        at = await self._listed_count(len(history))
        while True:
            seen_at = self._clock.now()
            objects = cluster.as_of(kind, at) if at < len(history) else tuple(cluster.all(kind))
            version = cluster.version if at == len(history) else history[at - 1].object.version if at else 1
            yield Listed(
                kind=kind, objects=tuple(selected(list(objects), label_selector)), version=version, seen_at=seen_at
            )
            seen_breaks, seen_losses = self._watch_faults.breaks_count, self._watch_faults.losses_count
            while seen_losses == self._watch_faults.losses_count:
                if seen_breaks != self._watch_faults.breaks_count:
                    seen_breaks = self._watch_faults.breaks_count
                    await boundary.sleep(boundary.faults.seconds("watch_broken", *BROKEN_SECONDS))
                while at < len(history):
                    entry = history[at]
                    at += 1
                    if label_selector in entry.object.metadata.labels or not label_selector:
                        change = Deleted if entry.is_deleted else Changed
                        yield change(kind=kind, object=entry.object, seen_at=self._clock.now())
                        await boundary.continue_if_alive()
                has_changed = await signal.changed_within(BOOKMARK_SECONDS)
                if self._watch_faults.is_away:
                    await self._until_available()
                elif not has_changed:
                    yield Bookmark(kind=kind, version=cluster.version, seen_at=self._clock.now())
            await boundary.sleep(boundary.faults.seconds("watch_history_lost", *BROKEN_SECONDS))
            at = await self._listed_count(len(history))

    async def _listed_count(self, newest: int) -> int:
        """Return how many entries of the history a list shows: all, unless the API server is stale."""
        await self._boundary.continue_if_alive()
        await self._until_available()
        if not newest or not self._boundary.faults.strikes("list_stale", self._boundary.role):
            return newest
        return max(0, newest - int(self._boundary.faults.seconds("list_stale", 1, STALE_SECONDS)))

    async def _before_call(self) -> None:
        """Make a call. Raises TransientError where it does not arrive."""
        await self._boundary.before_call("kube_call_failed")
        if self._watch_faults.is_away:
            await self._boundary.sleep(CALL_SECONDS)
            raise TransientError("the API server is unavailable")

    async def _until_available(self) -> None:
        while self._watch_faults.is_away:
            await self._boundary.sleep(RETRIED_SECONDS)

    async def cluster(self) -> Cluster:
        await self._before_call()
        return self._identity

    async def get(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT:
        await self._before_call()
        return self._get(kind, namespace, name)

    async def serves(self, kind: Kind[Any]) -> bool:
        await self._before_call()
        return self._cluster.has(kind)

    async def pods_on(self, node_name: str) -> Sequence[core.Pod]:
        await self._before_call()
        return [pod for pod in self._cluster.all(PODS) if pod.spec.node_name == node_name]

    async def nodes_labeled(self, label_selector: str) -> Sequence[core.Node]:
        await self._before_call()
        key, _, value = label_selector.partition("=")
        return [node for node in self._cluster.all(NODES) if node.metadata.labels.get(key) == value]

    async def volumes_on(self, node_name: str) -> Sequence[str]:  # noqa: ARG002 - nothing is ever attached
        await self._before_call()
        return ()

    # ---- writing

    async def patch_node(self, name: str, patch: Mapping[str, Any]) -> core.Node:
        """Apply a merge patch to the node: its `unschedulable`, its finalizers, or its taints."""
        await self._before_call()
        node = self._get(NODES, "", name)
        self._check_uid(node, patch)
        if (finalizers := patch.get("metadata", {}).get("finalizers")) is not None:
            return await self._patch_finalizers(node, tuple(finalizers), patch["metadata"]["resourceVersion"])
        if (taints := (patch.get("spec") or {}).get("taints")) is not None:
            return await self._patch_taints(node, taints, patch["metadata"]["resourceVersion"])
        is_cordoned = bool((patch.get("spec") or {}).get("unschedulable"))
        if is_cordoned != node.spec.unschedulable:
            node = self._cluster.put(NODES, replace(node, spec=replace(node.spec, unschedulable=is_cordoned)))
        await self._boundary.after_call("kube_answer_lost")
        return node

    async def _patch_taints(self, node: core.Node, taints: Sequence[Mapping[str, str]], version: str) -> core.Node:
        """Patch taints at the resource version that was read."""
        if version != node.metadata.resource_version:
            raise Conflict(f"patch nodes {node.metadata.name}: it has changed")
        self._observer.taints_patched(node, [taint["key"] for taint in taints])
        tainted = replace(node.spec, taints=msgspec.convert(taints, tuple[core.WireTaint, ...]))
        kept = self._cluster.put(NODES, replace(node, spec=tainted))
        await self._boundary.after_call("kube_answer_lost")
        return kept

    async def _patch_finalizers(self, node: core.Node, finalizers: tuple[str, ...], version: str) -> core.Node:
        """Patch finalizers at the resource version that was read. Removing the last finalizer of a deleted node removes
        it.
        """
        if version != node.metadata.resource_version:
            raise Conflict(f"patch nodes {node.metadata.name}: it has changed")
        self._observer.finalizers_patched(node, finalizers)
        kept = self._cluster.put(NODES, replace(node, metadata=replace(node.metadata, finalizers=finalizers)))
        if kept.metadata.deletion_timestamp is not None and not finalizers:
            self._cluster.remove(NODES, kept)
        await self._boundary.after_call("kube_answer_lost")
        return kept

    async def delete_node(self, node: core.Node) -> bool:
        """Delete the node if it is unchanged; its pods are garbage-collected."""
        await self._before_call()
        current = self._cluster.current(NODES, node)
        is_same = current is not None and current.metadata.resource_version == node.metadata.resource_version
        if current is not None and is_same:
            self._observer.node_deleted(current)
            self._cluster.delete(NODES, current)
            self._workloads.loop.call_later(
                GARBAGE_COLLECTED_SECONDS, self._workloads.remove_node, current.metadata.name
            )
        await self._boundary.after_call("kube_answer_lost")
        return is_same

    async def annotate_pod(self, pod: core.Pod, annotations: Mapping[str, str]) -> bool:
        await self._before_call()
        current = self._cluster.current(PODS, pod)
        if current is not None:
            if self._boundary.role != "scheduler":  # its requests precede the end of a job's budget
                self._observer.pod_annotated(current, annotations)
            merged_annotations = {**current.metadata.annotations, **annotations}
            if merged_annotations != current.metadata.annotations:
                self._cluster.put(
                    PODS, replace(current, metadata=replace(current.metadata, annotations=merged_annotations))
                )
        await self._boundary.after_call("kube_answer_lost")
        return current is not None

    async def evict_pod(self, pod: core.Pod) -> Eviction:
        await self._before_call()
        current = self._cluster.current(PODS, pod)
        if current is None:
            return Eviction(answer="gone")
        self._observer.pod_disrupted(current, is_forced=False)
        answer = self._replica_sets.evict(current)
        await self._boundary.after_call("kube_answer_lost")
        return answer

    async def delete_pod(self, pod: core.Pod, *, grace_seconds: int) -> bool:
        await self._before_call()
        current = self._cluster.current(PODS, pod)
        if current is not None:
            self._observer.pod_disrupted(current, is_forced=True)
            self._workloads.disrupt(current, grace_seconds=max(1, grace_seconds))
        await self._boundary.after_call("kube_answer_lost")
        return current is not None

    async def make(self, kind: Kind[ObjectT], namespace: str, manifest: Mapping[str, Any]) -> ObjectT:
        await self._before_call()
        name = manifest["metadata"]["name"]
        if not self._cluster.has(kind):
            raise NotFound(f"create {kind.plural} {namespace}/{name}: {kind.crd} is not installed")
        if self._cluster.find(kind, namespace, name) is not None:
            raise Conflict(f"create {kind.plural} {namespace}/{name}: it exists")
        created: Any = self._create(kind, namespace, manifest)
        await self._boundary.after_call("kube_answer_lost")
        item: ObjectT = created
        return item

    async def change(
        self, kind: Kind[ObjectT], namespace: str, name: str, patch: Patch, *, subresource: str = ""
    ) -> ObjectT:
        """Apply a merge patch to a Job, to the spec of a ResourceQuota, or to the status of a ProvisioningRequest.

        Raises NotFound, Conflict.
        """
        await self._before_call()
        is_answer = kind is PROVISIONING_REQUESTS
        assert bool(subresource) == is_answer, "no other status is written"  # noqa: S101 - a bug of a service
        assert isinstance(patch, Mapping), "only other job kinds are changed by JSON patch"  # noqa: S101 - a bug of a service
        current: Any = self._get(kind, namespace, name)
        self._check_uid(current, patch)
        changed: Any
        if is_answer:
            if patch["metadata"]["resourceVersion"] != current.metadata.resource_version:
                raise Conflict(f"patch {kind.plural} {name}: it has changed")
            status = msgspec.convert(patch["status"], ProvisioningRequestStatus)
            changed = self._cluster.put(kind, replace(current, status=status))
        elif kind is QUOTAS:
            spec = merge(msgspec.to_builtins(current.spec), msgspec.to_builtins(patch["spec"]))
            changed = self._cluster.put(kind, replace(current, spec=msgspec.convert(spec, core.QuotaSpec)))
        else:
            manifest = merge(self._workloads.works[current.metadata.uid].manifest, msgspec.to_builtins(patch))
            changed = self._workloads.patch_job(current, manifest)
        await self._boundary.after_call("kube_answer_lost")
        item: ObjectT = changed
        return item

    async def remove(self, kind: Kind[Any], item: core.Object, *, is_last: bool = False) -> bool:  # noqa: ARG002 - pods are always deleted too
        await self._before_call()
        current = self._cluster.current(kind, item)
        if current is not None:
            self._workloads.delete_job(current)
        await self._boundary.after_call("kube_answer_lost")
        return current is not None

    async def close(self) -> None:
        """Nothing to close."""

    def _create(self, kind: Kind[Any], namespace: str, manifest: Mapping[str, Any]) -> core.Object:
        if kind is JOBS:
            return self._workloads.create_job(namespace, manifest)
        of_object = manifest["metadata"]
        owners = msgspec.convert(of_object.get("ownerReferences", ()), tuple[core.OwnerReference, ...])
        metadata = self._cluster.metadata(
            namespace, of_object["name"], owner_references=owners, labels=dict(of_object.get("labels", {}))
        )
        item = kind.type(metadata=metadata)
        if isinstance(item, core.ResourceQuota):
            item = replace(item, spec=msgspec.convert(manifest["spec"], core.QuotaSpec))
        created: core.Object = self._cluster.put(kind, item)
        return created

    def _get(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT:
        item = self._cluster.find(kind, namespace, name) if self._cluster.has(kind) else None
        if item is None:
            raise NotFound(f"{kind.plural} {namespace}/{name} not found")
        return item

    @staticmethod
    def _check_uid(item: core.Object, patch: Mapping[str, Any]) -> None:
        uid = (patch.get("metadata") or {}).get("uid")
        if uid is not None and uid != item.metadata.uid:
            raise Conflict(f"{item.metadata.name} is another object: uid {item.metadata.uid}, not {uid}")


class _ChangeSignal:
    """Signals changes of a kind."""

    def __init__(self, cluster: Kubernetes, plural: str, boundary: CallBoundary) -> None:
        self._plural = plural
        self._boundary = boundary
        self._waiting: asyncio.Future[bool] | None = None
        cluster.listen(self._on_change)

    async def changed_within(self, seconds: float) -> bool:
        """Wait for a change; False if none came in time."""
        self._waiting = self._boundary.loop.create_future()
        timer = self._boundary.loop.call_later(seconds, self._answer, False)
        has_changed = await self._waiting
        timer.cancel()
        await self._boundary.continue_if_alive()
        return has_changed

    def _on_change(self, plural: str, _: Entry) -> None:
        if plural == self._plural:
            self._answer(True)

    def _answer(self, has_changed: bool) -> None:  # noqa: FBT001 - a callback's argument
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(has_changed)
