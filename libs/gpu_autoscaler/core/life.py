"""The life of a node, from the decision to buy it to the cloud's word that it is gone.

A phase is never stored: it is computed from what each stream said (order, instance, Kubernetes node, drain), so it
is the same in whichever order the streams arrived. Streams may be late, so a reader may see a node skip phases; it
never sees it go against the arrows (`core/transitions.py`).

    planned ──► ordered ──► launched ──► registered ──► ready ◄──► lost
       │           │            │            │         ▲     │
       │           │            │            │         ▼     │
       │           │            │            └────► cordoned │
       │           │            │                      │     │
       └───────────┴────────────┴──► failed         draining ┘
                                       │               │
                                       │            drained
                                       │               │
                                       └────────► terminating ──► gone

Counting: against limits and money a purchase counts from `planned` until the cloud said that its instance is gone or
never was. As room it counts from `planned` until `ready`, or its deadline, and then as long as it is `ready`.
"""

import enum
from collections.abc import Mapping
from datetime import datetime
from operator import is_
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.joins import Index, Joined, Joins
from gpu_autoscaler.core.remembered import Kept, changed, remembered
from gpu_autoscaler.core.state import ClusterState, DrainRecord, NoticeRecord, OrderRecord, Usable
from gpu_autoscaler.core.views import counts_for_idleness
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import NO_RESOURCES, Resources
from gpu_autoscaler.model.scheduling import Taint


class NodePhase(enum.StrEnum):
    """Where a node is in its life."""

    PLANNED = "planned"  # decided, not yet ordered
    ORDERED = "ordered"  # the cloud is being asked
    LAUNCHED = "launched"  # an instance exists and costs money
    REGISTERED = "registered"  # Kubernetes has the node; not ready, or its GPUs are not allocatable yet
    READY = "ready"  # takes pods, with every GPU that was promised
    CORDONED = "cordoned"  # takes no new pods; a drain is decided, or somebody cordoned it
    DRAINING = "draining"  # its pods are told to go
    DRAINED = "drained"  # no pod that counts is left
    TERMINATING = "terminating"  # the instance is being ended
    GONE = "gone"  # the cloud confirmed that the instance is gone
    FAILED = "failed"  # refused, or past its deadline without a node that is or was usable: to be given back
    LOST = "lost"  # was there, and fell silent or was ended without our word


BOOTING_PHASES = frozenset({NodePhase.PLANNED, NodePhase.ORDERED, NodePhase.LAUNCHED, NodePhase.REGISTERED})
LEAVING_PHASES = frozenset({NodePhase.DRAINING, NodePhase.DRAINED, NodePhase.TERMINATING})


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
    def is_room(self) -> bool:
        """True when work may be planned onto it: usable or booting, and the cloud has not given notice."""
        return (self.is_usable or self.is_booting) and self.notice is None

    @property
    def is_leaving(self) -> bool:
        """True when a drain is decided or the instance is being ended."""
        return self.phase in LEAVING_PHASES or self.drain is not None


# All views, with what they were read from.
_pictures: Kept[tuple[tuple[object, ...], tuple[NodeView, ...]]] = Kept(2)


def node_views(state: ClusterState, as_of: datetime) -> tuple[NodeView, ...]:
    """Return every node that is planned, there, or not yet written off, sorted by name. What is gone has no view.

    Each Kubernetes node, each open order and each of our instances appears exactly once. It is the very same tuple
    until something is said of a node, or a deadline passes: all that time does to a view is in the deadlines.
    """
    joins = Joins(state)
    read = joins.read()
    key = (*map(id, read), joins.index.deadlines_passed_count(as_of))
    kept = _pictures.get(key)
    if kept is None:
        kept = (read, _views_at(joins, state, as_of))
        _pictures.put(key, kept)
    return kept[1]


class _Row(NamedTuple):
    """What a view is made of besides pods and telemetry, which say something new all the time."""

    joined: Joined
    phase: NodePhase
    usable: Usable | None
    node_name: str | None  # None: not registered
    node_uid: NodeUid | None


class _Drawn(NamedTuple):
    """The last views of the same rows."""

    rows: tuple[_Row, ...]
    pods: Mapping[str, object]
    busy_until: Mapping[str, object]
    telemetry: Mapping[NodeUid, object]
    views: tuple[NodeView, ...]


