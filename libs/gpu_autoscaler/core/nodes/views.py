"""What is known of each node, side by side, from the decision to buy it to the cloud's word that it is gone.

A view is never stored: it is computed from what each stream said (order, instance, Kubernetes node, drain), so it is
the same in whichever order the streams arrived. Its phase, and what counts as room: `core/nodes/lifecycle.py`.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from operator import attrgetter, is_
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.identity_cache import IdentityCache, cached_by_identity, changed_keys
from gpu_autoscaler.core.nodes.correlation import Correlation, NodeRecords, RecordIndex
from gpu_autoscaler.core.nodes.lifecycle import BOOTING_PHASES, LEAVING_PHASES, NodePhase, is_counted, phase_of
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, NoticeRecord, OrderRecord, Usable
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import NO_RESOURCES, Resources
from gpu_autoscaler.model.scheduling import Taint

# Nodes of which the streams speak, each with its phase at an instant. Read by `core/nodes/views.py` alone. Of
# a thousand nodes a fact says something of one: what is read of the others is kept for as long as it was read
# from the very same records (`core/identity_cache.py`).

# Nodes whose instances the cloud's lists have left out for too long, by provider id and the action that bought them.
Missing = frozenset[tuple[ProviderId | None, ActionId | None]]


class NodeRow(NamedTuple):
    """What a view is made of besides notices, pods and telemetry. The very same one while all of it is the same."""

    records: NodeRecords
    usable: Usable | None  # what was seen then, whatever had been promised
    phase: NodePhase
    is_counted: bool  # against limits and money
    drain: DrainRecord | None  # decided and not cancelled
    has_lost_node: bool
    name: str
    node_name: str | None  # None: not registered
    node_uid: NodeUid | None


class _Evidence(NamedTuple):
    """What is said beside a node's own records and may tell its phase. The very same while it says the same."""

    drains: Mapping[ActionId, DrainRecord]
    missing: Missing
    providers_without_node: frozenset[ProviderId]


class _Judged(NamedTuple):
    """A row, what it was read from besides itself, and on which side of its deadline."""

    evidence: _Evidence
    deadline_at: datetime | None
    is_late: bool
    row: NodeRow


_missing: IdentityCache[tuple[tuple[object, ...], Missing]] = IdentityCache(4)
_evidence: IdentityCache[_Evidence] = IdentityCache(4)
_judged: IdentityCache[_Judged] = IdentityCache(8192)
_row: IdentityCache[NodeRow] = IdentityCache(8192)
_rows: IdentityCache[tuple[tuple[object, ...], tuple[NodeRow, ...]]] = IdentityCache(4)


def rows_at(correlation: Correlation, state: ClusterState, as_of: datetime) -> tuple[NodeRow, ...]:
    """Return all that have a view at this instant, sorted by name; the very same tuple while nothing changes them."""
    gone = missing(correlation, state)
    read = (correlation.index, state.usable, gone)
    key = (*map(id, read), correlation.index.deadlines_passed_count(as_of))
    kept = _rows.get(key)
    if kept is None:
        evidence = _evidence_of(correlation.index, state, gone)
        rows = [_judge(records, correlation, evidence, as_of).row for records in _standing(correlation.index)]
        there = (row for row in rows if row.phase is not NodePhase.GONE)
        kept = (read, tuple(sorted(there, key=attrgetter("name"))))
        _rows.put(key, kept)
    return kept[1]


def missing(correlation: Correlation, state: ClusterState) -> Missing:
    """Return what lists have left out for too long. The very same until that changes, whatever else lists say: a list
    comes every few seconds, and most often says that all is as before."""
    read = (correlation.index, state.instances_seen_at, state.instances_listed_at)
    key = tuple(map(id, read))
    kept = _missing.get(key)
    if kept is None:
        found = (each for each in _standing(correlation.index) if correlation.is_missing(each))
        kept = (read, _same(frozenset((each.provider_id, each.action_id) for each in found)))
        _missing.put(key, kept)
    return kept[1]


@lru_cache(16)
def _same(found: Missing) -> Missing:
    """One object for all that are equal."""
    return found


