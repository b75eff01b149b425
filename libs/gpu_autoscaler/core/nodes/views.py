"""Views of nodes: everything known of a node, from the decision to buy it until the cloud confirms its end.

A view is never stored. It is derived from the records of all streams, so it does not depend on the order of arrival.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import datetime
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from gpu_autoscaler.core.next_change import plain
from gpu_autoscaler.core.nodes.correlation import (
    INDEX,
    INDEX_FIELDS,
    Correlation,
    NodeRecords,
    RecordIndex,
    RecordKey,
    index_of,
    offered_gpus,
)
from gpu_autoscaler.core.nodes.lifecycle import BOOTING_PHASES, LEAVING_PHASES, NodePhase, is_counted, phase_of
from gpu_autoscaler.core.state.lineage import Changes, Derivation
from gpu_autoscaler.core.state.queries import counts_for_idleness, node_names_of, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, NoticeRecord, OrderRecord, Usable
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import NO_RESOURCES, Resources
from gpu_autoscaler.model.scheduling import Taint

PodsByNode = Mapping[str, tuple[PodObserved, ...]]
_NO_PODS: PodsByNode = {}


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node: order, instance, Kubernetes node, drain, notice and telemetry. None: unknown or not present."""

    name: str  # name of the node; before it registers, the action id or provider id
    phase: NodePhase
    is_ours: bool  # bought by a plan: only such nodes are removed
    is_counted: bool  # against limits and budgets: its end is not confirmed
    allocatable: Resources  # of the node once usable; until then as promised by the offer
    gpu_count: int  # bought, also if some are shared or not allocatable
    labels: Mapping[str, str]  # of the node; until it is usable also those promised
    taints: tuple[Taint, ...]
    pool: str | None = None
    node_uid: NodeUid | None = None
    provider_id: ProviderId | None = None
    action_id: ActionId | None = None  # the decision that bought it
    instance_type: str | None = None
    zone: str | None = None
    capacity_type: CapacityType | None = None
    gpu_model: str | None = None
    gpu_memory_bytes: int | None = None  # of one GPU
    price_micro_usd_per_hour: int | None = None
    expected_at: Instant | None = None  # expected time of use; None once usable
    usable_by: Instant | None = None  # boot deadline; None: unknown
    usable_since: Instant | None = None  # None: never
    empty_since: Instant | None = None  # None: it has workload pods, or was never usable
    reclaim_at: Instant | None = None  # earliest deadline of its notices; None: none, or unknown
    notice: NoticeRecord | None = None  # active notice with the earliest deadline
    order: OrderRecord | None = None
    instance: NodeInstanceObserved | None = None
    node: NodeObserved | None = None
    has_lost_node: bool = False  # its Kubernetes node was deleted
    drain: DrainRecord | None = None  # decided and not canceled
    telemetry: GpuNodeSummarized | None = None

    @property
    def is_booting(self) -> bool:
        """True from the decision until it is usable, before its deadline."""
        return self.phase in BOOTING_PHASES

    @property
    def is_owner_known(self) -> bool:
        """True if pool and project are known: from its purchase, or from the labels of its node."""
        return self.node is not None or (self.order is not None and self.order.purchase is not None)

    @property
    def is_usable(self) -> bool:
        """True if it accepts new pods now."""
        return self.phase is NodePhase.READY

    @property
    def is_schedulable(self) -> bool:
        """True if work may be planned on it: usable or booting, without an interruption notice."""
        return (self.is_usable or self.is_booting) and self.notice is None

    @property
    def is_leaving(self) -> bool:
        """True if a drain is decided or the instance is being terminated."""
        return self.phase in LEAVING_PHASES or self.drain is not None


V = TypeVar("V")
H = TypeVar("H", bound=Hashable)


def bin_key(view: NodeView) -> str:
    """Return `node/<uid>` once the node is registered, `action/<action id>` before."""
    return f"action/{view.action_id}" if view.node_uid is None else f"node/{view.node_uid}"


class Table(Protocol[V]):
    """Something about all nodes, which a changed view updates."""

    def build(self, nodes: "NodeIndex") -> V:
        """Return the table of all views."""

    def update(self, table: V, removed: Sequence[NodeView], added: Sequence[NodeView], nodes: "NodeIndex") -> V | None:
        """Return the table of the nodes from an earlier one; None: build it. The earlier one is not changed.

        A changed view, and one whose node's pods changed, is both removed and added.
        """


