"""Watches interruptible capacity: notices from instance metadata, offers and prices from the provider.

Roles: `nodes` (`ManagedNodesPoller`), `central` (`OffersPoller`, `InterruptionQueue`). Role `node` is no service: see
`node_reporter.py`.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import ClassVar, Protocol

from gpu_autoscaler.cloudmeta.protocol import QueuedEvent
from gpu_autoscaler.events.catalog import INSTANCE_FACTS
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import (
    SpotNoticeReceived,
    SpotNoticeWithdrawn,
    SpotOffersSampled,
    SpotRebalanceRecommended,
)
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler_services.spot_watcher.interruption_queue import InterruptionQueue


class Watch(Protocol):
    """What one role polls."""

    async def poll(self, now: datetime) -> Outputs:
        """Return new facts. Raises TransientError if nothing could be read."""


class SpotWatcher:
    """Polls what its role watches. Keeps no state worth saving: published facts are read back from the streams."""

    name: ClassVar[str] = "spot_watcher"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = INSTANCE_FACTS
    publishes: ClassVar[tuple[type[Fact], ...]] = (
        SpotNoticeReceived,
        SpotNoticeWithdrawn,
        SpotRebalanceRecommended,
        SpotOffersSampled,
    )
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    # EC2 User Guide, "Spot Instance interruption notices", recommends every 5 seconds (read 2026-11-21).
    tick_seconds: ClassVar[float | None] = 5.0

    def __init__(self, watch: Watch, events: InterruptionQueue | None = None) -> None:
        self._watch = watch
        self._events = events

    def sources(self) -> Sequence[AsyncIterator[QueuedEvent]]:
        """Return the queue, if there is one."""
        return [] if self._events is None else [aiter(self._events)]

    async def on_item(self, item: QueuedEvent) -> Sequence[Fact]:
        """Return the new facts of a queue message."""
        assert self._events is not None, "an event without a queue"  # noqa: S101
        return await self._events.on_event(item)

    async def on_tick(self, now: datetime) -> Outputs:
        """Return the new facts of this poll."""
        return await self._watch.poll(now)
