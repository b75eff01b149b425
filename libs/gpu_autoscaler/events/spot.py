"""Facts about interruptible capacity: interruption notices, rebalance recommendations, offers and prices."""

from typing import ClassVar, Literal

from gpu_autoscaler.events.fact import Fact, Versioned
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Offer

# `paid_period_over`: a capacity block or reservation ends; the cloud does not reclaim the instance early.
NoticeKind = Literal["terminate", "stop", "hibernate", "maintenance", "paid_period_over"]
# Source of a notice: instance metadata, a queue of cloud events, the end of a reservation, a node annotation.
NoticeChannel = Literal["metadata", "queue", "calendar", "annotation"]


def notice_id(provider_id: str, kind: str, provider_event: str) -> str:
    """Id of a notice: instance, kind and event of the provider; equal for repeats."""
    return f"spot_notice/{provider_id}/{kind}/{provider_event}"


class SpotNoticeReceived(Fact, frozen=True, kw_only=True):
    """The cloud will reclaim this instance. A repeat may carry an earlier deadline; the earliest applies."""

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("received_at",)

    provider_id: ProviderId
    kind: NoticeKind  # what the cloud does to the instance
    provider_event: str  # the provider's event id, or its deadline where it has none
    reclaim_at: Instant | None  # None: the notice carried no deadline
    node_name: str | None = None
    received_at: Instant
    withdrawn_at: Instant | None = None  # when the cloud had withdrawn the same notice before; None: never
    channel: NoticeChannel = "metadata"  # its absence in another source does not withdraw it

    @property
    def notice_id(self) -> str:
        return notice_id(self.provider_id, self.kind, self.provider_event)

    def condition(self) -> str | None:
        """The notice with its deadline: an earlier deadline is another fact.

        So is a notice that returns after a withdrawal: the broker would drop it as a duplicate otherwise.
        """
        deadline = "" if self.reclaim_at is None else self.reclaim_at.isoformat()
        back = "" if self.withdrawn_at is None else f"/back/{self.withdrawn_at.isoformat()}"
        return f"{self.notice_id}/{deadline}{back}"

    def entity(self) -> str | None:
        return f"instance/{self.provider_id}"


class SpotNoticeWithdrawn(Fact, frozen=True, kw_only=True):
    """The cloud withdrew its notice; the instance stays."""

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("withdrawn_at",)

    provider_id: ProviderId
    kind: NoticeKind  # what the cloud was to do to the instance
    provider_event: str  # of the withdrawn notice: the provider's event id, or its deadline where it has none
    withdrawn_at: Instant  # when the cloud withdrew it
    received_at: Instant | None = None  # of the withdrawn notice; None if unknown

    @property
    def notice_id(self) -> str:
        return notice_id(self.provider_id, self.kind, self.provider_event)

    def condition(self) -> str | None:
        """One fact per received notice."""
        received = "" if self.received_at is None else f"/{self.received_at.isoformat()}"
        return f"{self.notice_id}/withdrawn{received}"

    def entity(self) -> str | None:
        return f"instance/{self.provider_id}"


class SpotRebalanceRecommended(Fact, frozen=True, kw_only=True):
    """The cloud reports an elevated interruption risk for this instance, without a deadline."""

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("noticed_at",)

    provider_id: ProviderId
    noticed_at: Instant
    node_name: str | None = None

    def condition(self) -> str | None:
        """One fact per instance and time."""
        return f"spot_rebalance/{self.provider_id}/{self.noticed_at.isoformat()}"

    def entity(self) -> str | None:
        return f"instance/{self.provider_id}"


class SpotOffersSampled(Versioned, frozen=True, kw_only=True):
    """All available offers with prices; a complete list. `version` is the Unix second of the sample."""

    provider: str  # name of the cloud's adapter
    offers: tuple[Offer, ...]  # all that are available
    sampled_at: Instant

    def condition(self) -> str | None:
        """One fact per provider and version."""
        return f"spot_offers/{self.provider}/{self.epoch}/{self.version}"