class _Stale(NamedTuple):
    """A table of earlier nodes, and how much was replaced since."""

    table: object
    steps_count: int
    views_count: int


_Step = tuple[tuple[NodeView, ...], tuple[NodeView, ...]]  # views that were removed, and those that were added


class NodeIndex(tuple[NodeView, ...]):  # noqa: SLOT001 - what is derived of the views stays with them
    """The views of all nodes, sorted by name. Iterating them costs the cluster; a table costs what changed since it
    was read last."""

    pods: PodsByNode  # unfinished, by node name
    _order: list[tuple[str, str, str, str]]
    _tables: dict[Table[Any], object]
    _stale: dict[Table[Any], _Stale]
    _steps: tuple[_Step, ...]  # the last ones, as many as a stale table is behind

    @classmethod
    def of(cls, views: Iterable[NodeView], pods: PodsByNode = _NO_PODS) -> "NodeIndex":
        """Return the views and the pods of their nodes."""
        ordered = sorted(views, key=_order_of)
        return cls._of(ordered, pods, [*map(_order_of, ordered)], {}, ())

    @classmethod
    def _of(
        cls,
        views: Iterable[NodeView],
        pods: PodsByNode,
        order: list[tuple[str, str, str, str]],
        stale: dict[Table[Any], _Stale],
        steps: tuple[_Step, ...],
    ) -> "NodeIndex":
        nodes = cls(views)
        vars(nodes).update(pods=pods, _order=order, _tables={}, _stale=stale, _steps=steps)
        return nodes

    def replaced(self, removed: Iterable[NodeView], added: Iterable[NodeView], pods: PodsByNode) -> "NodeIndex":
        """Return the index with other views in place of these."""
        out, into = tuple(removed), tuple(added)
        if not out and not into and pods is self.pods:
            return self
        views, order = list(self), list(self._order)
        for view in out:
            place = bisect_left(order, _order_of(view))
            del views[place], order[place]
        for view in into:
            place = bisect_left(order, key := _order_of(view))
            views.insert(place, view)
            order.insert(place, key)
        count = max(len(out), 1)
        stale = {table: _Stale(value, 1, count) for table, value in dict(self._tables).items()}
        for table, earlier in dict(self._stale).items():
            if earlier.views_count + count <= len(views) // 2 and table not in stale:
                stale[table] = _Stale(earlier.table, earlier.steps_count + 1, earlier.views_count + count)
        steps_count = max((table.steps_count for table in stale.values()), default=0)
        steps = (*self._steps, (out, into))
        return self._of(views, pods, order, stale, steps[len(steps) - steps_count :])

    def table(self, table: Table[V]) -> V:
        """Return the table of these views."""
        value = self._tables.get(table)
        if value is None:
            stale = self._stale.pop(table, None)
            if stale is not None:
                removed, added = _joined(self._steps[len(self._steps) - stale.steps_count :])
                value = table.update(cast("V", stale.table), removed, added, self)
            if value is None:
                value = table.build(self)
            self._tables[table] = value
        return cast("V", value)


def _joined(steps: Sequence[_Step]) -> tuple[Sequence[NodeView], Sequence[NodeView]]:
    """Return what all steps replaced: a view that was added and removed again is in neither."""
    removed: list[NodeView] = []
    added: dict[int, NodeView] = {}  # by identity
    for out, into in steps:
        removed += [view for view in out if added.pop(id(view), None) is None]
        added |= {id(view): view for view in into}
    return removed, [*added.values()]


def _order_of(view: NodeView) -> tuple[str, str, str, str]:
    return view.name, view.node_uid or "", view.action_id or "", view.provider_id or ""


def table_of(views: Sequence[NodeView], table: Table[V]) -> V:
    """Return the table of these views, which are an index or come from elsewhere."""
    return (views if isinstance(views, NodeIndex) else NodeIndex.of(views)).table(table)


