"""What a cloud sells: an instance type in a zone under a capacity type, at a price."""

import enum

import msgspec

from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources, Slices
from gpu_autoscaler.model.scheduling import Taint


class CapacityType(enum.StrEnum):
    """How capacity is bought. One word for each, whatever a cloud calls it (preemptible and low-priority are spot)."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"


class Bar(enum.StrEnum):
    """What keeps an offer from being had, known before it is asked for; in words as a cloud's own for a refusal are."""

    QUOTA = "QuotaTooSmall"
    RESERVATION = "ReservationUsedUp"
    CEILING = "AboveSpotCeiling"  # it costs more than the settings let spot cost
    NO_RESERVATION = "ReservationNotUsable"  # there is none of the name, or nothing is made from it yet, or any more


class NodeMarks(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a node of an offer has of its own when it comes for one pool: its group says so, and no order can."""

    pool: str
    labels: tuple[tuple[str, str], ...] = ()
    taints: tuple[Taint, ...] = ()  # those that stay


class Offer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One purchase that is possible: what a node of it would hold, and what an hour of it costs."""

    instance_type: str
    zone: str
    capacity_type: CapacityType
    resources: Resources  # allocatable to pods, after what the kubelet and DaemonSets take
    gpu_model: str | None = None  # None: no GPU
    gpu_memory_bytes: int | None = None  # of one GPU
    price_micro_usd_per_hour: int | None = None  # None: unknown, which is not free; such an offer is not bought
    price_source: str | None = None  # who said it, in the driver's words; None: not told
    priced_at: Instant | None = None  # when that was, where it is hours before the list; None: with the list
    boot_seconds: float = 120.0  # expected, from order to GPUs allocatable
    paid_from: Instant | None = None  # paid for from then on, used or not; None: paid while it runs
    paid_until: Instant | None = None  # every node of it has to be gone by then
    barred_because: str | None = None  # known not to be had before it is asked for, as under a quota of zero; None: no
    barred_by: Bar | None = None  # None for one that is barred: by a quota, as facts without this field had it
    marks: tuple[NodeMarks, ...] = ()  # by pool, of groups that give their nodes labels and taints
    interruption_ratio: float | None = None  # of spot: the share that is taken, as the cloud publishes it; None: unsaid

    def cut_into(self, slices: Slices) -> Resources:
        """What the node holds once its GPUs are shared as these slices; none: they stay whole."""
        return msgspec.structs.replace(self.resources, gpu_count=0, slices=slices) if slices else self.resources

    def marks_in(self, pool: str) -> NodeMarks:
        """What its node has of its own in this pool; none of either where no group says anything."""
        return next((marks for marks in self.marks if marks.pool == pool), NodeMarks(pool=pool))

    @property
    def key(self) -> str:
        """The offer's name: `p4d.24xlarge/eu-west-1a/spot`."""
        return f"{self.instance_type}/{self.zone}/{self.capacity_type}"
