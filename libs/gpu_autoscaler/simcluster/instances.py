"""A machine of the simulated cloud, from launch to the end of billing, with its interruption notices."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.events.spot import NoticeKind
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import can_partition, max_slices, mig_profiles_of
from gpu_autoscaler.model.ids import ActionId, ProviderId, derive_id
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE, MIG_RESOURCE_PREFIX, SHARED_GPU_RESOURCE
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.protocol import Instance, Order
from gpu_autoscaler.simcluster.exporter import Telemetry
from gpu_autoscaler.simcluster.offers import REGION, InstanceType

PROVIDER_PREFIX = "sim:///"
BOOT_JITTER_RATIO = 0.1  # fixture: maximum deviation of a machine's boot time from its type's


@dataclass(frozen=True, slots=True)
class Notice:
    """Interruption notice of an instance."""

    kind: NoticeKind
    at: datetime  # when it will be reclaimed


@dataclass(slots=True, kw_only=True, eq=False)
class Machine:
    """An instance as the cloud knows it. Changed by `Cloud` only."""

    instance_id: str
    node_name: str
    internal_ip: str
    action_id: ActionId | None  # the tag; None: made without one
    installation: str | None
    pool: str
    kind: InstanceType
    offer: Offer
    labels: tuple[tuple[str, str], ...]
    taints: tuple[Taint, ...]
    launched_at: datetime
    boot_seconds: float  # of this machine
    telemetry: Telemetry
    foreign_provider_id: ProviderId | None = None  # id in another cloud's API
    state: InstanceState = "pending"
    terminated_at: datetime | None = None
    is_registered: bool = False  # its node was created
    notice: Notice | None = None
    rebalance_at: datetime | None = None
    metadata_tokens: dict[str, datetime] = field(default_factory=dict)  # token: valid until, wall time

    @property
    def provider_id(self) -> ProviderId:
        """Kubernetes' spec.providerID."""
        return self.foreign_provider_id or ProviderId(f"{PROVIDER_PREFIX}{self.offer.zone}/{self.instance_id}")

    @property
    def is_alive(self) -> bool:
        return self.state in ("pending", "running")

    @property
    def region(self) -> str:
        return REGION

    def shown(self) -> Instance:
        return Instance(
            provider_id=self.provider_id,
            action_id=self.action_id,
            state=self.state,
            instance_type=self.offer.instance_type,
            zone=self.offer.zone,
            capacity_type=self.offer.capacity_type,
            price_micro_usd_per_hour=self.offer.price_micro_usd_per_hour,
            launched_at=self.launched_at,
            terminated_at=self.terminated_at,
        )


def new_machine(order: Order, kind: InstanceType, offer: Offer, number: int, now: datetime, jitter: float) -> Machine:
    """Return the order's machine: names depend on token and number, boot time on `jitter` (-1 to 1)."""
    digest = derive_id("instance", order.installation, order.action_id, number)
    node_name = f"{kind.name.replace('.', '-').replace('_', '-').lower()}-{digest[:6]}"
    return Machine(
        instance_id=f"i-{digest[:17]}",
        node_name=node_name,
        internal_ip=f"10.{number // 62500 % 250}.{number // 250 % 250}.{number % 250 + 1}",
        action_id=order.action_id,
        installation=order.installation,
        pool=order.pool,
        kind=kind,
        offer=offer,
        labels=order.labels,
        taints=order.taints,
        launched_at=now,
        boot_seconds=offer.boot_seconds * (1 + BOOT_JITTER_RATIO * jitter),
        telemetry=Telemetry(node_name, kind),
    )


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One instance on the bill."""

    provider_id: ProviderId
    action_id: ActionId | None
    installation: str | None
    instance_type: str
    zone: str
    capacity_type: str
    gpu_count: int
    price_micro_usd_per_hour: int
    launched_at: Instant
    terminated_at: Instant | None  # None: still running, charged up to `as_of`
    cost_micro_usd: int


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """All instances ever launched, in order of launch."""

    as_of: Instant
    total_micro_usd: int
    lines: tuple[InvoiceLine, ...]


def invoice(machines: Iterable[Machine], as_of: datetime) -> Invoice:
    """Return the invoice up to `as_of`, a function of machines and instant."""
    lines = tuple(_line(machine, as_of) for machine in machines)
    return Invoice(as_of=as_of, total_micro_usd=sum(line.cost_micro_usd for line in lines), lines=lines)


def _line(machine: Machine, as_of: datetime) -> InvoiceLine:
    price = machine.offer.price_micro_usd_per_hour
    if price is None:
        raise ValueError(f"{machine.offer.key} was launched without a price and cannot be charged")
    return InvoiceLine(
        provider_id=machine.provider_id,
        action_id=machine.action_id,
        installation=machine.installation,
        instance_type=machine.offer.instance_type,
        zone=machine.offer.zone,
        capacity_type=machine.offer.capacity_type,
        gpu_count=machine.kind.gpu_count,
        price_micro_usd_per_hour=price,
        launched_at=machine.launched_at,
        terminated_at=machine.terminated_at,
        cost_micro_usd=cost_micro_usd(price, (machine.terminated_at or as_of) - machine.launched_at),
    )


_REPLICAS = re.compile(r"(?:time-slicing|mps)-(\d+)")
_COUNTED = re.compile(r"(\d+)x([1-7]g\.\d+gb)")


def shown_gpus(
    gpu_count: int, gpu_model: str | None, gpu_memory_bytes: int | None, node_labels: Mapping[str, str]
) -> dict[str, str]:
    """Return the resources under the mixed strategy; an unknown configuration, or one that the GPU does not support,
    leaves the GPUs whole."""
    whole = {GPU_RESOURCE: str(gpu_count)}
    replicas = _REPLICAS.fullmatch(node_labels.get(labels.DEVICE_PLUGIN_CONFIG, ""))
    if replicas is not None:
        return {GPU_RESOURCE: "0", SHARED_GPU_RESOURCE: str(gpu_count * int(replicas[1]))}
    config, profiles = node_labels.get(labels.MIG_CONFIG, ""), mig_profiles_of(gpu_model, gpu_memory_bytes)
    name = config.removeprefix("all-")
    counts = {name: max_slices(profiles, name)} if name != config else _counted(config)
    if not can_partition(profiles, [name for name, count in counts.items() for _ in range(count)]):
        return whole
    slices = {f"{MIG_RESOURCE_PREFIX}{name}": str(count * gpu_count) for name, count in counts.items()}
    return {GPU_RESOURCE: "0", **slices}


def _counted(config: str) -> dict[str, int]:
    parts = [_COUNTED.fullmatch(part) for part in config.split("_")]
    return {part[2]: int(part[1]) for part in parts if part is not None} if all(parts) else {}
