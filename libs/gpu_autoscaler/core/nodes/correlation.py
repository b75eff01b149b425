"""Which order, instance, Kubernetes node, drain and notice speak of the same node. Read by `core/nodes/views.py` alone.

A node has up to three names: the action that bought it, the instance's provider id, and the Kubernetes uid. Facts
name one or two of them; here they meet.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec

from gpu_autoscaler.core.identity_cache import IdentityCache, cached_by_identity
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, NoticeRecord, OrderRecord, Tombstone, Usable
from gpu_autoscaler.core.state.tables import all_tombstones
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import DrainNode, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import Taint

# A list of instances may lag behind a launch for a while (Amazon EC2 API Reference, "Eventual consistency", read
# 2026-11-21). An instance that is missing from lists for longer than this has vanished.
INSTANCE_MISSING_SECONDS_MAX = 600.0

_NEVER = datetime.max.replace(tzinfo=UTC)


T = TypeVar("T")


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


class NodeRecords(msgspec.Struct, frozen=True, kw_only=True):
    """What the streams say of one node, side by side. At least one of order, instance and node is there."""

    order: OrderRecord | None = None
    instance: NodeInstanceObserved | None = None
    node: NodeObserved | None = None

    @property
    def name(self) -> str:
        """What it goes by: the node's name, else the action that ordered it, else the instance."""
        if self.node is not None:
            return self.node.name
        return self.action_id or self.provider_id or ""

    @property
    def provider_id(self) -> ProviderId | None:
        """The instance's name, by whoever knows it."""
        if self.instance is not None:
            return self.instance.provider_id
        if self.order is not None and self.order.launched is not None:
            return self.order.launched.provider_id
        return None if self.node is None else self.node.provider_id

    @property
    def action_id(self) -> ActionId | None:
        """The decision that bought it, by whoever knows it."""
        if self.order is not None:
            return self.order.action_id
        if self.instance is not None and self.instance.action_id is not None:
            return self.instance.action_id
        return None if self.node is None else self.node.action_id

    @property
    def pool(self) -> str | None:
        """The pool that the order was for."""
        said = None if self.order is None else self.order.decision or self.order.ordered
        return None if said is None else said.pool

    @property
    def offer(self) -> Offer | None:
        """What was ordered."""
        said = None if self.order is None else self.order.decision or self.order.ordered
        return None if said is None else said.offer

    @property
    def deadline_at(self) -> Instant | None:
        """By when the order must be usable."""
        said = None if self.order is None else self.order.decision or self.order.ordered
        return None if said is None else said.deadline_at

    @property
    def expected_at(self) -> Instant | None:
        """When the order is expected to be usable, by the offer's own boot time."""
        if self.order is None or self.order.planned_at is None or self.offer is None:
            return None
        return self.order.planned_at + timedelta(seconds=self.offer.boot_seconds)

    @property
    def instance_type(self) -> str | None:
        """By the node's label, the cloud, or the order."""
        return _first(part.instance_type for part in (self.node, self.instance, self.offer) if part is not None)

    @property
    def zone(self) -> str | None:
        """By the node's label, the cloud, or the order."""
        return _first(part.zone for part in (self.node, self.instance, self.offer) if part is not None)

    @property
    def capacity_type(self) -> CapacityType | None:
        """By the node's label, the cloud, or the order."""
        return _first(part.capacity_type for part in (self.node, self.instance, self.offer) if part is not None)

    @property
    def gpu_model(self) -> str | None:
        """By the node's label, or the order."""
        return _first(part.gpu_model for part in (self.node, self.offer) if part is not None)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Of one GPU, by the node's label, or the order."""
        return _first(part.gpu_memory_bytes for part in (self.node, self.offer) if part is not None)

    @property
    def price_micro_usd_per_hour(self) -> int | None:
        """By the cloud's own word where there is one, else as offered."""
        launched = None if self.order is None else self.order.launched
        parts = (self.instance, launched, self.offer)
        return _first(part.price_micro_usd_per_hour for part in parts if part is not None)

    @property
    def promised_labels(self) -> dict[str, str]:
        """Labels that the node is to carry when it registers."""
        said = None if self.order is None else self.order.decision or self.order.ordered
        if said is None:
            return {}
        offered = {
            labels.INSTANCE_TYPE: said.offer.instance_type,
            labels.ZONE: said.offer.zone,
            labels.CAPACITY_TYPE: str(said.offer.capacity_type),
            labels.POOL: said.pool,
        }
        return {**dict(said.offer.marks_in(said.pool).labels), **offered, **dict(said.labels)}

    @property
    def promised_taints(self) -> tuple[Taint, ...] | None:
        """Taints that the node is to keep; None: not known."""
        said = None if self.order is None else self.order.decision
        if said is None:
            return None
        own = said.offer.marks_in(said.pool).taints
        return (*said.taints, *(one for one in own if one not in said.taints))

    @property
    def promised(self) -> Resources | None:
        """What the node is to hold for pods; None: nobody promised anything."""
        said = None if self.order is None else self.order.decision or self.order.ordered
        return None if said is None else said.promised

    def has_its_gpus(self, there: Resources) -> bool:
        """True where all GPUs and parts of GPUs are there that must be allocatable before the node is usable.

        A GPU label without GPUs is a plugin starting.
        """
        promised = self.promised
        if promised is not None:
            return promised.gpus_fit_in(there)
        return there.has_gpus or self.node is None or self.node.gpu_model is None


