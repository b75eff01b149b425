"""What a cloud sells: an instance type in a zone under a capacity type, at a price."""

import enum

import msgspec

from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources, Slices
from gpu_autoscaler.model.scheduling import Taint


class CapacityType(enum.StrEnum):
    """How capacity is bought. One name for all clouds: preemptible and low-priority are spot."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"


class UnavailabilityCause(enum.StrEnum):
    """Why an offer is known to be unavailable without a launch attempt; the values resemble the clouds' error codes."""

    QUOTA = "QuotaTooSmall"
    RESERVATION = "ReservationUsedUp"
    CEILING = "AboveSpotCeiling"  # it costs more than the spot price ceiling of the settings
    NO_RESERVATION = "ReservationNotUsable"  # it does not exist, or is not active yet or any more


class NodeMarks(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Labels and taints that the node group of an offer gives its nodes in one pool; an order cannot change them."""

    pool: str
    labels: tuple[tuple[str, str], ...] = ()  # (key, value), sorted by key
    taints: tuple[Taint, ...] = ()  # without startup taints


class Offer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One possible purchase: the capacity of its node and the price per hour."""

    instance_type: str
    zone: str
    capacity_type: CapacityType
    resources: Resources  # allocatable to pods, after what the kubelet and DaemonSets take
    gpu_model: str | None = None  # None: no GPU
    gpu_memory_bytes: int | None = None  # of one GPU; None: unknown
    price_micro_usd_per_hour: int | None = None  # None: unknown; such an offer is not bought
    price_source: str | None = None  # where the price comes from; None: unknown
    priced_at: Instant | None = None  # time of the price if it is hours older than the list; None: that of the list
    boot_seconds: float = 120.0  # expected, from order to GPUs allocatable
    paid_from: Instant | None = None  # paid for from then on, used or not (reservations); None: paid while it runs
    paid_until: Instant | None = None  # every node of it must be terminated by then; None: no end
    unavailable_because: str | None = None  # why it is unavailable, as with a quota of zero; None: available
    unavailable_by: UnavailabilityCause | None = None  # None: available, or a quota is the cause
    marks: tuple[NodeMarks, ...] = ()  # per pool, for node groups that set labels and taints
    interruption_ratio: float | None = None  # of spot: share interrupted, as the cloud publishes it; None: unknown

    def cut_into(self, slices: Slices) -> Resources:
        """The capacity of the node with its GPUs shared as these slices; none: whole GPUs."""
        return msgspec.structs.replace(self.resources, gpu_count=0, slices=slices) if slices else self.resources

    def marks_in(self, pool: str) -> NodeMarks:
        """The labels and taints of its node group in this pool; empty without any."""
        return next((marks for marks in self.marks if marks.pool == pool), NodeMarks(pool=pool))

    @property
    def key(self) -> str:
        """The key of the offer: `p4d.24xlarge/eu-west-1a/spot`."""
        return f"{self.instance_type}/{self.zone}/{self.capacity_type}"
