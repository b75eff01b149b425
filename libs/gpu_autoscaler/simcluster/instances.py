"""A machine of the simulated cloud, from launch to the end of billing, with its interruption notices."""

from dataclasses import dataclass, field
from datetime import datetime

from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.events.spot import NoticeKind
from gpu_autoscaler.model.ids import ActionId, ProviderId, derive_id
from gpu_autoscaler.model.offers import Offer
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
        """True until its end begins."""
        return self.state in ("pending", "running")

    @property
    def region(self) -> str:
        """The only region."""
        return REGION

    def shown(self) -> Instance:
        """The instance in the format of the capacity API."""
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
