"""The true state of the cloud and of the nodes its machines become; invoices and invariants are computed from here."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from msgspec.structs import replace

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import ActionId, ProviderId, derive_id
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.protocol import Instance, Order
from gpu_autoscaler.sim.cluster.controllers import Workloads, is_ready
from gpu_autoscaler.sim.cluster.objects import amounts_text, with_condition
from gpu_autoscaler.simcluster.instances import shown_gpus
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, offers_of

Telemetry = Literal["true", "silent", "frozen", "all_zero", "absurd"]
Quota = Literal["full", "zero", "zero and listed"]  # of GPUs; listed: the offers say so, not only refused launches

QUOTA_ZERO = "the quota of GPUs in this region is 0"
SHOWN_SECONDS_AFTER_END = 3600.0
RUNNING_AT_RATIO, REGISTERED_AT_RATIO, READY_AT_RATIO = 0.3, 0.6, 0.8  # of the boot time, like `simcluster`
# Small and mid-sized machines of three models: enough choice, and a plan takes a quarter of the time.
MIG_TYPE = "p4d.24xlarge"  # sold where a pool uses MIG, which small types do not support
TYPES = tuple(entry for entry in INSTANCE_CATALOG if entry.name.partition(".")[2] in ("xlarge", "12xlarge"))
BOOT_RATIO = (0.7, 1.4)  # of the offer's boot time
TERMINATION_SECONDS = (5.0, 30.0)
NODE_REMOVED_SECONDS = (1.0, 15.0)  # from a machine's end to removal of its node object


@dataclass(slots=True)
class Machine:
    """One instance from its launch."""

    provider_id: ProviderId
    node_name: str
    order: Order
    price_micro_usd_per_hour: int
    launched_at: datetime
    visible_at: datetime
    state: InstanceState = "pending"
    terminated_at: datetime | None = None
    notice: ReclaimNotice | None = None
    hinted_at: datetime | None = None
    reclaimed_at: datetime | None = None  # when the cloud reclaimed it
    telemetry: Telemetry = "true"
    gpu_fault: Mapping[str, Any] = field(default_factory=dict)  # what its first GPU reports, by field of a sample
    was_broken: bool = False  # whatever its first GPU reports since
    is_usable: bool = False
    is_ordered: bool = True  # False: it carries our tags, but we did not order it
    was_delayed: bool = False  # launched after the launch call timed out

    @property
    def offer(self) -> Offer:
        return self.order.offer

    @property
    def is_alive(self) -> bool:
        return self.state in ("pending", "running")

    @property
    def has_broken_gpu(self) -> bool:
        """True if its work is lost anyway: a GPU fell off the bus or has unrepairable memory, now or earlier."""
        return self.was_broken or self.gpu_fault.get("xid") == 79 or bool(self.gpu_fault.get("is_row_remap_failed"))

    def set_gpu_fault(self, gpu_fault: Mapping[str, Any]) -> None:
        self.was_broken = self.has_broken_gpu
        self.gpu_fault = gpu_fault

    def shown(self) -> Instance:
        return Instance(
            provider_id=self.provider_id,
            action_id=self.order.action_id,
            state=self.state,
            instance_type=self.offer.instance_type,
            zone=self.offer.zone,
            capacity_type=self.offer.capacity_type,
            price_micro_usd_per_hour=self.price_micro_usd_per_hour,
            launched_at=self.launched_at,
            terminated_at=self.terminated_at,
        )

    def cost_micro_usd(self) -> int:
        """Return its cost on the cloud's invoice. Raises ValueError while it runs."""
        if self.terminated_at is None:
            raise ValueError(f"{self.provider_id} still runs: its cost is not final")
        return cost_micro_usd(self.price_micro_usd_per_hour, self.terminated_at - self.launched_at)


def offers_for(sharing: NodePool | None) -> tuple[Offer, ...]:
    """Return all offers of TYPES, and the MIG type if a pool needs it."""
    wanted = () if sharing is None else sharing.gpu_models
    more = (entry for entry in INSTANCE_CATALOG if entry.name == MIG_TYPE and entry.gpu_model in wanted)
    return offers_of((*TYPES, *more))


