"""Facts about interruptible capacity: notices, hints, and what is for sale at which price."""

from typing import Literal

from gpu_autoscaler.events.fact import Fact, Versioned
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Offer

# `paid_period_over`: nobody takes the instance, its time is up (a capacity block, a reservation with an end).
NoticeKind = Literal["terminate", "stop", "hibernate", "maintenance", "paid_period_over"]
# How we came to know: the instance's metadata, a queue of the cloud's events, the end of what is paid for, a person.
NoticeWay = Literal["metadata", "queue", "calendar", "annotation"]


def notice_id(provider_id: str, kind: str, provider_event: str) -> str:
    """Name of a notice: instance, kind and the provider's own event; repeats of it are one condition."""
    return f"spot_notice/{provider_id}/{kind}/{provider_event}"


class SpotNoticeReceived(Fact, frozen=True, kw_only=True):
    """The cloud will take this instance. A repeat may bring an earlier deadline; the earliest wins."""

    provider_id: ProviderId
    kind: NoticeKind
    provider_event: str  # the provider's event id, or its deadline where it has none
    reclaim_at: Instant | None  # None: the notice carried no deadline
    node_name: str | None = None
    received_at: Instant
    withdrawn_at: Instant | None = None  # when the cloud had taken this very notice back before; None: never
    way: NoticeWay = "metadata"  # what came one way is not taken back because another way does not show it

    @property
    def notice_id(self) -> str:
        """Name of the notice."""
        return notice_id(self.provider_id, self.kind, self.provider_event)

    def condition(self) -> str | None:
        """The notice with its deadline: the same one read again is one fact, an earlier deadline is another.

        So is a notice that comes back: under its first name the broker would take it for a repeat, and drop it.
        """
        deadline = "" if self.reclaim_at is None else self.reclaim_at.isoformat()
        back = "" if self.withdrawn_at is None else f"/back/{self.withdrawn_at.isoformat()}"
        return f"{self.notice_id}/{deadline}{back}"

    def entity(self) -> str | None:
        """The instance."""
        return f"instance/{self.provider_id}"


class SpotNoticeWithdrawn(Fact, frozen=True, kw_only=True):
    """The cloud takes its notice back; the instance stays."""

    provider_id: ProviderId
    kind: NoticeKind
    provider_event: str
    withdrawn_at: Instant
    received_at: Instant | None = None  # of the word that is taken back; None: not said

    @property
    def notice_id(self) -> str:
        """Name of the notice that no longer stands."""
        return notice_id(self.provider_id, self.kind, self.provider_event)

    def condition(self) -> str | None:
        """A word of the cloud is taken back once."""
        word = "" if self.received_at is None else f"/{self.received_at.isoformat()}"
        return f"{self.notice_id}/withdrawn{word}"

    def entity(self) -> str | None:
        """The instance."""
        return f"instance/{self.provider_id}"


class SpotRebalanceRecommended(Fact, frozen=True, kw_only=True):
    """The cloud hints that this instance is likelier to be taken; no deadline, no certainty."""

    provider_id: ProviderId
    noticed_at: Instant
    node_name: str | None = None

    def condition(self) -> str | None:
        """One hint an instance and instant."""
        return f"spot_rebalance/{self.provider_id}/{self.noticed_at.isoformat()}"

    def entity(self) -> str | None:
        """The instance."""
        return f"instance/{self.provider_id}"


class SpotOffersSampled(Versioned, frozen=True, kw_only=True):
    """All that is for sale, with prices. Whole, not a difference; `version` is the sample's Unix second."""

    provider: str
    offers: tuple[Offer, ...]
    sampled_at: Instant

    def condition(self) -> str | None:
        """One sample a provider and version."""
        return f"spot_offers/{self.provider}/{self.epoch}/{self.version}"
