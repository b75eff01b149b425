"""The pod watcher: watches in, facts out. Keeps nothing worth saving; its memory only avoids repeats."""

from collections.abc import AsyncIterator, Callable, Sequence
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
    PodWatched,
)
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import (
    BUDGETS,
    DEVICE_SLICES,
    NODES,
    PODS,
    Bookmark,
    Changed,
    Cluster,
    Deleted,
    Kind,
    KubeApi,
    Listed,
    WatchItem,
)
from gpu_autoscaler.kube.translate.budget import budget_gone, budget_observed
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
from gpu_autoscaler.kube.translate.progress import KINDS, RUNTIMES
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import NodeUid, PodUid
from gpu_autoscaler_services.pod_watcher.slices import Slices
from gpu_autoscaler_services.pod_watcher.surroundings import AROUND_KINDS, Surroundings

# Cluster time between two signs of life of a watch: often enough for any staleness limit, rare enough for the stream.
WATCHED_SECONDS = 10.0

log = structlog.get_logger()


class _Desk(msgspec.Struct):
    """One watched kind: how its objects become facts, and what was last said about each that lives."""

    observed: Callable[..., Versioned | None]  # None: there is nothing to be said of it yet
    gone: Callable[..., Versioned]
    alive: Callable[[tuple[str, ...], int, int, datetime], Versioned]  # uids, epoch, version, instant
    listed: Callable[[tuple[str, ...], int, int, datetime], Versioned]
    told: dict[str, Versioned | None] = {}  # by uid, without its version; None: it could not be understood
    alive_at: datetime | None = None


