"""The pod watcher: publishes the changes of Kubernetes watches. Its memory only avoids repeats."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

import msgspec
import structlog

from gpu_autoscaler.events.fact import Fact, Versioned
from gpu_autoscaler.events.job import JobFinished, JobListed, JobStarted
from gpu_autoscaler.events.node import NodeGone, NodeListed, NodeObserved, NodeWatched
from gpu_autoscaler.events.pod import (
    PodBudgetGone,
    PodBudgetListed,
    PodBudgetObserved,
    PodGone,
    PodListed,
    PodObserved,
    PodProvisioningGone,
    PodProvisioningListed,
    PodProvisioningObserved,
    PodQuotaGone,
    PodQuotaListed,
    PodQuotaObserved,
    PodWatched,
)
from gpu_autoscaler.kube.protocol import (
    BUDGETS,
    DEVICE_SLICES,
    NAMESPACES,
    NODES,
    PODS,
    PROVISIONING_REQUESTS,
    QUOTAS,
    Bookmark,
    Changed,
    Cluster,
    Deleted,
    Kind,
    KubeApi,
    Listed,
    WatchItem,
)
from gpu_autoscaler.kube.translate.job import (
    are_all_running,
    is_taken_away,
    job_finished,
    job_id_of,
    job_removed,
    job_started,
)
from gpu_autoscaler.kube.translate.node import node_gone
from gpu_autoscaler.kube.translate.pod import pod_gone, pod_observed
from gpu_autoscaler.kube.translate.provisioning import provisioning_gone
from gpu_autoscaler.kube.translate.related_objects import budget_gone, budget_observed, quota_gone, quota_observed
from gpu_autoscaler.kube.translate.workload_progress import KINDS, RUNTIMES
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import NodeUid, PodUid
from gpu_autoscaler_services.pod_watcher.device_slices import DeviceSlices
from gpu_autoscaler_services.pod_watcher.provisioning_requests import TEMPLATE_KINDS, ProvisioningRequests
from gpu_autoscaler_services.pod_watcher.related_objects import RELATED_KINDS, RelatedObjectsCache

# Cluster time between two heartbeats of a watch: more often than any staleness limit, rarely enough for the stream.
WATCHED_SECONDS = 10.0
# No decision depends on the age of the lists of budgets and quotas, and each of their heartbeats is a list.
BUDGETS_WATCHED_SECONDS = 300.0
# Each heartbeat of the pods names those that opt in.
OPTED_IN_COUNT_MAX = 256
# A list of 10,000 pods takes seconds: other tasks (probes, connections) run after this many objects, some milliseconds.
OBJECTS_PER_TURN = 50

log = structlog.get_logger()


class _WatchedKind(msgspec.Struct):
    """One watched kind: how its objects become facts, and the last fact of each object."""

    observed: Callable[..., Versioned | None]  # None: nothing to publish yet
    gone: Callable[..., Versioned]
    watched: Callable[[tuple[str, ...], int, int, datetime], Versioned]  # uids, epoch, version, instant
    listed: Callable[[tuple[str, ...], int, int, datetime], Versioned]
    watched_seconds: float = WATCHED_SECONDS  # between two heartbeats
    published: dict[str, Versioned | None] = {}  # by uid; None: it could not be decoded
    versions: dict[str, int] = {}  # by uid: of the object itself, which a fact may exceed
    last_list: Versioned | None = None
    watched_at: datetime | None = None


class _ItemWork(msgspec.Struct):
    """One item, the facts that it gave so far, and its objects that are yet to be read."""

    item: WatchItem
    parts: Iterator[list[Fact]]
    facts: list[Fact] = []


def _opts_in(namespace: core.Object) -> bool:
    return namespace.metadata.labels.get(labels.END_IDLE_WORKLOADS) == "true"


def _node_listed(uids: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return NodeListed(epoch=epoch, version=version, node_uids=tuple(map(NodeUid, uids)), listed_at=at)


def _node_watched(_: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return NodeWatched(epoch=epoch, version=version, watched_at=at)


def _budget_listed(uids: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return PodBudgetListed(epoch=epoch, version=version, budget_uids=uids, listed_at=at)


def _quota_listed(uids: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return PodQuotaListed(epoch=epoch, version=version, quota_uids=uids, listed_at=at)


def _provisioning_listed(uids: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return PodProvisioningListed(epoch=epoch, version=version, request_uids=uids, listed_at=at)


class PodWatcher:
    """Publishes what Kubernetes shows. Two concurrent pod watchers publish the same facts under the same ids."""

    name: ClassVar[str] = "pod_watcher"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = ()
    publishes: ClassVar[tuple[type[Fact], ...]] = (
        PodObserved,
        PodGone,
        PodListed,
        PodWatched,
        PodBudgetObserved,
        PodBudgetGone,
        PodBudgetListed,
        PodQuotaObserved,
        PodQuotaGone,
        PodQuotaListed,
        PodProvisioningObserved,
        PodProvisioningGone,
        PodProvisioningListed,
        NodeObserved,
        NodeGone,
        NodeListed,
        NodeWatched,
        JobStarted,
        JobListed,
        JobFinished,
    )
    resyncs: ClassVar[tuple[type[Fact], ...]] = (
        PodObserved,
        PodListed,
        PodBudgetObserved,
        PodBudgetListed,
        PodQuotaObserved,
        PodQuotaListed,
        PodProvisioningObserved,
        PodProvisioningListed,
        NodeObserved,
        NodeListed,
    )
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = None

    def __init__(
        self,
        kube: KubeApi,
        cluster: Cluster,
        *,
        are_quotas_watched: bool = False,
        are_provisioning_requests_served: bool = False,
        are_namespaces_watched: bool = False,
    ) -> None:
        """`cluster`: gives the epoch of all versions."""
        self._kube = kube
        self._epoch = cluster.epoch
        self._slices = DeviceSlices()
        self._kinds = {
            PODS.plural: _WatchedKind(
                observed=self._pod_observed, gone=pod_gone, listed=self._pod_listed, watched=self._pod_watched
            ),
            NODES.plural: _WatchedKind(
                observed=self._slices.observed, gone=node_gone, listed=_node_listed, watched=_node_watched
            ),
            # PodDisruptionBudgets are few: their list serves as the heartbeat.
            BUDGETS.plural: _WatchedKind(
                observed=budget_observed,
                gone=budget_gone,
                listed=_budget_listed,
                watched=_budget_listed,
                watched_seconds=BUDGETS_WATCHED_SECONDS,
            ),
        }
        if are_quotas_watched:
            self._kinds[QUOTAS.plural] = _WatchedKind(
                observed=quota_observed,
                gone=quota_gone,
                listed=_quota_listed,
                watched=_quota_listed,
                watched_seconds=BUDGETS_WATCHED_SECONDS,
            )
        self._related = RelatedObjectsCache()
        self._requests = ProvisioningRequests(self._related)
        if are_provisioning_requests_served:
            self._kinds[PROVISIONING_REQUESTS.plural] = _WatchedKind(
                observed=self._requests.observed,
                gone=provisioning_gone,
                listed=_provisioning_listed,
                watched=_provisioning_listed,
                watched_seconds=BUDGETS_WATCHED_SECONDS,
            )
        self._are_namespaces_watched = are_namespaces_watched
        self._opted_in: frozenset[str] | None = None  # namespaces by label; None: not listed
        self._running: dict[str, set[str]] = {}  # by kind: uids of Jobs whose members all run, as last published
        # The last item of each kind: the runner repeats an item that the broker did not take, or that took too long.
        self._last: dict[str, _ItemWork] = {}

    def living(self) -> Iterator[Fact]:
        """Yield the last fact of each object, and the last list of each kind."""
        for kind in self._kinds.values():
            yield from filter(None, tuple(kind.published.values()))
            if kind.last_list is not None:
                yield kind.last_list

    def sources(self) -> Sequence[AsyncIterator[WatchItem]]:
        """Return one watch per kind; of job kinds only the objects that the binder created."""
        quotas = (QUOTAS,) if QUOTAS.plural in self._kinds else ()
        requests = (*TEMPLATE_KINDS, PROVISIONING_REQUESTS) if PROVISIONING_REQUESTS.plural in self._kinds else ()
        kinds: tuple[Kind[Any], ...] = (PODS, NODES, BUDGETS, *quotas, *requests, *RELATED_KINDS, DEVICE_SLICES)
        watched = [self._kube.watch(kind) for kind in kinds]
        if self._are_namespaces_watched:
            watched.append(self._kube.watch(NAMESPACES, label_selector=labels.END_IDLE_WORKLOADS))
        return [*watched, *(self._kube.watch(kind, label_selector=labels.JOB_ID) for kind in KINDS.values())]

    async def on_item(self, item: WatchItem) -> Sequence[Fact]:
        """Return the new facts of the item; the same facts again if the same item is repeated.

        Other tasks run between the objects of a list. If the call is canceled, the next one continues with the item.
        """
        path = item.kind.path()
        work = self._last.get(path)
        if work is None or work.item is not item:
            work = self._last[path] = _ItemWork(item=item, parts=self._parts(item))
        try:
            for number, facts in enumerate(work.parts, 1):
                work.facts += facts
                if number % OBJECTS_PER_TURN == 0:
                    await asyncio.sleep(0)
        except Exception:
            del self._last[path]
            raise
        return work.facts

    def _parts(self, item: WatchItem) -> Iterator[list[Fact]]:
        """Yield the facts of one object after the other."""
        kind = self._kinds.get(item.kind.plural)
        if kind is not None:
            yield from self._facts_of(kind, item)
            yield from self._claim_sharers(kind, item)
        elif item.kind is NAMESPACES:
            self._take_namespaces(item)
        elif self._related.is_about(item):
            pods, uids = self._related.take(item)
            yield from (self._observe(self._kinds[PODS.plural], pod) for pod in pods)
            for request in self._requests.named(uids):
                yield self._observe(self._kinds[PROVISIONING_REQUESTS.plural], request)
        elif self._slices.is_about(item):
            nodes = self._kinds[NODES.plural]
            yield from (self._observe(nodes, node) for node in self._slices.take(item))
        elif self._requests.is_about(item):
            served = self._kinds[PROVISIONING_REQUESTS.plural]
            yield from (self._observe(served, request) for request in self._requests.take(item))
        else:
            yield from self._on_job_item(item)

    def _facts_of(self, kind: _WatchedKind, item: WatchItem) -> Iterator[list[Fact]]:
        match item:
            case Listed():
                yield from self._on_listed(kind, item)
            case Changed():
                yield self._observe(kind, item.object)
                yield self._heartbeat(kind, item.object.version, item.seen_at)
            case Deleted():
                yield [self._gone(kind, item.object)]
                yield self._heartbeat(kind, item.object.version, item.seen_at)
            case Bookmark():
                yield self._heartbeat(kind, item.version, item.seen_at)

    def _claim_sharers(self, kind: _WatchedKind, item: WatchItem) -> Iterator[list[Fact]]:
        """Yield the changes of pods that share a device claim with this one."""
        if item.kind is not PODS or not isinstance(item, Changed | Deleted) or not isinstance(item.object, core.Pod):
            return
        yield from (self._observe(kind, pod) for pod in self._related.sharing(item.object))

    def _on_listed(self, kind: _WatchedKind, item: Listed) -> Iterator[list[Fact]]:
        """Yield what is new in the list, then the list: objects that are not in it are gone."""
        uids = tuple(sorted(obj.metadata.uid for obj in item.objects))
        present = frozenset(uids)
        # The last fact of a pod with related objects, or of a node with slices, may have a later version than the list:
        # its end is published explicitly.
        absent: Sequence[core.Object] = ()
        if item.kind is PODS:
            absent = self._related.absent_from(present)
        elif item.kind is NODES:
            absent = self._slices.absent_from(present)
        elif item.kind is PROVISIONING_REQUESTS:
            absent = self._requests.absent_from(present)
        ended: list[Fact] = [self._gone(kind, missing, item.version) for missing in absent]
        for obj in item.objects:
            if isinstance(obj, core.Pod):
                self._related.meet(obj)
                yield []
        kind.published = {uid: fact for uid, fact in kind.published.items() if uid in present}
        kind.versions = {uid: version for uid, version in kind.versions.items() if uid in present}
        yield from (self._observe(kind, obj) for obj in item.objects)
        kind.watched_at = item.seen_at
        kind.last_list = kind.listed(uids, self._epoch, item.version, item.seen_at)
        yield [*ended, kind.last_list]

    def _gone(self, kind: _WatchedKind, obj: core.Object, version: int = 0) -> Versioned:
        """Return the object's end, at a version not before its last fact."""
        uid = obj.metadata.uid
        last = kind.published.pop(uid, None)
        kind.versions.pop(uid, None)
        gone = kind.gone(obj, epoch=self._epoch)
        match gone:
            case PodGone():
                last_version = self._related.gone(uid)
            case PodProvisioningGone():
                last_version = self._requests.gone(uid)
            case _:
                last_version = self._slices.gone(uid)
        if last is not None:
            last_version = max(last_version, last.version)
        return msgspec.structs.replace(gone, version=max(gone.version, last_version, version))

    def _pod_observed(self, pod: core.Pod, *, epoch: int) -> PodObserved | None:
        """Return the pod; None while it is unknown where it may run."""
        related = self._related.of(pod)
        return None if related is None else pod_observed(pod, epoch=epoch, related=related)

    def _pod_listed(self, uids: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
        pod_uids = tuple(map(PodUid, uids))
        return PodListed(
            epoch=epoch, version=version, pod_uids=pod_uids, listed_at=at, opted_in_namespaces=self._namespaces()
        )

    def _pod_watched(self, _: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
        return PodWatched(epoch=epoch, version=version, watched_at=at, opted_in_namespaces=self._namespaces())

    def _namespaces(self) -> tuple[str, ...] | None:
        """Return the first namespaces that opt in, by name; None: unknown."""
        return None if self._opted_in is None else tuple(sorted(self._opted_in)[:OPTED_IN_COUNT_MAX])

    def _take_namespaces(self, item: WatchItem) -> None:
        """Apply a change of the namespaces with the label; the next event of a pod publishes them."""
        before = self._opted_in
        match item:
            case Listed():
                self._opted_in = frozenset(found.metadata.name for found in item.objects if _opts_in(found))
            case Changed(object=found) if _opts_in(found):
                self._opted_in = (before or frozenset()) | {found.metadata.name}
            case Changed(object=found) | Deleted(object=found):
                self._opted_in = (before or frozenset()) - {found.metadata.name}
        if self._opted_in == before:
            return
        self._kinds[PODS.plural].watched_at = None
        if len(self._opted_in or ()) > OPTED_IN_COUNT_MAX:
            count = len(self._opted_in or ()) - OPTED_IN_COUNT_MAX
            log.warning("namespaces ignored, too many opted in", label=labels.END_IDLE_WORKLOADS, count=count)

    def _observe(self, kind: _WatchedKind, obj: core.Object) -> list[Fact]:
        """Return the object as a fact, unless only fields changed that no fact has (heartbeats, managed fields)."""
        uid = obj.metadata.uid
        try:
            fact = kind.observed(obj, epoch=self._epoch)
        except PermanentError as exc:
            if uid not in kind.published:  # once, not with each heartbeat
                log.warning("object ignored, not decodable", object=obj.metadata.name, error=str(exc))
            kind.published[uid] = None
            return []
        if fact is None:
            return []
        if fact.version < kind.versions.get(uid, 0):
            return []  # a list from a server that lags behind: its watch shows again what this one has seen
        kind.versions[uid] = fact.version
        known = kind.published.get(uid)
        if known is not None:
            if msgspec.structs.replace(known, version=fact.version) == fact:
                return []
            if fact.version <= known.version:
                # The watches of related kinds are not in step: one shows late what another is long past.
                fact = msgspec.structs.replace(fact, version=known.version + 1)
        kind.published[uid] = fact
        return [fact]

    def _heartbeat(self, kind: _WatchedKind, version: int, at: datetime) -> list[Fact]:
        """Return a heartbeat if the last one is old enough: events are ordered, so each proves all before it."""
        if kind.watched_at is not None and at - kind.watched_at < timedelta(seconds=kind.watched_seconds):
            return []
        kind.watched_at = at
        return [kind.watched(tuple(sorted(kind.published)), self._epoch, version, at)]

    # ---- Jobs

    def _on_job_item(self, item: WatchItem) -> Iterator[list[Fact]]:
        match item:
            case Listed():
                yield from self._on_jobs_listed(item)
            case Changed():
                yield self._job_facts(item.kind, item.object, item.seen_at, is_first=False)
            case Deleted():
                self._running_of(item.kind).discard(item.object.metadata.uid)
                yield self._job_end(item.object, item.seen_at)

    def _on_jobs_listed(self, item: Listed) -> Iterator[list[Fact]]:
        """Yield the facts of each Job, then the list: Jobs deleted while unwatched are not in it."""
        is_first = item.kind.path() not in self._running
        running = self._running_of(item.kind)
        running &= {obj.metadata.uid for obj in item.objects}
        yield from (self._job_facts(item.kind, obj, item.seen_at, is_first=is_first) for obj in item.objects)
        listed = JobListed(
            epoch=self._epoch,
            version=item.version,
            job_ids=tuple(sorted(job_id for obj in item.objects if (job_id := job_id_of(obj)) is not None)),
            listed_at=item.seen_at,
            runtime=RUNTIMES[item.kind.path()],
        )
        yield [listed]

    def _running_of(self, kind: Kind[Any]) -> set[str]:
        return self._running.setdefault(kind.path(), set())

    def _job_facts(self, kind: Kind[Any], job: core.Object, seen_at: datetime, *, is_first: bool) -> list[Fact]:
        job_id = job_id_of(job)
        if job_id is None or is_taken_away(job):
            return []
        if (end := job_finished(job, job_id, seen_at=seen_at)) is not None:
            return [end]
        uid, running = job.metadata.uid, self._running_of(kind)
        was_running = uid in running
        if not are_all_running(job):
            running.discard(uid)
            return []
        running.add(uid)
        if was_running:
            return []
        return [job_started(job, job_id, started_at=seen_at, epoch=self._epoch, is_found_running=is_first)]

    @staticmethod
    def _job_end(job: core.Object, seen_at: datetime) -> list[Fact]:
        """Return the end of a job whose Job was deleted. An earlier end counts: a job's end is one fact by id."""
        job_id = job_id_of(job)
        if job_id is None or is_taken_away(job):
            return []
        return [job_finished(job, job_id, seen_at=seen_at) or job_removed(job, job_id, seen_at=seen_at)]
