"""Watches interruptible capacity: notices and hints from instance metadata, offers and prices from the provider.

One process has one role: `node` (`NodeNotices`), `nodes` (`NodesNotices`) or `central` (`CentralOffers`, and
`CloudEvents` where the cloud has a queue of them).
"""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import ClassVar, Protocol

from gpu_autoscaler.cloudmeta.protocol import QueuedEvent
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeGone, NodeInstanceObserved, NodeListed, NodeObserved
from gpu_autoscaler.events.scaling import ScalingNodeDrained
from gpu_autoscaler.events.spot import (
    SpotNoticeReceived,
    SpotNoticeWithdrawn,
    SpotOffersSampled,
    SpotRebalanceRecommended,
)
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler_services.spot_watcher.events import CloudEvents


class Watch(Protocol):
    """One role's look at the world."""

    async def look(self, now: datetime) -> Outputs:
        """Return what is new. Raises TransientError if nothing could be seen at all."""
        ...


class SpotWatcher:
    """Says what its role sees, every few seconds. Keeps nothing worth saving: what was said is read from the record."""

    name: ClassVar[str] = "spot_watcher"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = (
        NodeObserved,
        NodeGone,
        NodeListed,
        NodeInstanceObserved,
        SpotNoticeReceived,
        SpotNoticeWithdrawn,
        SpotRebalanceRecommended,
        SpotOffersSampled,
        ScalingNodeDrained,
    )
    publishes: ClassVar[tuple[type[Fact], ...]] = (
        SpotNoticeReceived,
        SpotNoticeWithdrawn,
        SpotRebalanceRecommended,
        SpotOffersSampled,
    )
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    # EC2 User Guide, "Spot Instance interruption notices" (read 2026-11-21) recommends every 5 seconds; so does S75.
    tick_seconds: ClassVar[float | None] = 5.0
    starts_from_snapshot: ClassVar[bool] = False  # folds a few types of facts, which are read soon

    def __init__(self, watch: Watch, events: CloudEvents | None = None) -> None:
        self._watch = watch
        self._events = events

    def sources(self) -> Sequence[AsyncIterator[QueuedEvent]]:
        """Open the queue, where there is one."""
        return [] if self._events is None else [aiter(self._events)]

    async def on_item(self, item: QueuedEvent) -> Sequence[Fact]:
        """Return what an event of the queue says that is new."""
        assert self._events is not None, "an event without a queue"  # noqa: S101
        return await self._events.on_event(item)

    async def on_tick(self, now: datetime) -> Outputs:
        """Return what is new."""
        return await self._watch.look(now)