class Selected(Table[tuple[NodeView, ...]]):
    """The few views that a predicate selects, in order."""

    def __init__(self, is_selected: Callable[[NodeView], bool]) -> None:
        """The predicate reads nothing but the view."""
        self._is_selected = is_selected

    def selects(self, view: NodeView, nodes: NodeIndex) -> bool:  # noqa: ARG002 - for what reads the pods of the node
        """Return True for a selected view; of the nodes only the pods of this one may be read."""
        return self._is_selected(view)

    def build(self, nodes: NodeIndex) -> tuple[NodeView, ...]:
        """Return the selected views."""
        return tuple(view for view in nodes if self.selects(view, nodes))

    def update(
        self, table: tuple[NodeView, ...], removed: Sequence[NodeView], added: Sequence[NodeView], nodes: NodeIndex
    ) -> tuple[NodeView, ...]:
        """Return the same table if the replaced views were and are not selected."""
        new = [view for view in added if self.selects(view, nodes)]
        out = {id(view) for view in removed}
        kept = [view for view in table if id(view) not in out] if table else []
        return table if not new and len(kept) == len(table) else tuple(sorted((*kept, *new), key=_order_of))


class Grouped(Table[Mapping[H, tuple[NodeView, ...]]], Generic[H]):
    """The views by keys that each of them has, in order; views without a key are in no group."""

    def __init__(self, keys_of: Callable[[NodeView], Iterable[H]]) -> None:
        """The keys read nothing but the view."""
        self._keys_of = keys_of

    def build(self, nodes: NodeIndex) -> Mapping[H, tuple[NodeView, ...]]:
        """Return the groups."""
        groups: dict[H, list[NodeView]] = {}
        for view in nodes:
            for key in self._keys_of(view):
                groups.setdefault(key, []).append(view)
        return {key: tuple(group) for key, group in groups.items()}

    def update(
        self,
        table: Mapping[H, tuple[NodeView, ...]],
        removed: Sequence[NodeView],
        added: Sequence[NodeView],
        _: NodeIndex,
    ) -> Mapping[H, tuple[NodeView, ...]]:
        """Return the same table if the replaced views are and were in no group."""
        out = {id(view) for view in removed}
        new: dict[H, list[NodeView]] = {key: [] for view in removed for key in self._keys_of(view)}
        for view in added:
            for key in self._keys_of(view):
                new.setdefault(key, []).append(view)
        if not new:
            return table
        groups = dict(table)
        for key, views in new.items():
            kept = [view for view in table.get(key, ()) if id(view) not in out]
            groups[key] = tuple(sorted((*kept, *views), key=_order_of))
            if not groups[key]:
                del groups[key]
        return groups


class Counted(Table[Mapping[H, int]], Generic[H]):
    """How many views have each value of a key, for keys of few values; None is not counted."""

    def __init__(self, key_of: Callable[[NodeView], H | None]) -> None:
        """The key reads nothing but the view."""
        self._key_of = key_of

    def build(self, nodes: NodeIndex) -> Mapping[H, int]:
        """Return the count by key."""
        counts = Counter(map(self._key_of, nodes))
        return {key: count for key, count in counts.items() if key is not None}

    def update(
        self, table: Mapping[H, int], removed: Sequence[NodeView], added: Sequence[NodeView], _: NodeIndex
    ) -> Mapping[H, int]:
        """Return the same table if the replaced views have the keys that they had."""
        changes = Counter(map(self._key_of, added))
        changes.subtract(map(self._key_of, removed))
        counts = {key: table.get(key, 0) + count for key, count in changes.items() if key is not None and count}
        return {key: count for key, count in {**table, **counts}.items() if count} if counts else table


_FIELDS = (
    *INDEX_FIELDS,
    "instances_seen_at",
    "instances_listed_at",
    "usable",
    "busy_until",
    "telemetry",
    "pods",
    "offers",
)


def node_views(state: ClusterState, as_of: datetime) -> NodeIndex:
    """Return every node that is planned, exists, or whose end is not confirmed, sorted by name.

    Each Kubernetes node, open order and managed instance has exactly one view. The result is the same object until a
    fact changes a node or a boot deadline passes; time has no other effect on views.
    """
    source = _SOURCE.of(state)
    return source.at(state, as_of, bisect_right(source.deadlines, as_of)).nodes


class _Views(NamedTuple):
    """The views at one instant."""

    at: datetime
    passed_count: int  # of deadlines
    by_key: Mapping[RecordKey, NodeView]
    nodes: NodeIndex