class RecordIndex:
    """Records by each name that another stream may use for them."""

    def __init__(
        self,
        orders: Mapping[ActionId, OrderRecord],
        instances: Mapping[ProviderId, NodeInstanceObserved],
        nodes: Mapping[NodeUid, NodeObserved],
        nodes_gone: Mapping[int, Mapping[NodeUid, Tombstone]],
        drains: Mapping[ActionId, DrainRecord],
        notices: Mapping[str, NoticeRecord],
    ) -> None:
        self._orders = orders
        self._instances = instances
        self._nodes = nodes
        self._orders_by_provider = {
            order.launched.provider_id: order for order in orders.values() if order.launched is not None
        }
        # An action makes one instance; of two (a cloud that forgot its token) the smaller name is the order's.
        self._instances_by_action = {
            instance.action_id: instance
            for _, instance in sorted(instances.items(), reverse=True)
            if instance.action_id is not None
        }
        self._drains: dict[NodeUid, DrainRecord] = {}
        self._emptied: dict[ProviderId, DrainRecord] = {}
        self._releases: dict[ActionId | ProviderId, DrainRecord] = {}
        self.ended: set[ActionId | ProviderId] = set()
        for drain in sorted(drains.values(), key=_planned_order):
            self._index_drain(drain)
        self._notices: dict[str, list[NoticeRecord]] = {}
        for notice in notices.values():
            if notice.is_active:
                self._notices.setdefault(notice.notice.provider_id, []).append(notice)
        gone = frozenset(stone.provider_id for stone in all_tombstones(nodes_gone) if stone.provider_id is not None)
        self.providers_without_node = gone.difference(node.provider_id for node in nodes.values()) if gone else gone
        # Each Kubernetes node, then each order, then each instance that is none of those before.
        self.records = tuple(self._all())
        self._deadlines = sorted({each.deadline_at for each in self.records if each.deadline_at is not None})

    def deadlines_passed_count(self, as_of: datetime) -> int:
        """Return how many different deadlines lie at or before this instant."""
        return bisect_right(self._deadlines, as_of)

    def _index_drain(self, drain: DrainRecord) -> None:
        ended_nothing = drain.terminated is not None and drain.terminated.provider_id is None
        if drain.terminated is not None and drain.terminated.provider_id is not None:
            self.ended.add(drain.terminated.provider_id)
        if drain.cancelled is not None or ended_nothing:  # what shows after all has to be ended anew
            return
        if isinstance(drain.decision, ReleaseInstance):
            self._releases[drain.decision.order_action_id] = drain
            if drain.decision.provider_id is not None:
                self._releases[drain.decision.provider_id] = drain
            return
        said: DrainNode | None = drain.decision
        node_uid = next((fact.node_uid for fact in (said, drain.started, drain.drained) if fact is not None), None)
        if node_uid is not None:
            self._drains[node_uid] = drain
        if drain.drained is not None and drain.drained.provider_id is not None:
            self._emptied[drain.drained.provider_id] = drain

    def _all(self) -> Iterator[NodeRecords]:
        """Yield each Kubernetes node, then each order, then each instance that was not yielded before."""
        actions: set[ActionId] = set()
        providers: set[ProviderId] = set()

        def records(
            order: OrderRecord | None, instance: NodeInstanceObserved | None, node: NodeObserved | None
        ) -> NodeRecords:
            if order is not None:
                actions.add(order.action_id)
            # The name is the same as `NodeRecords.provider_id`, which is asked for too often for that.
            if instance is not None:
                providers.add(instance.provider_id)
            elif order is not None and order.launched is not None:
                providers.add(order.launched.provider_id)
            elif node is not None and node.provider_id is not None:
                providers.add(node.provider_id)
            return _join(order, instance, node)

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
        """Return the drain or release that is decided and was not cancelled."""
        if records.node is not None and (drain := self._drains.get(records.node.node_uid)) is not None:
            return drain
        names = (records.action_id, records.provider_id)
        release = next((self._releases[name] for name in names if name is not None and name in self._releases), None)
        if release is None and records.node is None and records.provider_id is not None:
            # The node may leave Kubernetes before its instance has ended, and takes no word of the drain with it.
            return self._emptied.get(records.provider_id)
        return release

    def notice_of(self, records: NodeRecords) -> NoticeRecord | None:
        """Return the standing notice with the earliest deadline; one without a deadline comes last."""
        if not self._notices or records.provider_id is None:
            return None
        notices = self._notices.get(records.provider_id, ())
        return min(notices, key=lambda each: (each.notice.reclaim_at or _NEVER, each.notice.notice_id), default=None)

    def is_closed(self, records: NodeRecords) -> bool:
        """True when one of our steps recorded the cloud's word that the instance is gone or never was.

        That it never was is refuted by an instance that shows after all: a launch whose answer was lost, seen late.
        """
        if records.provider_id is not None and records.provider_id in self.ended:
            return True
        said = None if records.order is None else records.order.terminated
        is_refuted = records.instance is not None and records.instance.state != "terminated"
        return said is not None and not (said.provider_id is None and is_refuted)


