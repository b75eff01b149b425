"""Watches interruptible capacity: notices and hints from instance metadata, offers and prices from the provider.

One process has one role: `node` (`NodeNotices`), `nodes` (`NodesNotices`) or `central` (`CentralOffers`).
"""

from datetime import datetime
from typing import ClassVar, Protocol

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeGone, NodeListed, NodeObserved
from gpu_autoscaler.events.spot import (
    SpotNoticeReceived,
    SpotNoticeWithdrawn,
    SpotOffersSampled,
    SpotRebalanceRecommended,
)


class Watch(Protocol):
    """One role's look at the world."""

    async def look(self, now: datetime) -> list[Fact]:
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
        SpotNoticeReceived,
        SpotNoticeWithdrawn,
        SpotOffersSampled,
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

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    async def on_tick(self, now: datetime) -> list[Fact]:
        """Return what is new."""
        return await self._watch.look(now)