class _Source:
    """What views are made of, and the last views. Frozen but for these: only time changes them."""

    def __init__(self, state: ClusterState) -> None:
        self.index = index_of(state)
        self.all_pods, self.pods = state.pods, pods_by_node(state)
        correlation = Correlation(state, self.index)
        self.offered_gpus = correlation.offered_gpus
        self.missing = frozenset(key for key, records in self.index.by_key.items() if correlation.is_missing(records))
        self.dated = sorted(_dated(self.index.by_key.items()))
        self.deadlines = [at for at, _ in self.dated]
        names: dict[str, tuple[RecordKey, ...]] = {}
        for key, records in self.index.by_key.items():
            if records.node is not None:
                names[records.node.name] = (*names.get(records.node.name, ()), key)
        self.keys_by_name: Mapping[str, tuple[RecordKey, ...]] = names
        self.views: _Views | None = None

    def at(self, state: ClusterState, as_of: datetime, passed_count: int) -> _Views:
        """Return the views of this instant, when this many deadlines have passed."""
        before = self.views
        if before is not None and before.passed_count == passed_count:
            return before
        at = plain(as_of)
        if before is None:
            by_key = _views_of(self.index.by_key, self, state, at)
            self.views = _Views(at, passed_count, by_key, NodeIndex.of(by_key.values(), self.pods))
        else:
            first, end = sorted((before.passed_count, passed_count))
            keys = [key for _, key in self.dated[first:end]]
            self.views = self.replaced(before, keys, state, at, passed_count)
        return self.views

    def updated(self, state: ClusterState, changes: Changes) -> "_Source | None":
        """Return the source of the state, with the views of the last instant; None if too much has changed."""
        if "offers" in changes and offered_gpus(state.offers) != self.offered_gpus:
            return None
        now, keys = copy(self), set[RecordKey]()
        if not changes.keys().isdisjoint(INDEX_FIELDS):
            found = self.index.updated(state, changes)
            if found is None:
                return None
            now.index, of_records = found
            keys |= of_records
            INDEX.put(state, now.index)
            vars(now).update(_reindexed(self, now.index, of_records))
        now.all_pods, now.pods = state.pods, pods_by_node(state)
        keys |= {(0, uid) for field in ("usable", "telemetry") for uid in changes.get(field, ())}
        names = {*changes.get("busy_until", ()), *node_names_of(changes.get("pods", ()), self.all_pods, state.pods)}
        keys.update(key for name in names for key in now.keys_by_name.get(name, ()))
        now.missing = _missing_after(self.missing, now.index, state, keys, changes)
        keys |= now.missing ^ self.missing
        if self.views is not None:
            passed_count = bisect_right(now.deadlines, self.views.at)
            now.views = now.replaced(self.views, keys, state, self.views.at, passed_count)
        return now

    def replaced(
        self, before: _Views, keys: Iterable[RecordKey], state: ClusterState, at: datetime, passed_count: int
    ) -> _Views:
        """Return the views with those of these keys rebuilt."""
        made = _views_of(keys, self, state, at)
        removed = {key: view for key in keys if (view := before.by_key.get(key)) is not None}
        by_key = before.by_key
        if removed or made:
            kept = {**by_key, **made}
            for key in removed.keys() - made.keys():
                del kept[key]
            by_key = kept
        return _Views(at, passed_count, by_key, before.nodes.replaced(removed.values(), made.values(), self.pods))


_SOURCE = Derivation(_FIELDS, _Source, _Source.updated)


def _reindexed(source: _Source, index: RecordIndex, keys: Iterable[RecordKey]) -> dict[str, object]:
    """Return the deadlines and names of the source with those of these keys as in the index."""
    dated, deadlines, names = [*source.dated], [*source.deadlines], {**source.keys_by_name}
    old = [(key, records) for key in keys if (records := source.index.by_key.get(key)) is not None]
    new = [(key, records) for key in keys if (records := index.by_key.get(key)) is not None]
    for entry in _dated(old):
        place = bisect_left(dated, entry)
        del dated[place], deadlines[place]
    for entry in _dated(new):
        place = bisect_left(dated, entry)
        dated.insert(place, entry)
        deadlines.insert(place, entry[0])
    for key, records in old:
        if records.node is not None:
            others = tuple(other for other in names.pop(records.node.name) if other != key)
            names |= {records.node.name: others} if others else {}
    for key, records in new:
        if records.node is not None:
            names[records.node.name] = (*names.get(records.node.name, ()), key)
    return {"dated": dated, "deadlines": deadlines, "keys_by_name": names}


