"""The billing data of each instance and of its node.

The state forgets an instance hours after its end; a bill stays until it is charged, however late that is.
"""

from collections.abc import Iterable
from datetime import datetime

import msgspec

from gpu_autoscaler.core.policy.gpu_slices import gpu_units
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.scaling import (
    ScalingLaunchRefused,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeTerminated,
    ScalingOrderResynced,
)
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.store.protocol import LastCharge


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """An hourly price with its source and time."""

    micro_usd_per_hour: int
    source: str
    at: Instant


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as the cloud bills it."""

    provider_id: ProviderId
    instance_type: str
    capacity_type: CapacityType
    launched_at: Instant
    terminated_at: Instant | None = None
    price: Price | None = None  # None: unknown, not free
    action_id: ActionId | None = None  # its order
    zone: str | None = None


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The pool, zone and project whose limits an instance counts against."""

    pool: str | None = None
    zone: str | None = None
    project: str | None = None  # for which it was bought


class NodeShape(msgspec.Struct, frozen=True, kw_only=True):
    """The Kubernetes node of an instance, with its largest observed capacity."""

    node_uid: NodeUid
    name: str
    gpus: Resources  # whole GPUs and slices
    gpu_memory_bytes: int | None
    cpu_milli: int
    pool: str | None = None
    project: str | None = None

    @property
    def units(self) -> int:
        """The node's capacity in the units by which its cost is split."""
        return self.units_of(msgspec.structs.replace(self.gpus, cpu_milli=self.cpu_milli))

    def units_of(self, amounts: Resources) -> int:
        """Return the amounts in units: of GPUs if the node has any, else of CPU."""
        if not self.gpus.has_gpus:
            return amounts.cpu_milli
        return gpu_units(amounts, self.gpus, self.gpu_memory_bytes)


class BillMemory(msgspec.Struct, kw_only=True):
    """All bills, as snapshots keep them."""

    bills: dict[ProviderId, Bill] = {}
    ends: dict[ProviderId, Instant] = {}  # of our own terminations, until the cloud confirms
    shapes: dict[ProviderId, NodeShape] = {}
    orders: dict[ActionId, Account] = {}