_rows: Kept[tuple[tuple[object, ...], tuple[_Row, ...]]] = Kept(4)
_drawn: Kept[_Drawn] = Kept(4)


def _views_at(joins: Joins, state: ClusterState, as_of: datetime) -> tuple[NodeView, ...]:
    """As above; of nodes of which nothing new was said the view is not even looked for."""
    rows = _rows_at(joins, state, as_of)
    last = _drawn.get((id(rows),))
    if last is None:
        views = tuple(_view_of(row, joins, state) for row in rows)
    else:
        names = changed(last.pods, joins.pods) | changed(last.busy_until, state.busy_until)
        uids = changed(last.telemetry, state.telemetry)
        views = tuple(
            _view_of(row, joins, state) if row.node_name in names or row.node_uid in uids else view
            for row, view in zip(rows, last.views, strict=True)
        )
        views = last.views if all(map(is_, views, last.views)) else views
    _drawn.put((id(rows),), _Drawn(rows, joins.pods, state.busy_until, state.telemetry, views))
    return views


def _rows_at(joins: Joins, state: ClusterState, as_of: datetime) -> tuple[_Row, ...]:
    read = (joins.index, state.usable, state.instances_seen_at, state.instances_listed_at)
    key = (*map(id, read), joins.index.deadlines_passed_count(as_of))
    kept = _rows.get(key)
    if kept is None:
        phases = ((joined, phase_of(joined, joins, as_of)) for joined in _standing(joins.index))
        rows = [_row(joined, phase, joins) for joined, phase in phases if phase is not NodePhase.GONE]
        kept = (read, tuple(sorted(rows, key=lambda row: row.joined.name)))
        _rows.put(key, kept)
    return kept[1]


def _row(joined: Joined, phase: NodePhase, joins: Joins) -> _Row:
    name, uid = (None, None) if joined.node is None else (joined.node.name, joined.node.node_uid)
    return _Row(joined, phase, joins.usable_of(joined), name, uid)


@remembered(8)
def _standing(index: Index) -> tuple[Joined, ...]:
    """Those that may have a view at some instant. Most of what is remembered is closed for good."""
    return tuple(
        joined
        for joined in index.joined
        # A refused order whose instance exists all the same is kept: somebody has to end it.
        if is_counted(joined, index)
        or (
            (joined.order is None or joined.order.refused is None)
            and (joined.node is not None or not index.is_closed(joined))
        )
    )


def is_counted(joined: Joined, index: Index) -> bool:
    """True until the cloud confirmed that the instance is gone or never was."""
    if index.is_closed(joined):
        return False
    if joined.instance is not None:
        return joined.instance.state != "terminated"
    return joined.order is None or joined.order.refused is None


def phase_of(joined: Joined, joins: Joins, as_of: datetime) -> NodePhase:
    """Return the phase that the evidence amounts to; the strongest evidence comes first."""
    order, node, drain = joined.order, joined.node, joins.drain_of(joined)
    if joins.is_closed(joined):
        return NodePhase.GONE if node is None else NodePhase.TERMINATING
    is_late = joined.deadline_at is not None and as_of >= joined.deadline_at
    if joined.instance is not None and joined.instance.state == "terminated":
        if order is None and node is None:
            return NodePhase.GONE
        if drain is not None:
            return NodePhase.TERMINATING
        # Our books are still open; as a failure the order is given back, which closes them.
        return NodePhase.FAILED if node is None and is_late else NodePhase.LOST
    if drain is not None and isinstance(drain.decision, ReleaseInstance):
        return NodePhase.TERMINATING
    if joined.instance is not None and joined.instance.state == "terminating":
        return NodePhase.TERMINATING
    if node is not None:
        return _phase_in_kubernetes(node, drain, joined, joins, as_of)
    if order is not None and order.refused is not None:
        return NodePhase.FAILED
    if is_late:
        return NodePhase.FAILED
    if joins.has_lost_node(joined) or joins.is_missing(joined):
        return NodePhase.LOST
    if joined.instance is not None or (order is not None and order.launched is not None):
        return NodePhase.LAUNCHED
    return NodePhase.ORDERED if order is not None and order.ordered is not None else NodePhase.PLANNED