class Cloud:
    """The cloud account."""

    def __init__(self, workloads: Workloads, rng: random.Random, offers: tuple[Offer, ...] | None = None) -> None:
        """`offers`: available offers; None: all of TYPES."""
        self.machines: list[Machine] = []
        self.offers: tuple[Offer, ...] = offers_of(TYPES) if offers is None else offers
        self.zones_without_spot: set[str] = set()  # currently without spot capacity
        self.sold_out: set[str] = set()  # GPU models currently without capacity
        self.quota: Quota = "full"
        self.is_delaying = False  # launches are accepted but delayed
        self.has_launch_groups = False  # whether it launches several instances at once or none
        self.version = 0  # changes with everything observable from outside
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._loop = workloads.loop
        self._rng = rng
        self._by_token: dict[ActionId, Machine] = {}
        self._by_id: dict[ProviderId, Machine] = {}
        self._by_node: dict[str, Machine] = {}
        self._listed = self.offers
        self._delayed: dict[ActionId, Order] = {}
        self.leaves_node: Callable[[], bool] = bool  # True: the node object of an ended machine is not removed
        self.launch_listeners: list[Callable[[Machine], None]] = []
        self.notice_listeners: list[Callable[[Machine], None]] = []
        self.hint_listeners: list[Callable[[Machine], None]] = []

    # ---- queries

    def alive(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.is_alive]

    def of_node(self, node_name: str | None) -> Machine | None:
        return self._by_node.get(node_name or "")

    def of_id(self, provider_id: ProviderId) -> Machine | None:
        return self._by_id.get(provider_id)

    def of_token(self, action_id: ActionId) -> Machine | None:
        return self._by_token.get(action_id)

    def has_machine(self, action_id: ActionId) -> bool:
        """True if this token has its machine: a repeated launch returns it and is never refused."""
        return action_id in self._by_token

    def shown(self) -> Sequence[Instance]:
        now = self._cluster.now()
        oldest = now - timedelta(seconds=SHOWN_SECONDS_AFTER_END)
        return [
            machine.shown()
            for machine in self.machines
            if machine.visible_at <= now and (machine.terminated_at is None or machine.terminated_at >= oldest)
        ]

    def is_out_of(self, offer: Offer) -> bool:
        is_without_spot = offer.capacity_type is CapacityType.SPOT and offer.zone in self.zones_without_spot
        return is_without_spot or offer.gpu_model in self.sold_out

    # ---- machines

    def launch(
        self, order: Order, *, visible_in_seconds: float, comes_up: bool, shows_gpus: bool, was_delayed: bool = False
    ) -> Machine:
        """Launch the machine, or return the one of this token."""
        existing = self._by_token.get(order.action_id)
        if existing is not None:
            return existing
        now = self._cluster.now()
        digest = derive_id("machine", order.installation, order.action_id, len(self.machines))
        listed_offer = next((offer for offer in self.offers if offer.key == order.offer.key), order.offer)
        price = listed_offer.price_micro_usd_per_hour or order.offer.price_micro_usd_per_hour
        assert price is not None, f"{order.offer.key} was ordered without a known price"  # noqa: S101 - a bug of the core
        machine = Machine(
            provider_id=ProviderId(f"sim:///{order.offer.zone}/i-{digest[:17]}"),
            node_name=f"gpu-{digest[:8]}",
            order=order,
            price_micro_usd_per_hour=price,
            launched_at=now,
            visible_at=now + timedelta(seconds=visible_in_seconds),
            was_delayed=was_delayed,
        )
        self._by_token[order.action_id] = self._by_id[machine.provider_id] = machine
        self._by_node[machine.node_name] = machine
        self.machines.append(machine)
        self.version += 1
        boot_seconds = self.boot_seconds(order.offer)
        self._loop.call_later(boot_seconds * RUNNING_AT_RATIO, self._run, machine)
        if comes_up:
            self._loop.call_later(boot_seconds * REGISTERED_AT_RATIO, self._register, machine)
            self._loop.call_later(boot_seconds * READY_AT_RATIO, self._become_ready, machine)
            if shows_gpus:
                self._loop.call_later(boot_seconds, self._show_gpus, machine)
        for listener in self.launch_listeners:
            listener(machine)
        return machine

    def delay_launch(self, order: Order) -> None:
        """Accept the order and launch its machine after the outage."""
        self._delayed[order.action_id] = order

    def launch_delayed(self) -> None:
        """End the outage and launch all delayed orders."""
        self.is_delaying = False
        delayed, self._delayed = self._delayed, {}
        for order in delayed.values():
            if not self.has_machine(order.action_id):
                self.launch(order, visible_in_seconds=0.0, comes_up=True, shows_gpus=True, was_delayed=True)

    def leave_behind(self, offer: Offer, installation: str) -> None:
        """Run a machine with our tags that we did not order and that never becomes a node."""
        now, number = self._cluster.now(), len(self.machines)
        order = Order(
            action_id=ActionId(derive_id("left-behind", installation, number)),
            installation=installation,
            pool="",
            offer=offer,
            labels=(),
            taints=(),
        )
        machine = Machine(
            provider_id=ProviderId(f"sim:///{offer.zone}/i-left-{number}"),
            node_name=f"left-{number}",
            order=order,
            price_micro_usd_per_hour=offer.price_micro_usd_per_hour or 0,
            launched_at=now,
            visible_at=now,
            state="running",
            is_ordered=False,
        )
        self._by_id[machine.provider_id] = machine
        self.machines.append(machine)
        self.version += 1

    def boot_seconds(self, offer: Offer) -> float:
        """Return the boot time of the next machine of this offer."""
        return offer.boot_seconds * self._rng.uniform(*BOOT_RATIO)

    def terminate(self, machine: Machine) -> None:
        """Start the machine's termination; its pods die with it."""
        if not machine.is_alive:
            return
        machine.state = "terminating"
        self.version += 1
        self._workloads.stop_kubelet(machine.node_name)
        node = self._cluster.find(NODES, "", machine.node_name)
        if node is not None:
            self._ready(node, "False")
        self._loop.call_later(self._rng.uniform(*TERMINATION_SECONDS), self._ended, machine)

    def reclaim(self, machine: Machine) -> None:
        if machine.is_alive:
            machine.reclaimed_at = self._cluster.now()
            self.terminate(machine)

    def warn(self, machine: Machine, seconds: float) -> None:
        """Show an interruption notice in the machine's metadata, and reclaim it at the deadline."""
        at = (self._cluster.now() + timedelta(seconds=seconds)).replace(microsecond=0)
        machine.notice = ReclaimNotice("terminate", at.isoformat(), at)
        self.version += 1
        self._loop.call_later(seconds, self._act_on, machine, machine.notice)
        for listener in self.notice_listeners:
            listener(machine)

    def hint(self, machine: Machine) -> None:
        """Show a rebalance recommendation in the machine's metadata."""
        machine.hinted_at = self._cluster.now().replace(microsecond=0)
        self.version += 1
        for listener in self.hint_listeners:
            listener(machine)

    def withdraw(self, machine: Machine) -> None:
        machine.notice = None
        self.version += 1

    def reprice(self, offers: tuple[Offer, ...]) -> None:
        """Change the prices of new machines; running machines keep theirs."""
        self.offers = offers
        self.version += 1

    def set_quota(self, quota: Quota) -> None:
        """Change the quota of GPUs; running machines stay."""
        self.quota = quota
        self.version += 1

    def allows_gpus(self, offer: Offer) -> bool:
        """True unless the quota forbids machines of this offer."""
        return self.quota == "full" or not offer.resources.gpu_count

    def sampled(self) -> tuple[Offer, ...]:
        """Return the offers as the cloud lists them now."""
        if self.quota != "zero and listed":
            return self.offers
        return tuple(
            offer if self.allows_gpus(offer) else replace(offer, unavailable_because=QUOTA_ZERO)
            for offer in self.offers
        )

    def listed(self) -> tuple[Offer, ...]:
        """Return the initial offers, to which prices return."""
        return self._listed

    def _act_on(self, machine: Machine, notice: ReclaimNotice) -> None:
        if machine.notice == notice:
            self.reclaim(machine)

    def _run(self, machine: Machine) -> None:
        if machine.state == "pending":
            machine.state = "running"
            self.version += 1

    def _ended(self, machine: Machine) -> None:
        machine.state, machine.terminated_at = "terminated", self._cluster.now()
        self.version += 1
        forgotten_seconds = self._rng.uniform(*NODE_REMOVED_SECONDS)
        if not self.leaves_node():
            self._loop.call_later(forgotten_seconds, self._workloads.remove_node, machine.node_name)

    # ---- nodes

    def _register(self, machine: Machine) -> None:
        if not machine.is_alive:
            return
        order, offer = machine.order, machine.offer
        our_labels = {
            labels.POOL: order.pool,
            labels.ACTION_ID: order.action_id,
            labels.INSTALLATION: order.installation,
        }
        shown = {**dict(order.labels), **labels_of(offer, machine.node_name), **our_labels}
        taints = tuple(core.WireTaint(key=taint.key, effect=taint.effect, value=taint.value) for taint in order.taints)
        amounts = amounts_text(
            offer.resources.cpu_milli,
            offer.resources.memory_bytes,
            offer.resources.ephemeral_storage_bytes,
            pods=offer.resources.pod_count,
        )
        conditions = with_condition((), "Ready", "False", self._cluster.now())
        self._cluster.put(
            NODES,
            core.Node(
                metadata=self._cluster.metadata("", machine.node_name, labels=shown),
                spec=core.NodeSpec(provider_id=machine.provider_id, taints=taints),
                status=core.NodeStatus(allocatable=dict(amounts), conditions=conditions),
            ),
        )

    def _become_ready(self, machine: Machine) -> None:
        node = self._cluster.find(NODES, "", machine.node_name)
        if machine.is_alive and node is not None:
            self._ready(node, "True")

    def _ready(self, node: core.Node, status: core.ConditionStatus) -> None:
        conditions = with_condition(node.status.conditions, "Ready", status, self._cluster.now())
        self._cluster.put(NODES, replace(node, status=replace(node.status, conditions=conditions)))

    def _show_gpus(self, machine: Machine) -> None:
        node = self._cluster.find(NODES, "", machine.node_name)
        if machine.is_alive and node is not None:
            offer = machine.offer
            gpus = shown_gpus(offer.resources.gpu_count, offer.gpu_model, offer.gpu_memory_bytes, node.metadata.labels)
            status = replace(node.status, allocatable={**node.status.allocatable, **gpus})
            self._cluster.put(NODES, replace(node, status=status))
            machine.is_usable = True

    def pods_on(self, machine: Machine) -> list[core.Pod]:
        return [pod for pod in self._cluster.all(PODS) if pod.spec.node_name == machine.node_name and is_ready(pod)]

    def is_idle(self, pod: core.Pod) -> bool:
        """Return whether the pod leaves its GPUs idle now."""
        return self._workloads.is_idle(pod)

    def spot(self) -> list[Machine]:
        """Return running spot machines without a notice."""
        return [
            machine
            for machine in self.machines
            if machine.state == "running"
            and machine.offer.capacity_type is CapacityType.SPOT
            and machine.notice is None
        ]


def labels_of(offer: Offer, node_name: str) -> dict[str, str]:
    """Return the labels that every cloud sets on a node."""
    node_labels = {
        labels.HOSTNAME: node_name,
        labels.INSTANCE_TYPE: offer.instance_type,
        labels.ZONE: offer.zone,
        labels.CAPACITY_TYPE: str(offer.capacity_type),
        labels.GPU_MODEL: offer.gpu_model or "",
    }
    return {key: value for key, value in node_labels.items() if value}