class Bills:
    """The bills that are not charged to their end."""

    def __init__(self, memory: BillMemory | None = None) -> None:
        self.memory = BillMemory() if memory is None else memory
        self._bills, self._ends = self.memory.bills, self.memory.ends
        self._shapes, self._orders = self.memory.shapes, self.memory.orders
        self._in_order: tuple[Bill, ...] | None = None  # the last result of `all`; None after a change

    def note(self, recorded: Iterable[Recorded]) -> None:
        """Take in facts."""
        for item in recorded:
            match item.fact:
                case NodeInstanceObserved() as fact:
                    self._in_order = None
                    self._observed(fact, item.envelope.time)
                case ScalingNodeOrdered() as fact:
                    self._ordered(fact)
                case ScalingLaunchRefused(action_id=action_id):
                    self._orders.pop(action_id, None)
                case ScalingNodeLaunched() as fact:
                    self._in_order = None
                    self._launched(fact, item.envelope.time)
                case ScalingNodeTerminated(provider_id=provider_id, terminated_at=at) if provider_id is not None:
                    self._in_order = None
                    self._ends.setdefault(provider_id, at)
                case ScalingOrderResynced() as fact:
                    self._resynced(fact, item.envelope.time)
                case NodeObserved() as fact:
                    self._shape(fact)
                case _:
                    pass

    def all(self) -> tuple[Bill, ...]:
        """Return every bill, in order of launch."""
        if self._in_order is None:
            bills = (
                bill
                if bill.terminated_at is not None
                else msgspec.structs.replace(bill, terminated_at=self._ends.get(bill.provider_id))
                for bill in self._bills.values()
            )
            self._in_order = tuple(sorted(bills, key=lambda bill: (bill.launched_at, bill.provider_id)))
        return self._in_order

    def shape(self, provider_id: ProviderId) -> NodeShape | None:
        """Return the node of the instance; None if it never registered."""
        return self._shapes.get(provider_id)

    def reopen(self, charge: LastCharge) -> None:
        """Open the bill of an instance that the ledger has charged, unless it is open: its launch may have left the
        streams."""
        last = charge.last
        if last.provider_id not in self._bills:
            self._in_order = None
            self._bills[last.provider_id] = Bill(
                provider_id=last.provider_id,
                instance_type=last.instance_type,
                capacity_type=last.capacity_type,
                launched_at=charge.from_at,
                zone=last.zone,
            )

    def account(self, bill: Bill, charge: LastCharge | None) -> Account:
        """Return the account of the order, else that of the last charge, else of the node's labels."""
        order = None if bill.action_id is None else self._orders.get(bill.action_id)
        if order is not None:
            return msgspec.structs.replace(order, zone=bill.zone)
        if charge is not None:
            return Account(pool=charge.last.pool, zone=bill.zone, project=charge.last.bought_for)
        shape = self.shape(bill.provider_id)
        return (
            Account(zone=bill.zone)
            if shape is None
            else Account(pool=shape.pool, zone=bill.zone, project=shape.project)
        )

    def close(self, provider_id: ProviderId) -> None:
        """Forget an instance that is charged to its end."""
        self._in_order = None
        bill = self._bills.get(provider_id)
        if bill is not None and bill.action_id is not None:
            self._orders.pop(bill.action_id, None)
        for table in (self._bills, self._ends, self._shapes):
            table.pop(provider_id, None)

    def _observed(self, fact: NodeInstanceObserved, at: datetime) -> None:
        """Take the cloud's instance list, which decides when billing began and ended."""
        known = self._bills.get(fact.provider_id)
        price = None if known is None else known.price
        if fact.price_micro_usd_per_hour is not None and (price is None or price.source != fact.type_name()):
            price = Price(micro_usd_per_hour=fact.price_micro_usd_per_hour, source=fact.type_name(), at=at)
        self._bills[fact.provider_id] = Bill(
            provider_id=fact.provider_id,
            instance_type=fact.instance_type,
            capacity_type=fact.capacity_type,
            launched_at=fact.launched_at,
            terminated_at=fact.terminated_at or (None if known is None else known.terminated_at),
            price=price,
            action_id=fact.action_id or (None if known is None else known.action_id),
            zone=fact.zone,
        )

    def _ordered(self, purchase: BuyNode | ScalingNodeOrdered) -> None:
        project = dict(purchase.labels).get(labels.PROJECT_ID)
        self._orders[purchase.action_id] = Account(pool=purchase.pool, project=project)

    def _resynced(self, fact: ScalingOrderResynced, at: datetime) -> None:
        """Take the steps of an order that the streams no longer have, of an instance with an open bill or an end."""
        launched, terminated = fact.launched, fact.terminated
        if launched is None or (terminated is None and launched.provider_id not in self._bills):
            return
        self._in_order = None
        if (purchase := fact.decision or fact.ordered) is not None:
            self._ordered(purchase)
        self._launched(launched, at)
        if terminated is not None:
            self._ends.setdefault(launched.provider_id, terminated.terminated_at)

    def _launched(self, fact: ScalingNodeLaunched, at: datetime) -> None:
        known = self._bills.get(fact.provider_id)
        price = None if known is None else known.price
        if price is None and fact.price_micro_usd_per_hour is not None:
            price = Price(micro_usd_per_hour=fact.price_micro_usd_per_hour, source=fact.type_name(), at=at)
        if known is not None:
            self._bills[fact.provider_id] = msgspec.structs.replace(known, price=price)
            return
        self._bills[fact.provider_id] = Bill(
            provider_id=fact.provider_id,
            instance_type=fact.instance_type,
            capacity_type=fact.capacity_type,
            launched_at=fact.launched_at,
            price=price,
            action_id=fact.action_id,
            zone=fact.zone,
        )

    def _shape(self, fact: NodeObserved) -> None:
        if fact.provider_id is None:
            return
        known, gpus = self._shapes.get(fact.provider_id), fact.allocatable.gpus
        node_labels = dict(fact.labels)
        self._shapes[fact.provider_id] = NodeShape(
            node_uid=fact.node_uid,
            name=fact.name,
            # Fewer GPUs of the same kind: the device plugin restarts. Other GPUs: the node changed.
            gpus=known.gpus if known is not None and gpus.gpus_fit_in(known.gpus) else gpus,
            gpu_memory_bytes=fact.gpu_memory_bytes,
            cpu_milli=max(fact.allocatable.cpu_milli, 0 if known is None else known.cpu_milli),
            pool=node_labels.get(labels.POOL),
            project=node_labels.get(labels.PROJECT_ID),
        )


def confirmed_until(bill: Bill, state: ClusterState, now: datetime) -> datetime | None:
    """Return until when the instance ran for certain: its end, else the cloud's last list that has it.

    Later time may lie after an end that is not reported yet. None if the instance was never listed.
    """
    if bill.terminated_at is not None:
        return max(bill.terminated_at, bill.launched_at)
    seen_at = state.instances_seen_at.get(bill.provider_id)
    return None if seen_at is None else max(min(seen_at, now), bill.launched_at)
