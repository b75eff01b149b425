"""What every cloud's instance metadata can tell us, in one form."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol, runtime_checkable

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

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        """Return every notice that stands; none if the cloud says so."""
        ...

    async def rebalance_recommended_at(self) -> datetime | None:
        """Return the instant of the hint that stands, None if the cloud says there is none."""
        ...

    async def provider_id(self) -> ProviderId:
        """Return which instance this is, in the form of Kubernetes' spec.providerID."""
        ...


class QueuedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a queue, as it was received this time."""

    receipt: str  # by which this receipt of it is answered
    body: str
    sent_at: Instant
    received_at: Instant


class EventQueue(Protocol):
    """A cloud's events about its instances, in a queue. What is not deleted comes again.

    All methods raise TransientError when the queue cannot be reached, or refuses.
    """

    async def receive(self) -> Sequence[QueuedEvent]:
        """Return what waits, a few at a time; nothing after some seconds of waiting."""
        ...

    async def delete(self, event: QueuedEvent) -> None:
        """It is done with."""
        ...

    async def hide(self, event: QueuedEvent, seconds: float) -> None:
        """Let it not come again for so long, or for as long as the queue can hide it."""
        ...

    async def complete_hook(self, group: str, hook: str, token: str) -> None:
        """Tell the group that its instance may end. A hook that waits no more is no error."""
        ...

    async def extend_hook(self, group: str, hook: str, token: str) -> None:
        """Tell the group that its instance is not ready to end yet. A hook that waits no more is no error."""
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...


@runtime_checkable
class WaitsForDrains(Protocol):
    """Metadata of a cloud that holds an event until its deadline, or until it is told that nothing runs there."""

    async def release(self, drained: Collection[ProviderId]) -> None:
        """Let those events start now, once, of which every machine is among `drained`. Raises TransientError."""
        ...