def _evidence_of(index: RecordIndex, state: ClusterState, gone: Missing) -> _Evidence:
    now = _Evidence(state.drains, gone, index.providers_without_node)
    key = tuple(map(id, now[:2]))
    kept = _evidence.get(key)
    if kept is None or kept.providers_without_node != now.providers_without_node:
        kept = now
        _evidence.put(key, kept)
    return kept


def _judge(records: NodeRecords, correlation: Correlation, evidence: _Evidence, as_of: datetime) -> _Judged:
    """Look at a node; it is looked at again where the evidence changed_keys, or its deadline passed."""
    usable = None if records.node is None else correlation.usable_record(records.node.node_uid)
    key = (id(evidence), id(records), id(usable))
    kept = _judged.get(key)
    if kept is None or (kept.deadline_at is not None and kept.is_late != (as_of >= kept.deadline_at)):
        deadline_at = records.deadline_at
        is_late = deadline_at is not None and as_of >= deadline_at
        kept = _Judged(evidence, deadline_at, is_late, _row_of(records, usable, correlation, as_of))
        _judged.put(key, kept)
    return kept


def _row_of(records: NodeRecords, usable: Usable | None, correlation: Correlation, as_of: datetime) -> NodeRow:
    read = (
        records,
        usable,
        phase_of(records, correlation, as_of),
        is_counted(records, correlation.index),
        correlation.drain_of(records),
        correlation.has_lost_node(records),
    )
    key = tuple(map(id, read))
    kept = _row.get(key)
    if kept is None:
        name, uid = (None, None) if records.node is None else (records.node.name, records.node.node_uid)
        kept = NodeRow(*read, name=records.name, node_name=name, node_uid=uid)
        _row.put(key, kept)
    return kept


@cached_by_identity(8)
def _standing(index: RecordIndex) -> tuple[NodeRecords, ...]:
    """Those that may have a view at some instant. Most of what is remembered is closed for good."""
    # What was never ordered stands until its phase says that it is gone, which is kept.
    return tuple(records for records in index.records if records.order is None or _may_stand(records, index))