def _phase_in_kubernetes(
    node: NodeObserved, drain: DrainRecord | None, joined: Joined, joins: Joins, as_of: datetime
) -> NodePhase:
    if node.deleting_since is not None:
        return NodePhase.TERMINATING
    if drain is not None and drain.drained is not None:
        return NodePhase.DRAINED
    if drain is not None and drain.started is not None:
        return NodePhase.DRAINING
    if drain is not None or node.is_cordoned:
        return NodePhase.CORDONED
    if joins.is_missing(joined):
        return NodePhase.LOST
    was_usable = joins.usable_of(joined) is not None
    if node.is_ready and joined.has_its_gpus(node.allocatable) and (was_usable or not node.is_starting):
        return NodePhase.READY
    if was_usable:
        return NodePhase.LOST
    if joined.deadline_at is not None and as_of >= joined.deadline_at:
        return NodePhase.FAILED
    return NodePhase.REGISTERED


class _Read(msgspec.Struct, frozen=True):
    """A view, and all that it was read from."""

    read: tuple[object, ...]
    view: NodeView


_views: Kept[_Read] = Kept(8192)


def _view_of(row: _Row, joins: Joins, state: ClusterState) -> NodeView:
    """The view; the very same one while nothing that was said of the node has changed."""
    joined, phase, node = row.joined, row.phase, row.joined.node
    read = (
        joined,
        phase,
        is_counted(joined, joins.index),
        row.usable,
        joins.notice_of(joined),
        joins.drain_of(joined),
        joins.has_lost_node(joined),
        None if node is None else joins.pods.get(node.name),
        None if node is None else state.busy_until.get(node.name),
        None if node is None else state.telemetry.get(node.node_uid),
    )
    key = tuple(map(id, read))
    kept = _views.get(key)
    if kept is None:
        kept = _Read(read, _view(joined, phase, joins, state))
        _views.put(key, kept)
    return kept.view


def _view(joined: Joined, phase: NodePhase, joins: Joins, state: ClusterState) -> NodeView:
    node = joined.node
    usable, notice = joins.usable_of(joined), joins.notice_of(joined)
    own_labels = {} if node is None else dict(node.labels)
    allocatable, taints = _room(joined, is_usable=usable is not None)
    return NodeView(
        name=joined.name,
        phase=phase,
        is_ours=joined.action_id is not None,
        is_counted=is_counted(joined, joins.index),
        allocatable=allocatable,
        labels=own_labels if usable is not None else {**joined.promised_labels, **own_labels},
        taints=taints,
        pool=joined.pool or own_labels.get(labels.POOL),
        node_uid=None if node is None else node.node_uid,
        provider_id=joined.provider_id,
        action_id=joined.action_id,
        instance_type=joined.instance_type,
        zone=joined.zone,
        capacity_type=joined.capacity_type,
        gpu_model=joined.gpu_model,
        gpu_memory_bytes=joined.gpu_memory_bytes,
        price_micro_usd_per_hour=joined.price_micro_usd_per_hour,
        expected_at=None if usable is not None else joined.expected_at,
        usable_by=joined.deadline_at,
        usable_since=None if usable is None else usable.since,
        empty_since=_empty_since(node, usable, joins, state),
        reclaim_at=None if notice is None else notice.notice.reclaim_at,
        notice=notice,
        order=joined.order,
        instance=joined.instance,
        node=node,
        has_lost_node=joins.has_lost_node(joined),
        drain=joins.drain_of(joined),
        telemetry=None if node is None else state.telemetry.get(node.node_uid),
    )


def _room(joined: Joined, *, is_usable: bool) -> tuple[Resources, tuple[Taint, ...]]:
    """The node's own word once it was usable; until then the order's, as start-up taints and missing GPUs will pass."""
    own = (NO_RESOURCES, ()) if joined.node is None else (joined.node.allocatable, joined.node.taints)
    if is_usable or joined.promised is None:
        return own
    taints = joined.promised_taints
    return joined.promised, own[1] if taints is None else taints


def _empty_since(node: NodeObserved | None, usable: Usable | None, joins: Joins, state: ClusterState) -> Instant | None:
    if node is None or usable is None:
        return None
    if any(counts_for_idleness(pod) for pod in joins.pods.get(node.name, ())):
        return None
    return max(usable.since, state.busy_until.get(node.name, usable.since))
