"""Views of nodes: everything known of a node, from the decision to buy it until the cloud confirms its end.

A view is never stored. It is derived from the records of all streams, so it does not depend on the order of arrival.
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
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import NO_RESOURCES, Resources
from gpu_autoscaler.model.scheduling import Taint

# A fact concerns one of a thousand nodes: results of the others are cached by the identity of their records
# (`core/identity_cache.py`).

# Nodes whose instances are missing from the lists of the cloud, by provider id and action.
Missing = frozenset[tuple[ProviderId | None, ActionId | None]]


class NodeRow(NamedTuple):
    """Source of a view besides notices, pods and telemetry. The same object while nothing in it changes."""

    records: NodeRecords
    usable: Usable | None  # GPUs seen, whatever was promised
    phase: NodePhase
    is_counted: bool  # against limits and budgets
    drain: DrainRecord | None  # decided and not canceled
    has_lost_node: bool
    name: str
    node_name: str | None  # None: not registered
    node_uid: NodeUid | None


class _Evidence(NamedTuple):
    """Inputs of a phase besides the records of the node. The same object while nothing in it changes."""

    drains: Mapping[ActionId, DrainRecord]
    missing: Missing
    providers_without_node: frozenset[ProviderId]


class _PhaseEntry(NamedTuple):
    """A row with its inputs, and whether its deadline has passed."""

    evidence: _Evidence
    deadline_at: datetime | None
    is_late: bool
    row: NodeRow


_missing: IdentityCache[tuple[tuple[object, ...], Missing]] = IdentityCache(4)
_evidence: IdentityCache[_Evidence] = IdentityCache(4)
_phase_entries: IdentityCache[_PhaseEntry] = IdentityCache(8192)
_row: IdentityCache[NodeRow] = IdentityCache(8192)
_rows: IdentityCache[tuple[tuple[object, ...], tuple[NodeRow, ...]]] = IdentityCache(4)


def rows_at(correlation: Correlation, state: ClusterState, as_of: datetime) -> tuple[NodeRow, ...]:
    """Return the rows of all nodes with a view, sorted by name; the same tuple while nothing changes."""
    gone = missing_instances(correlation, state)
    read = (correlation.index, state.usable, gone)
    key = (*map(id, read), correlation.index.deadlines_passed_count(as_of))
    kept = _rows.get(key)
    if kept is None:
        evidence = _evidence_of(correlation.index, state, gone)
        rows = [_phase_entry(records, correlation, evidence, as_of).row for records in _candidates(correlation.index)]
        there = (row for row in rows if row.phase is not NodePhase.GONE)
        kept = (read, tuple(sorted(there, key=attrgetter("name"))))
        _rows.put(key, kept)
    return kept[1]


def missing_instances(correlation: Correlation, state: ClusterState) -> Missing:
    """Return instances missing from lists for too long. The same object while nothing changes: lists arrive every few
    seconds and rarely differ."""
    read = (correlation.index, state.instances_seen_at, state.instances_listed_at)
    key = tuple(map(id, read))
    kept = _missing.get(key)
    if kept is None:
        absent = (records for records in _candidates(correlation.index) if correlation.is_missing(records))
        kept = (read, _same(frozenset((records.provider_id, records.action_id) for records in absent)))
        _missing.put(key, kept)
    return kept[1]


@lru_cache(16)
def _same(missing: Missing) -> Missing:
    """Return one object for equal values."""
    return missing


def _evidence_of(index: RecordIndex, state: ClusterState, gone: Missing) -> _Evidence:
    now = _Evidence(state.drains, gone, index.providers_without_node)
    key = tuple(map(id, now[:2]))
    kept = _evidence.get(key)
    if kept is None or kept.providers_without_node != now.providers_without_node:
        kept = now
        _evidence.put(key, kept)
    return kept


def _phase_entry(records: NodeRecords, correlation: Correlation, evidence: _Evidence, as_of: datetime) -> _PhaseEntry:
    """Return the cached entry unless the evidence changed or the deadline passed."""
    usable = None if records.node is None else correlation.usable_record(records.node.node_uid)
    key = (id(evidence), id(records), id(usable))
    kept = _phase_entries.get(key)
    if kept is None or (kept.deadline_at is not None and kept.is_late != (as_of >= kept.deadline_at)):
        deadline_at = records.deadline_at
        is_late = deadline_at is not None and as_of >= deadline_at
        kept = _PhaseEntry(evidence, deadline_at, is_late, _row_of(records, usable, correlation, as_of))
        _phase_entries.put(key, kept)
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
def _candidates(index: RecordIndex) -> tuple[NodeRecords, ...]:
    """Records that may have a view at some instant. Most records are closed."""
    # Records without an order are filtered by their phase, which is cached.
    return tuple(records for records in index.records if records.order is None or _may_have_view(records, index))


def _may_have_view(records: NodeRecords, index: RecordIndex) -> bool:
    # A refused order with an existing instance is kept: the instance must be terminated.
    if is_counted(records, index):
        return True
    is_refused = records.order is not None and records.order.refused is not None
    return not is_refused and (records.node is not None or not index.is_closed(records))


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


# All views, with their inputs.
_all_views: IdentityCache[tuple[tuple[object, ...], tuple[NodeView, ...]]] = IdentityCache(2)


def node_views(state: ClusterState, as_of: datetime) -> tuple[NodeView, ...]:
    """Return every node that is planned, exists, or whose end is not confirmed, sorted by name.

    Each Kubernetes node, open order and managed instance has exactly one view. The result is the same tuple until a
    fact changes a node or a boot deadline passes; time has no other effect on views.
    """
    correlation = Correlation(state)
    read = (*correlation.inputs(), missing_instances(correlation, state))
    key = (*map(id, read), correlation.index.deadlines_passed_count(as_of))
    kept = _all_views.get(key)
    if kept is None:
        kept = (read, _views_at(correlation, state, as_of))
        _all_views.put(key, kept)
    return kept[1]


class _LastViews(NamedTuple):
    rows: tuple[NodeRow, ...]
    pods: Mapping[str, object]
    busy_until: Mapping[str, object]
    telemetry: Mapping[NodeUid, object]
    offered_gpus: Mapping[str, int]
    views: tuple[NodeView, ...]


_last_views: IdentityCache[_LastViews] = IdentityCache(4)


def _views_at(correlation: Correlation, state: ClusterState, as_of: datetime) -> tuple[NodeView, ...]:
    """Like `node_views`; views of unchanged nodes are not looked up again."""
    rows = rows_at(correlation, state, as_of)
    last = _last_views.get((id(rows),))
    if last is None or last.offered_gpus is not correlation.offered_gpus:
        views = tuple(_view_of(row, correlation, state) for row in rows)
    else:
        names = changed_keys(last.pods, correlation.pods) | changed_keys(last.busy_until, state.busy_until)
        uids = changed_keys(last.telemetry, state.telemetry)
        views = tuple(
            _view_of(row, correlation, state) if row.node_name in names or row.node_uid in uids else view
            for row, view in zip(rows, last.views, strict=True)
        )
    if last is not None and all(map(is_, views, last.views)):
        views = last.views
    _last_views.put(
        (id(rows),),
        _LastViews(rows, correlation.pods, state.busy_until, state.telemetry, correlation.offered_gpus, views),
    )
    return views


class _CachedView(NamedTuple):
    read: tuple[object, ...]
    view: NodeView


_views: IdentityCache[_CachedView] = IdentityCache(8192)


def _view_of(row: NodeRow, correlation: Correlation, state: ClusterState) -> NodeView:
    """Return the view; the same object while its inputs are unchanged."""
    name, uid = row.node_name, row.node_uid
    read = (
        row,
        correlation.notice_of(row.records),
        None if name is None else correlation.pods.get(name),
        None if name is None else state.busy_until.get(name),
        None if uid is None else state.telemetry.get(uid),
        None if row.records.purchase is not None else correlation.offered_gpus,
    )
    key = tuple(map(id, read))
    kept = _views.get(key)
    if kept is None:
        kept = _CachedView(read, _view(row, correlation, state))
        _views.put(key, kept)
    return kept.view


def _view(row: NodeRow, correlation: Correlation, state: ClusterState) -> NodeView:
    records, phase, node = row.records, row.phase, row.records.node
    usable, notice = correlation.usable_of(records), correlation.notice_of(records)
    own_labels = {} if node is None else dict(node.labels)
    allocatable, taints = _capacity_of(records, is_usable=usable is not None)
    return NodeView(
        name=records.name,
        phase=phase,
        is_ours=records.action_id is not None,
        is_counted=row.is_counted,
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
        has_lost_node=row.has_lost_node,
        drain=row.drain,
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