def _may_stand(records: NodeRecords, index: RecordIndex) -> bool:
    # A refused order whose instance exists all the same is kept: somebody has to end it.
    if is_counted(records, index):
        return True
    is_refused = records.order is not None and records.order.refused is not None
    return not is_refused and (records.node is not None or not index.is_closed(records))


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one node: order, instance, Kubernetes node, drain, notice and telemetry side by side.

    None means unknown, or that this part is not there (yet, or any more).
    """

    name: str  # the node's name; before it registers, the action id (or provider id) that it goes by
    phase: NodePhase
    is_ours: bool  # bought by a decision of ours: only those are ever removed
    is_counted: bool  # against limits and money: the cloud has not confirmed that it is gone or never was
    allocatable: Resources  # the node's own once it is usable; until then what the offer promises
    labels: Mapping[str, str]  # the node's own; before it is usable also those that it will carry
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
    expected_at: Instant | None = None  # when the order is expected to be usable; None once it is
    usable_by: Instant | None = None  # not usable by then: failed. None: no deadline is known
    usable_since: Instant | None = None  # None: never was
    empty_since: Instant | None = None  # None: pods that count are here, or it never was usable
    reclaim_at: Instant | None = None  # earliest deadline of its notices; None also for one without deadline
    notice: NoticeRecord | None = None  # the standing notice with the earliest deadline
    order: OrderRecord | None = None
    instance: NodeInstanceObserved | None = None
    node: NodeObserved | None = None
    has_lost_node: bool = False  # Kubernetes had a node of the instance, and has it no more
    drain: DrainRecord | None = None  # decided and not cancelled
    telemetry: GpuNodeSummarised | None = None

    @property
    def is_booting(self) -> bool:
        """True while it is on its way to being usable, before its deadline."""
        return self.phase in BOOTING_PHASES

    @property
    def is_usable(self) -> bool:
        """True when new pods can land on it now."""
        return self.phase is NodePhase.READY

    @property
    def is_schedulable(self) -> bool:
        """True when work may be planned onto it: usable or booting, and the cloud has not given notice."""
        return (self.is_usable or self.is_booting) and self.notice is None

    @property
    def is_leaving(self) -> bool:
        """True when a drain is decided or the instance is being ended."""
        return self.phase in LEAVING_PHASES or self.drain is not None


# All views, with what they were read from.
_pictures: IdentityCache[tuple[tuple[object, ...], tuple[NodeView, ...]]] = IdentityCache(2)


def node_views(state: ClusterState, as_of: datetime) -> tuple[NodeView, ...]:
    """Return every node that is planned, there, or not yet written off, sorted by name. What is gone has no view.

    Each Kubernetes node, each open order and each of our instances appears exactly once. It is the very same tuple
    until something is said of a node, or a deadline passes: all that time does to a view is in the deadlines.
    """
    correlation = Correlation(state)
    read = (*correlation.read(), missing(correlation, state))
    key = (*map(id, read), correlation.index.deadlines_passed_count(as_of))
    kept = _pictures.get(key)
    if kept is None:
        kept = (read, _views_at(correlation, state, as_of))
        _pictures.put(key, kept)
    return kept[1]


class _Drawn(NamedTuple):
    """The last views of the same rows."""

    rows: tuple[NodeRow, ...]
    pods: Mapping[str, object]
    busy_until: Mapping[str, object]
    telemetry: Mapping[NodeUid, object]
    views: tuple[NodeView, ...]


_drawn: IdentityCache[_Drawn] = IdentityCache(4)


def _views_at(correlation: Correlation, state: ClusterState, as_of: datetime) -> tuple[NodeView, ...]:
    """As above; of nodes of which nothing new was said the view is not even looked for."""
    rows = rows_at(correlation, state, as_of)
    last = _drawn.get((id(rows),))
    if last is None:
        views = tuple(_view_of(row, correlation, state) for row in rows)
    else:
        names = changed_keys(last.pods, correlation.pods) | changed_keys(last.busy_until, state.busy_until)
        uids = changed_keys(last.telemetry, state.telemetry)
        views = tuple(
            _view_of(row, correlation, state) if row.node_name in names or row.node_uid in uids else view
            for row, view in zip(rows, last.views, strict=True)
        )
        views = last.views if all(map(is_, views, last.views)) else views
    _drawn.put((id(rows),), _Drawn(rows, correlation.pods, state.busy_until, state.telemetry, views))
    return views


class _Read(NamedTuple):
    """A view, and all that it was read from."""

    read: tuple[object, ...]
    view: NodeView


_views: IdentityCache[_Read] = IdentityCache(8192)


def _view_of(row: NodeRow, correlation: Correlation, state: ClusterState) -> NodeView:
    """The view; the very same one while nothing that was said of the node has changed."""
    name, uid = row.node_name, row.node_uid
    read = (
        row,
        correlation.notice_of(row.records),
        None if name is None else correlation.pods.get(name),
        None if name is None else state.busy_until.get(name),
        None if uid is None else state.telemetry.get(uid),
    )
    key = tuple(map(id, read))
    kept = _views.get(key)
    if kept is None:
        kept = _Read(read, _view(row, correlation, state))
        _views.put(key, kept)
    return kept.view


def _view(row: NodeRow, correlation: Correlation, state: ClusterState) -> NodeView:
    records, phase, node = row.records, row.phase, row.records.node
    usable, notice = correlation.usable_of(records), correlation.notice_of(records)
    own_labels = {} if node is None else dict(node.labels)
    allocatable, taints = _room(records, is_usable=usable is not None)
    return NodeView(
        name=records.name,
        phase=phase,
        is_ours=records.action_id is not None,
        is_counted=row.is_counted,
        allocatable=allocatable,
        labels=own_labels if usable is not None else {**records.promised_labels, **own_labels},
        taints=taints,
        pool=records.pool or own_labels.get(labels.POOL),
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
        has_lost_node=row.has_lost_node,
        drain=row.drain,
        telemetry=None if node is None else state.telemetry.get(node.node_uid),
    )


def _room(records: NodeRecords, *, is_usable: bool) -> tuple[Resources, tuple[Taint, ...]]:
    """The node's own word once it was usable; until then the order's, as start-up taints and missing GPUs will pass."""
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
