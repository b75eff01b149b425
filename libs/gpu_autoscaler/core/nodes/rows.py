"""Nodes of which the streams speak, each with its phase at an instant. Read by `core/nodes/life.py` alone.

Of a thousand nodes a fact says something of one: what is read of the others is kept for as long as it was read from the
very same records (`core/remembered.py`).
"""

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from gpu_autoscaler.core.nodes.joins import RecordIndex, NodeRecords, Correlation
from gpu_autoscaler.core.nodes.phases import NodePhase, is_counted, phase_of
from gpu_autoscaler.core.remembered import Kept, remembered
from gpu_autoscaler.core.state import ClusterState, DrainRecord, Usable
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId

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


_missing: Kept[tuple[tuple[object, ...], Missing]] = Kept(4)
_evidence: Kept[_Evidence] = Kept(4)
_judged: Kept[_Judged] = Kept(8192)
_row: Kept[NodeRow] = Kept(8192)
_rows: Kept[tuple[tuple[object, ...], tuple[NodeRow, ...]]] = Kept(4)


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
    """Look at a node; it is looked at again where the evidence changed, or its deadline passed."""
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


@remembered(8)
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