_index = cached_by_identity(8)(RecordIndex)


def index_of(state: ClusterState) -> RecordIndex:
    """Return the index of the state's records."""
    return _index(state.orders, state.instances, state.nodes, state.nodes_gone, state.drains, state.notices)


# Records of a node that did not change make the very same NodeRecords, so that what is read from it can be remembered.
_kept: IdentityCache[NodeRecords] = IdentityCache(8192)


def _join(order: OrderRecord | None, instance: NodeInstanceObserved | None, node: NodeObserved | None) -> NodeRecords:
    key = (id(order), id(instance), id(node))
    found = _kept.get(key)
    if found is None:
        found = NodeRecords(order=order, instance=instance, node=node)
        _kept.put(key, found)
    return found


class Correlation:
    """The state's records as one node each, and what else speaks of it."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.pods = pods_by_node(state)
        self.index = index_of(state)
        self.drain_of = self.index.drain_of
        self.notice_of = self.index.notice_of
        self.is_closed = self.index.is_closed

    def read(self) -> tuple[object, ...]:
        """All of the state that views are made from, but for the cloud's lists (`core/nodes/views.py: missing`): while
        each is the same object, so is what is said of each node."""
        state = self._state
        return (self.index, self.pods, state.usable, state.busy_until, state.telemetry)

    def usable_record(self, node_uid: NodeUid) -> Usable | None:
        """Return what was seen when the node was first usable, whatever had been promised."""
        return self._state.usable.get(node_uid)

    def usable_of(self, records: NodeRecords) -> Usable | None:
        """Return since when the node offered all that was promised; None: it never did."""
        usable = None if records.node is None else self._state.usable.get(records.node.node_uid)
        return None if usable is None or not records.has_its_gpus(usable.gpus) else usable

    def has_lost_node(self, records: NodeRecords) -> bool:
        """True when Kubernetes had a node of this instance and has it no more."""
        return records.node is None and records.provider_id in self.index.providers_without_node

    def is_missing(self, records: NodeRecords) -> bool:
        """True when the cloud's lists have left the instance out for longer than they may lag."""
        provider_id, listed_at = records.provider_id, self._state.instances_listed_at
        if provider_id is None or listed_at is None:
            return False
        seen_at = self._state.instances_seen_at.get(provider_id)
        if seen_at is None and records.order is not None and records.order.launched is not None:
            seen_at = records.order.launched.launched_at
        return seen_at is not None and listed_at - seen_at > timedelta(seconds=INSTANCE_MISSING_SECONDS_MAX)


def _planned_order(drain: DrainRecord) -> tuple[datetime, ActionId]:
    """Later drains speak for a node; one whose plan has aged out is the oldest."""
    return (drain.planned_at or datetime.min.replace(tzinfo=UTC), drain.action_id)