def _pod_listed(uids: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return PodListed(epoch=epoch, version=version, pod_uids=tuple(map(PodUid, uids)), listed_at=at)


def _pod_watched(_: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return PodWatched(epoch=epoch, version=version, watched_at=at)


def _node_listed(uids: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return NodeListed(epoch=epoch, version=version, node_uids=tuple(map(NodeUid, uids)), listed_at=at)


def _node_watched(_: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return NodeWatched(epoch=epoch, version=version, watched_at=at)


def _budget_listed(uids: tuple[str, ...], epoch: int, version: int, at: datetime) -> Versioned:
    return PodBudgetListed(epoch=epoch, version=version, budget_uids=uids, listed_at=at)


class PodWatcher:
    """Says what Kubernetes shows. Two of it say everything twice under the same ids, which is once."""

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
        NodeObserved,
        NodeGone,
        NodeListed,
        NodeWatched,
        JobStarted,
        JobListed,
        JobFinished,
    )
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = None

    def __init__(self, kube: KubeApi, cluster: Cluster) -> None:
        """`cluster` gives the epoch of all versions."""
        self._kube = kube
        self._epoch = cluster.epoch
        self._slices = Slices()
        self._desks = {
            PODS.plural: _Desk(observed=self._pod_observed, gone=pod_gone, listed=_pod_listed, alive=_pod_watched),
            NODES.plural: _Desk(
                observed=self._slices.observed, gone=node_gone, listed=_node_listed, alive=_node_watched
            ),
            # Budgets are few, and a whole list of them is as good a sign of life as any.
            BUDGETS.plural: _Desk(
                observed=budget_observed, gone=budget_gone, listed=_budget_listed, alive=_budget_listed
            ),
        }
        self._around = Surroundings()
        self._running: dict[str, set[str]] = {}  # by kind: uids of Jobs whose members all run, as last told
        # The last item of each kind and what it said: the runner asks again where the broker did not take it.
        self._last: dict[str, tuple[WatchItem, list[Fact]]] = {}

    def sources(self) -> Sequence[AsyncIterator[WatchItem]]:
        """One watch a kind; of Jobs and their like only those that the binder made."""
        kinds: tuple[Kind[Any], ...] = (PODS, NODES, BUDGETS, *AROUND_KINDS, DEVICE_SLICES)
        watched = [self._kube.watch(kind) for kind in kinds]
        return [*watched, *(self._kube.watch(kind, label_selector=labels.JOB_ID) for kind in KINDS.values())]

    async def on_item(self, item: WatchItem) -> Sequence[Fact]:
        """Return what the item says that was not said before; the same again for the same item."""
        last = self._last.get(item.kind.path())
        if last is not None and last[0] is item:
            return last[1]
        desk = self._desks.get(item.kind.plural)
        if desk is not None:
            facts = [*self._on_desk_item(desk, item), *self._sharing(desk, item)]
        elif self._around.is_about(item):
            pods = self._desks[PODS.plural]
            facts = [fact for pod in self._around.take(item) for fact in self._observe(pods, pod)]
        elif self._slices.is_about(item):
            nodes = self._desks[NODES.plural]
            facts = [fact for node in self._slices.take(item) for fact in self._observe(nodes, node)]
        else:
            facts = self._on_job_item(item)
        self._last[item.kind.path()] = (item, facts)
        return facts

    def _on_desk_item(self, desk: _Desk, item: WatchItem) -> list[Fact]:
        match item:
            case Listed():
                return self._on_listed(desk, item)
            case Changed():
                return [*self._observe(desk, item.object), *self._alive(desk, item.object.version, item.seen_at)]
            case Deleted():
                return [self._gone(desk, item.object), *self._alive(desk, item.object.version, item.seen_at)]
            case Bookmark():
                return self._alive(desk, item.version, item.seen_at)

    def _sharing(self, desk: _Desk, item: WatchItem) -> list[Fact]:
        """What a pod means for those that name the same claim of devices."""
        if item.kind is not PODS or not isinstance(item, Changed | Deleted) or not isinstance(item.object, wire.Pod):
            return []
        return [fact for pod in self._around.sharing(item.object) for fact in self._observe(desk, pod)]

    def _on_listed(self, desk: _Desk, item: Listed) -> list[Fact]:
        """Everything new in the list, then the list: whatever is not in it is gone."""
        uids = tuple(sorted(one.metadata.uid for one in item.objects))
        # Of a pod with surroundings something may have been said under a version of theirs, later than the list's, and
        # of a node with slices of devices.
        absent: Sequence[wire.Object] = ()
        if item.kind is PODS:
            self._around.meet(one for one in item.objects if isinstance(one, wire.Pod))
            absent = self._around.absent_from(frozenset(uids))
        elif item.kind is NODES:
            absent = self._slices.absent_from(frozenset(uids))
        ended = [self._gone(desk, thing, item.version) for thing in absent]
        desk.told = {uid: fact for uid, fact in desk.told.items() if uid in set(uids)}
        facts = [fact for one in item.objects for fact in self._observe(desk, one)]
        desk.alive_at = item.seen_at
        return [*facts, *ended, desk.listed(uids, self._epoch, item.version, item.seen_at)]

    def _gone(self, desk: _Desk, thing: wire.Object, version: int = 0) -> Versioned:
        """The object's end, at a version that nothing was said of it after."""
        uid = thing.metadata.uid
        desk.told.pop(uid, None)
        gone = desk.gone(thing, epoch=self._epoch)
        told = self._around.gone(uid) if isinstance(gone, PodGone) else self._slices.gone(uid)
        return msgspec.structs.replace(gone, version=max(gone.version, told, version))

    def _pod_observed(self, pod: wire.Pod, *, epoch: int) -> PodObserved | None:
        """The pod, None as long as nobody can say where it may run."""
        around = self._around.of(pod)
        return None if around is None else pod_observed(pod, epoch=epoch, around=around)

    def _observe(self, desk: _Desk, thing: wire.Object) -> list[Fact]:
        """The object as a fact, unless all that changed is what nobody reads (heartbeats, managed fields)."""
        uid = thing.metadata.uid
        try:
            fact = desk.observed(thing, epoch=self._epoch)
        except PermanentError as exc:
            if uid not in desk.told:  # once, not with each of its heartbeats
                log.warning(
                    "object not understood, decisions do not see it", object=thing.metadata.name, error=str(exc)
                )
            desk.told[uid] = None
            return []
        if fact is None:
            return []
        content = msgspec.structs.replace(fact, version=0)
        if desk.told.get(uid) == content:
            return []
        desk.told[uid] = content
        return [fact]

    def _alive(self, desk: _Desk, version: int, at: datetime) -> list[Fact]:
        """A sign of life, where the last one is old enough: events come in order, so each proves all before it."""
        if desk.alive_at is not None and at - desk.alive_at < timedelta(seconds=WATCHED_SECONDS):
            return []
        desk.alive_at = at
        return [desk.alive(tuple(sorted(desk.told)), self._epoch, version, at)]

    # ---- Jobs

    def _on_job_item(self, item: WatchItem) -> list[Fact]:
        match item:
            case Listed():
                return self._on_jobs_listed(item)
            case Changed():
                return self._job_facts(item.kind, item.object, item.seen_at)
            case Deleted():
                self._running_of(item.kind).discard(item.object.metadata.uid)
                return self._job_end(item.object, item.seen_at)
            case Bookmark():
                return []

    def _on_jobs_listed(self, item: Listed) -> list[Fact]:
        """What the list shows of each Job, then the list: what went while nobody watched is not in it."""
        running = self._running_of(item.kind)
        running &= {one.metadata.uid for one in item.objects}
        facts = [fact for one in item.objects for fact in self._job_facts(item.kind, one, item.seen_at)]
        listed = JobListed(
            epoch=self._epoch,
            version=item.version,
            job_ids=tuple(sorted(job_id for one in item.objects if (job_id := job_id_of(one)) is not None)),
            listed_at=item.seen_at,
            runtime=RUNTIMES[item.kind.path()],
        )
        return [*facts, listed]

    def _running_of(self, kind: Kind[Any]) -> set[str]:
        return self._running.setdefault(kind.path(), set())

    def _job_facts(self, kind: Kind[Any], job: wire.Object, seen_at: datetime) -> list[Fact]:
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
        return [] if was_running else [job_started(job, job_id, started_at=seen_at, epoch=self._epoch)]

    @staticmethod
    def _job_end(job: wire.Object, seen_at: datetime) -> list[Fact]:
        """A Job that was deleted ends its job. Where it had ended before, or the scheduler ended it, that stands:
        a job's end is one fact by id."""
        job_id = job_id_of(job)
        if job_id is None or is_taken_away(job):
            return []
        return [job_finished(job, job_id, seen_at=seen_at) or job_removed(job, job_id, seen_at=seen_at)]
