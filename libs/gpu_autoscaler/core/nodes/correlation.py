"""Correlation of the records of a node: order, instance, Kubernetes node, drain, notice.

A node has up to three ids, of which a fact has one or two: action id, provider id, and Kubernetes uid.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.policy.gpu_slices import gpu_count_min
from gpu_autoscaler.core.state.lineage import Changes, Derivation
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, NoticeRecord, OrderRecord, Usable
from gpu_autoscaler.core.state.tables import all_tombstones
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.scaling import ScalingNodeOrdered
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import Taint

# A list of instances may lag behind a launch (Amazon EC2 API Reference, "Eventual consistency", read 2026-11-21). An
# instance that is missing for longer no longer exists.
INSTANCE_MISSING_SECONDS_MAX = 600.0

_NEVER = datetime.max.replace(tzinfo=UTC)


T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


class NodeRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one node. At least one of order, instance and node is present."""

    order: OrderRecord | None = None
    instance: NodeInstanceObserved | None = None
    node: NodeObserved | None = None

    @property
    def name(self) -> str:
        """The name of the node, else the action id, else the provider id."""
        if self.node is not None:
            return self.node.name
        return self.action_id or self.provider_id or ""

    @property
    def provider_id(self) -> ProviderId | None:
        """The provider id, from any record."""
        if self.instance is not None:
            return self.instance.provider_id
        if self.order is not None and self.order.launched is not None:
            return self.order.launched.provider_id
        return None if self.node is None else self.node.provider_id

    @property
    def action_id(self) -> ActionId | None:
        """The action that bought it, from any record."""
        if self.order is not None:
            return self.order.action_id
        if self.instance is not None and self.instance.action_id is not None:
            return self.instance.action_id
        return None if self.node is None else self.node.action_id

    @property
    def purchase(self) -> BuyNode | ScalingNodeOrdered | None:
        """What was ordered, as decided; None: the decision and the order are unknown."""
        return None if self.order is None else self.order.purchase

    @property
    def offer(self) -> Offer | None:
        return None if self.purchase is None else self.purchase.offer

    @property
    def deadline_at(self) -> Instant | None:
        return None if self.purchase is None else self.purchase.deadline_at

    @property
    def expected_at(self) -> Instant | None:
        """The expected time of use, by the boot time of the offer."""
        if self.order is None or self.order.planned_at is None or self.offer is None:
            return None
        return self.order.planned_at + timedelta(seconds=self.offer.boot_seconds)

    @property
    def instance_type(self) -> str | None:
        """From the label of the node, the cloud, or the order."""
        return _first(part.instance_type for part in (self.node, self.instance, self.offer) if part is not None)

    @property
    def zone(self) -> str | None:
        """From the label of the node, the cloud, or the order."""
        return _first(part.zone for part in (self.node, self.instance, self.offer) if part is not None)

    @property
    def capacity_type(self) -> CapacityType | None:
        """From the label of the node, the cloud, or the order."""
        return _first(part.capacity_type for part in (self.node, self.instance, self.offer) if part is not None)

    @property
    def gpu_model(self) -> str | None:
        """From the label of the node, or the order."""
        return _first(part.gpu_model for part in (self.node, self.offer) if part is not None)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Of one GPU, from the label of the node, or the order."""
        return _first(part.gpu_memory_bytes for part in (self.node, self.offer) if part is not None)

    @property
    def price_micro_usd_per_hour(self) -> int | None:
        """From the cloud, else from the offer."""
        launched = None if self.order is None else self.order.launched
        parts = (self.instance, launched, self.offer)
        return _first(part.price_micro_usd_per_hour for part in parts if part is not None)

    @property
    def promised_labels(self) -> dict[str, str]:
        """Labels that the node will have when it registers."""
        purchase = self.purchase
        if purchase is None:
            return {}
        offered = {
            labels.INSTANCE_TYPE: purchase.offer.instance_type,
            labels.ZONE: purchase.offer.zone,
            labels.CAPACITY_TYPE: str(purchase.offer.capacity_type),
            labels.POOL: purchase.pool,
        }
        return {**dict(purchase.offer.marks_in(purchase.pool).labels), **offered, **dict(purchase.labels)}

    @property
    def promised_taints(self) -> tuple[Taint, ...] | None:
        """Taints that the node will keep; None: unknown."""
        purchase = None if self.order is None else self.order.decision
        if purchase is None:
            return None
        own = purchase.offer.marks_in(purchase.pool).taints
        return (*purchase.taints, *(taint for taint in own if taint not in purchase.taints))

    @property
    def promised(self) -> Resources | None:
        """Resources that the node will have for pods; None: unknown."""
        return None if self.purchase is None else self.purchase.promised

    def has_promised_gpus(self, allocatable: Resources) -> bool:
        """True if all GPUs and slices are allocatable that the node needs to be usable. A GPU label without GPUs means
        that the device plugin is starting."""
        promised = self.promised
        if promised is not None:
            return promised.gpus_fit_in(allocatable)
        return allocatable.has_gpus or self.node is None or self.node.gpu_model is None


# Records of one node: rank (0 node, 1 order without a node, 2 instance alone), and its Kubernetes uid, action id or
# provider id.
RecordKey = tuple[int, str]

_FIELDS = ("orders", "instances", "nodes", "drains", "notices")
_RANKS = {"nodes": 0, "orders": 1, "instances": 2}
_Entry = tuple[str, str]  # field of the state, key
_Related = OrderRecord | NodeInstanceObserved | NodeObserved | DrainRecord | NoticeRecord


def _ids_of(entry: _Related) -> Iterator[str]:
    """Yield the ids of every node that a record is about, of all kinds."""
    ids: tuple[str | None, ...]
    match entry:
        case OrderRecord():
            ids = (entry.action_id, None if entry.launched is None else entry.launched.provider_id)
        case NodeInstanceObserved():
            ids = (entry.provider_id, entry.action_id)
        case NodeObserved():
            ids = (entry.node_uid, entry.provider_id, entry.action_id)
        case NoticeRecord():
            ids = (entry.notice.provider_id,)
        case DrainRecord():
            decision, drained, ended = entry.decision, entry.drained, entry.terminated
            ids = (
                _node_uid_of(entry),
                decision.order_action_id if isinstance(decision, ReleaseInstance) else None,
                decision.provider_id if isinstance(decision, ReleaseInstance) else None,
                None if drained is None else drained.provider_id,
                None if ended is None else ended.provider_id,
            )
    return (name for name in ids if name is not None)


def _node_uid_of(drain: DrainRecord) -> NodeUid | None:
    decision = None if isinstance(drain.decision, ReleaseInstance) else drain.decision
    return next((fact.node_uid for fact in (decision, drain.started, drain.drained) if fact is not None), None)


class RecordIndex:
    """Index of records by the ids that other streams use. Frozen: an update is another index."""

    def __init__(
        self,
        orders: Mapping[ActionId, OrderRecord],
        instances: Mapping[ProviderId, NodeInstanceObserved],
        nodes: Mapping[NodeUid, NodeObserved],
        drains: Mapping[ActionId, DrainRecord],
        notices: Mapping[str, NoticeRecord],
        lost: frozenset[ProviderId],
    ) -> None:
        """`lost` are instances whose Kubernetes node was deleted."""
        self._orders = orders
        self._instances = instances
        self._nodes = nodes
        self._all_drains, self._all_notices = drains, notices
        self.providers_without_node = lost
        self._orders_by_provider = {
            order.launched.provider_id: order for _, order in sorted(orders.items()) if order.launched is not None
        }
        # An action launches one instance; of two (a lost idempotency token) the smaller id belongs to the order.
        self._instances_by_action = {
            instance.action_id: instance
            for _, instance in sorted(instances.items(), reverse=True)
            if instance.action_id is not None
        }
        self._drains: dict[NodeUid, DrainRecord] = {}
        self._emptied: dict[ProviderId, DrainRecord] = {}
        self._releases: dict[ActionId | ProviderId, DrainRecord] = {}
        self.ended: dict[ProviderId, None] = {}
        for drain in sorted(drains.values(), key=_planned_order):
            self._index_drain(drain)
        self._notices: dict[str, list[NoticeRecord]] = {}
        for notice in notices.values():
            if notice.is_active:
                self._notices.setdefault(notice.notice.provider_id, []).append(notice)
        self.by_key: Mapping[RecordKey, NodeRecords] = {_key_of(records): records for records in self._all()}

    @classmethod
    def of(cls, state: ClusterState) -> "RecordIndex":
        """Return the index of the state, built from nothing."""
        return cls(state.orders, state.instances, state.nodes, state.drains, state.notices, _lost_providers(state))

    def updated(self, state: ClusterState, changes: Changes) -> "tuple[RecordIndex, frozenset[RecordKey]] | None":
        """Return the index of the state and the keys whose records or drains, notices and ends changed.

        Only what shares an id with a changed record is read. None: that is too much of everything.
        """
        lost = _lost_providers(state) if {"nodes", "nodes_gone"} & changes.keys() else self.providers_without_node
        ids = {*(lost ^ self.providers_without_node), *self._changed_ids(state, changes)}
        entries, ids = self._component(ids, changes)
        if len(entries) > max(_ENTRIES_COUNT_MIN, len(self.entries) // 4):
            return None
        tables: Sequence[Mapping[Any, Any]] = _tables(state)
        of_part: dict[str, dict[Any, Any]] = {
            name: {key: table[key] for field, key in entries if field == name and key in table}
            for name, table in zip(_FIELDS, tables, strict=True)
        }
        part = RecordIndex(**of_part, lost=lost)
        replaced: dict[str, object] = dict(zip(_TABLES, tables, strict=True))
        for name in _BY_ID:
            own, new = getattr(self, name), getattr(part, name)
            if new or not own.keys().isdisjoint(ids):
                replaced[name] = _merged(own, own.keys() & ids, new)
        keys = frozenset((rank, key) for field, key in entries if (rank := _RANKS.get(field)) is not None)
        replaced["by_key"] = _merged(self.by_key, keys, part.by_key)
        replaced["entries"] = self._entries_after(part, entries, ids)
        index = copy(self)
        vars(index).update(replaced, providers_without_node=lost)
        vars(index).pop("records", None)
        return index, keys

    def _changed_ids(self, state: ClusterState, changes: Changes) -> set[str]:
        tables = zip(_FIELDS, self._tables, _tables(state), strict=True)
        changed = (
            record
            for name, before, now in tables
            for key in changes.get(name, ())
            for record in (before.get(key), now.get(key))
            if record is not None
        )
        return {name for record in changed for name in _ids_of(record)}

    def keys_of(self, ids: Iterable[str]) -> frozenset[RecordKey]:
        """Return the keys that the records of the nodes with these ids may have."""
        entries, _ = self._component(set(ids), {})
        return frozenset((rank, key) for field, key in entries if (rank := _RANKS.get(field)) is not None)

    def _component(self, ids: set[str], changes: Changes) -> tuple[set[_Entry], set[str]]:
        """Return the records that the ids lead to, over other ids of theirs, and all these ids."""
        entries = {(name, key) for name in _FIELDS for key in changes.get(name, ())}
        tables = dict(zip(_FIELDS, self._tables, strict=True))
        todo, seen = list(ids), set(ids)
        while todo:
            for entry in self.entries.get(todo.pop(), ()):
                if entry not in entries:
                    entries.add(entry)
                    more = [name for name in _ids_of(tables[entry[0]][entry[1]]) if name not in seen]
                    seen.update(more)
                    todo += more
        return entries, seen

    @property
    def _tables(self) -> tuple[Mapping[str, _Related], ...]:
        return tuple(vars(self)[name] for name in _TABLES)

    @cached_property
    def entries(self) -> Mapping[str, tuple[_Entry, ...]]:
        """The records that are about a node, by each id of it."""
        entries: dict[str, tuple[_Entry, ...]] = {}
        for field, table in zip(_FIELDS, self._tables, strict=True):
            for key, record in table.items():
                for name in {*_ids_of(record)}:
                    entries[name] = (*entries.get(name, ()), (field, key))
        return entries

    def _entries_after(
        self, part: "RecordIndex", replaced: set[_Entry], ids: set[str]
    ) -> Mapping[str, tuple[_Entry, ...]]:
        entries = dict(self.entries)
        for name in ids:
            others = [entry for entry in entries.pop(name, ()) if entry not in replaced]
            if kept := (*others, *part.entries.get(name, ())):
                entries[name] = kept
        return entries

    @cached_property
    def records(self) -> tuple[NodeRecords, ...]:
        """All records: Kubernetes nodes, orders without a node, and instances without an order."""
        return tuple(self.by_key.values())

    def _index_drain(self, drain: DrainRecord) -> None:
        ended_nothing = drain.terminated is not None and drain.terminated.provider_id is None
        if drain.terminated is not None and drain.terminated.provider_id is not None:
            self.ended[drain.terminated.provider_id] = None
        if drain.cancelled is not None or ended_nothing:  # an instance that shows after all must be terminated again
            return
        if isinstance(drain.decision, ReleaseInstance):
            self._releases[drain.decision.order_action_id] = drain
            if drain.decision.provider_id is not None:
                self._releases[drain.decision.provider_id] = drain
            return
        node_uid = _node_uid_of(drain)
        if node_uid is not None:
            self._drains[node_uid] = drain
        if drain.drained is not None and drain.drained.provider_id is not None:
            self._emptied[drain.drained.provider_id] = drain

    def _all(self) -> Iterator[NodeRecords]:
        """Yield every Kubernetes node, then every other order, then every other instance."""
        actions: set[ActionId] = set()
        providers: set[ProviderId] = set()

        def records(
            order: OrderRecord | None, instance: NodeInstanceObserved | None, node: NodeObserved | None
        ) -> NodeRecords:
            if order is not None:
                actions.add(order.action_id)
            # Like `NodeRecords.provider_id`, inlined because it is hot.
            if instance is not None:
                providers.add(instance.provider_id)
            elif order is not None and order.launched is not None:
                providers.add(order.launched.provider_id)
            elif node is not None and node.provider_id is not None:
                providers.add(node.provider_id)
            return NodeRecords(order=order, instance=instance, node=node)

        for node in self._nodes.values():
            seen = None if node.provider_id is None else self._instances.get(node.provider_id)
            yield records(self._order_of(node.action_id, node.provider_id), seen, node)
        for action_id, order in self._orders.items():
            if action_id not in actions:
                seen = self._instances_by_action.get(action_id)
                if order.launched is not None:
                    seen = self._instances.get(order.launched.provider_id, seen)
                yield records(order, seen, None)
        for provider_id, instance in self._instances.items():
            by = self._order_of(instance.action_id, provider_id)
            if (by.action_id not in actions) if by is not None else (provider_id not in providers):
                yield records(by, instance, None)

    def _order_of(self, action_id: ActionId | None, provider_id: ProviderId | None) -> OrderRecord | None:
        by_action = None if action_id is None else self._orders.get(action_id)
        if by_action is not None or provider_id is None:
            return by_action
        return self._orders_by_provider.get(provider_id)

    def drain_of(self, records: NodeRecords) -> DrainRecord | None:
        """Return the drain or release that is decided and not canceled."""
        if records.node is not None and (drain := self._drains.get(records.node.node_uid)) is not None:
            return drain
        names = (records.action_id, records.provider_id)
        release = next((self._releases[name] for name in names if name is not None and name in self._releases), None)
        if release is None and records.node is None and records.provider_id is not None:
            # The node object may be deleted before its instance terminates; the drain is then found by instance.
            return self._emptied.get(records.provider_id)
        return release

    def notice_of(self, records: NodeRecords) -> NoticeRecord | None:
        """Return the active notice with the earliest deadline; notices without a deadline come last."""
        if not self._notices or records.provider_id is None:
            return None
        notices = self._notices.get(records.provider_id, ())
        return min(notices, key=lambda entry: (entry.notice.reclaim_at or _NEVER, entry.notice.notice_id), default=None)

    def is_closed(self, records: NodeRecords) -> bool:
        """True if a step recorded that the instance is terminated or was never launched. An instance that shows after
        all refutes the latter: the response of the launch was lost."""
        if records.provider_id is not None and records.provider_id in self.ended:
            return True
        terminated = None if records.order is None else records.order.terminated
        is_refuted = records.instance is not None and records.instance.state != "terminated"
        return terminated is not None and not (terminated.provider_id is None and is_refuted)


_ENTRIES_COUNT_MIN = 64  # of an update, whatever the size of the cluster
_BY_ID = ("_orders_by_provider", "_instances_by_action", "_drains", "_emptied", "_releases", "ended", "_notices")
_TABLES = ("_orders", "_instances", "_nodes", "_all_drains", "_all_notices")  # those of the state, as _FIELDS
_tables = attrgetter(*_FIELDS)


def _merged(table: Mapping[K, V], removed: Iterable[K], added: Mapping[K, V]) -> dict[K, V]:
    merged = {**table, **added}
    for key in removed:
        if key not in added:
            merged.pop(key, None)
    return merged


def _lost_providers(state: ClusterState) -> frozenset[ProviderId]:
    gone = frozenset(stone.provider_id for stone in all_tombstones(state.nodes_gone) if stone.provider_id is not None)
    return gone.difference(node.provider_id for node in state.nodes.values()) if gone else gone


def _key_of(records: NodeRecords) -> RecordKey:
    if records.node is not None:
        return 0, records.node.node_uid
    if records.order is not None:
        return 1, records.order.action_id
    return 2, records.provider_id or ""


def _update(before: RecordIndex, state: ClusterState, changes: Changes) -> RecordIndex | None:
    updated = before.updated(state, changes)
    return None if updated is None else updated[0]


INDEX_FIELDS = (*_FIELDS, "nodes_gone")
INDEX = Derivation(INDEX_FIELDS, RecordIndex.of, _update)


def index_of(state: ClusterState) -> RecordIndex:
    """Return the index of the state."""
    return INDEX.of(state)


@cached_by_identity(2)
def offered_gpus(offers: SpotOffersSampled | None) -> Mapping[str, int]:
    """Return the GPUs of each offered instance type: the same object until one changes."""
    if offers is None:
        return _same_counts(())
    return _same_counts(tuple(sorted({(offer.instance_type, offer.resources.gpu_count) for offer in offers.offers})))


@lru_cache(4)
def _same_counts(counts: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    return dict(counts)  # of two offers of a type the one with more GPUs


class Correlation:
    """The records of the state, correlated by node."""

    def __init__(self, state: ClusterState, index: RecordIndex) -> None:
        self._state = state
        self.pods = pods_by_node(state)
        self.index = index
        self.offered_gpus = offered_gpus(state.offers)
        self.drain_of = self.index.drain_of
        self.notice_of = self.index.notice_of
        self.is_closed = self.index.is_closed

    def gpu_count_of(self, records: NodeRecords) -> int:
        """Return the bought GPUs: by the order, else by the offers of the instance type, else by what the node has."""
        if records.offer is not None:
            return records.offer.resources.gpu_count
        offered = self.offered_gpus.get(records.instance_type or "", 0)
        if records.node is None:
            return offered
        if offered:
            return max(offered, records.node.allocatable.gpu_count)
        usable = self._state.usable.get(records.node.node_uid)
        seen = (records.node.allocatable, *(() if usable is None else (usable.gpus,)))
        return max(gpu_count_min(gpus, records.node.gpu_memory_bytes) for gpus in seen)

    def usable_of(self, records: NodeRecords) -> Usable | None:
        """Return since when the node had everything promised; None: never."""
        usable = None if records.node is None else self._state.usable.get(records.node.node_uid)
        return None if usable is None or not records.has_promised_gpus(usable.gpus) else usable

    def has_lost_node(self, records: NodeRecords) -> bool:
        """True if the Kubernetes node of this instance was deleted."""
        return records.node is None and records.provider_id in self.index.providers_without_node

    def is_missing(self, records: NodeRecords) -> bool:
        """True if the instance is missing from lists for longer than they may lag."""
        provider_id, listed_at = records.provider_id, self._state.instances_listed_at
        if provider_id is None or listed_at is None:
            return False
        seen_at = self._state.instances_seen_at.get(provider_id)
        if seen_at is None and records.order is not None and records.order.launched is not None:
            seen_at = records.order.launched.launched_at
        return seen_at is not None and listed_at - seen_at > timedelta(seconds=INSTANCE_MISSING_SECONDS_MAX)


def _planned_order(drain: DrainRecord) -> tuple[datetime, ActionId]:
    """Later drains take precedence; a drain without a plan is the oldest."""
    return (drain.planned_at or datetime.min.replace(tzinfo=UTC), drain.action_id)
