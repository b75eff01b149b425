"""Correlation of the records of a node: order, instance, Kubernetes node, drain, notice.

A node has up to three ids, of which a fact has one or two: action id, provider id, and Kubernetes uid.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TypeVar

import msgspec

from gpu_autoscaler.core.identity_cache import IdentityCache, cached_by_identity
from gpu_autoscaler.core.policy.gpu_slices import gpu_count_min
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, NoticeRecord, OrderRecord, Tombstone, Usable
from gpu_autoscaler.core.state.tables import all_tombstones
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.scaling import ScalingNodeOrdered
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, ReleaseInstance
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


class RecordIndex:
    """Index of records by the ids that other streams use."""

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
        # An action launches one instance; of two (a lost idempotency token) the smaller id belongs to the order.
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
        # Kubernetes nodes first, then orders without a node, then instances without an order.
        self.records = tuple(self._all())
        self._deadlines = sorted({records.deadline_at for records in self.records if records.deadline_at is not None})

    def deadlines_passed_count(self, as_of: datetime) -> int:
        """Return the number of different deadlines up to this instant."""
        return bisect_right(self._deadlines, as_of)

    def _index_drain(self, drain: DrainRecord) -> None:
        ended_nothing = drain.terminated is not None and drain.terminated.provider_id is None
        if drain.terminated is not None and drain.terminated.provider_id is not None:
            self.ended.add(drain.terminated.provider_id)
        if drain.cancelled is not None or ended_nothing:  # an instance that shows after all must be terminated again
            return
        if isinstance(drain.decision, ReleaseInstance):
            self._releases[drain.decision.order_action_id] = drain
            if drain.decision.provider_id is not None:
                self._releases[drain.decision.provider_id] = drain
            return
        decision: DrainNode | None = drain.decision
        node_uid = next((fact.node_uid for fact in (decision, drain.started, drain.drained) if fact is not None), None)
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


_index = cached_by_identity(8)(RecordIndex)


def index_of(state: ClusterState) -> RecordIndex:
    """Return the index of the state."""
    return _index(state.orders, state.instances, state.nodes, state.nodes_gone, state.drains, state.notices)


# Unchanged records of a node give the same NodeRecords, so that results can be cached by identity.
_records: IdentityCache[NodeRecords] = IdentityCache(8192)


def _join(order: OrderRecord | None, instance: NodeInstanceObserved | None, node: NodeObserved | None) -> NodeRecords:
    key = (id(order), id(instance), id(node))
    records = _records.get(key)
    if records is None:
        records = NodeRecords(order=order, instance=instance, node=node)
        _records.put(key, records)
    return records


@cached_by_identity(2)
def _offered_gpus(offers: SpotOffersSampled | None) -> Mapping[str, int]:
    """Return the GPUs of each offered instance type: the same object until one changes."""
    if offers is None:
        return _same_counts(())
    return _same_counts(tuple(sorted({(offer.instance_type, offer.resources.gpu_count) for offer in offers.offers})))


@lru_cache(4)
def _same_counts(counts: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    return dict(counts)  # of two offers of a type the one with more GPUs


class Correlation:
    """The records of the state, correlated by node."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.pods = pods_by_node(state)
        self.index = index_of(state)
        self.offered_gpus = _offered_gpus(state.offers)
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
        usable = self.usable_record(records.node.node_uid)
        seen = (records.node.allocatable, *(() if usable is None else (usable.gpus,)))
        return max(gpu_count_min(gpus, records.node.gpu_memory_bytes) for gpus in seen)

    def inputs(self) -> tuple[object, ...]:
        """Return the inputs of views except the lists of the cloud, for comparison by identity."""
        state = self._state
        return (self.index, self.pods, state.usable, state.busy_until, state.telemetry, self.offered_gpus)

    def usable_record(self, node_uid: NodeUid) -> Usable | None:
        """Return the most GPUs that the node had while ready, whatever was promised."""
        return self._state.usable.get(node_uid)

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