def _missing_after(
    before: frozenset[RecordKey],
    index: RecordIndex,
    state: ClusterState,
    changed: Iterable[RecordKey],
    changes: Changes,
) -> frozenset[RecordKey]:
    """Return the records whose instances are missing; a list of instances concerns all of them."""
    correlation, is_all = Correlation(state, index), "instances_listed_at" in changes
    seen: Iterable[ProviderId] = changes.get("instances_seen_at", ())
    keys = index.by_key.keys() if is_all else {*changed, *index.keys_of(seen)}
    missing = frozenset(key for key in keys if key in index.by_key and correlation.is_missing(index.by_key[key]))
    return missing if is_all else before.difference(keys) | missing


def _dated(records: Iterable[tuple[RecordKey, NodeRecords]]) -> Iterator[tuple[datetime, RecordKey]]:
    return ((at, key) for key, entry in records if (at := entry.deadline_at) is not None)


def _views_of(
    keys: Iterable[RecordKey], source: _Source, state: ClusterState, at: datetime
) -> dict[RecordKey, NodeView]:
    """Return the views of those records that have one at the instant."""
    correlation, index = Correlation(state, source.index), source.index
    views: dict[RecordKey, NodeView] = {}
    for key in keys:
        records = index.by_key.get(key)
        if records is None or (records.order is not None and not _may_have_view(records, index)):
            continue  # most orders are closed
        if (phase := phase_of(records, correlation, at)) is not NodePhase.GONE:
            views[key] = _view(records, phase, correlation, state)
    return views


def _may_have_view(records: NodeRecords, index: RecordIndex) -> bool:
    # A refused order with an existing instance is kept: the instance must be terminated.
    if is_counted(records, index):
        return True
    is_refused = records.order is not None and records.order.refused is not None
    return not is_refused and (records.node is not None or not index.is_closed(records))


def _view(records: NodeRecords, phase: NodePhase, correlation: Correlation, state: ClusterState) -> NodeView:
    node = records.node
    usable, notice = correlation.usable_of(records), correlation.notice_of(records)
    own_labels = {} if node is None else dict(node.labels)
    allocatable, taints = _capacity_of(records, is_usable=usable is not None)
    return NodeView(
        name=records.name,
        phase=phase,
        is_ours=records.action_id is not None,
        is_counted=is_counted(records, correlation.index),
        allocatable=allocatable,
        gpu_count=correlation.gpu_count_of(records),
        labels=own_labels if usable is not None else {**records.promised_labels, **own_labels},
        taints=taints,
        pool=(None if records.purchase is None else records.purchase.pool) or own_labels.get(labels.POOL),
        node_uid=None if node is None else node.node_uid,
        provider_id=records.provider_id,
        action_id=records.action_id,
        instance_type=records.instance_type,
        zone=records.zone,
        capacity_type=records.capacity_type,
        gpu_model=records.gpu_model,
        gpu_memory_bytes=records.gpu_memory_bytes,
        price_micro_usd_per_hour=records.price_micro_usd_per_hour,
        expected_at=None if usable is not None else records.expected_at,
        usable_by=records.deadline_at,
        usable_since=None if usable is None else usable.since,
        empty_since=_empty_since(node, usable, correlation, state),
        reclaim_at=None if notice is None else notice.notice.reclaim_at,
        notice=notice,
        order=records.order,
        instance=records.instance,
        node=node,
        has_lost_node=correlation.has_lost_node(records),
        drain=correlation.drain_of(records),
        telemetry=None if node is None else state.telemetry.get(node.node_uid),
    )


def _capacity_of(records: NodeRecords, *, is_usable: bool) -> tuple[Resources, tuple[Taint, ...]]:
    """Return resources and taints: of the node once usable; until then as promised, without startup taints."""
    own = (NO_RESOURCES, ()) if records.node is None else (records.node.allocatable, records.node.taints)
    if is_usable or records.promised is None:
        return own
    taints = records.promised_taints
    return records.promised, own[1] if taints is None else taints


def _empty_since(
    node: NodeObserved | None, usable: Usable | None, correlation: Correlation, state: ClusterState
) -> Instant | None:
    if node is None or usable is None:
        return None
    if any(counts_for_idleness(pod) for pod in correlation.pods.get(node.name, ())):
        return None
    return max(usable.since, state.busy_until.get(node.name, usable.since))
