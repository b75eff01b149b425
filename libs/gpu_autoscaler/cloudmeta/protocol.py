"""What every cloud's instance metadata can tell us, in one form."""

from datetime import datetime
from typing import Protocol

import msgspec

from gpu_autoscaler.events.spot import NoticeKind
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.observed import Instant


class ReclaimNotice(msgspec.Struct, frozen=True):
    """The instance will be taken. Read again, the same notice is equal."""

    kind: NoticeKind
    provider_event: str  # the cloud's event id, or its deadline as text where it has none
    reclaim_at: Instant | None


class InstanceMetadata(Protocol):
    """The metadata address of one instance. Every call has a time limit of its own.

    All methods raise TransientError when the address cannot be read: that is not "no notice".
    """

    async def reclaim_notice(self) -> ReclaimNotice | None:
        """Return the notice that stands, None if the cloud says there is none."""
        ...

    async def rebalance_recommended_at(self) -> datetime | None:
        """Return the instant of the hint that stands, None if the cloud says there is none."""
        ...

    async def provider_id(self) -> ProviderId:
        """Return which instance this is, in the form of Kubernetes' spec.providerID."""
        ...
