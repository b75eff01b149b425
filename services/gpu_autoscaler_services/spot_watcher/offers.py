"""Asks the provider what is for sale, and says it when it changes and at least every five minutes."""

from datetime import datetime, timedelta

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler.runtime.projection import StateView

ASKED = timedelta(seconds=60)
REPEATED = timedelta(seconds=300)  # said again although nothing has changed: prices have an age
EPOCH = 1  # samples are counted in Unix seconds, a count that never starts over


class CentralOffers:
    """What was said last is read from the record, so a sample that was never stored is said again."""

    def __init__(self, view: StateView, provider: CapacityProvider) -> None:
        self._view = view
        self._provider = provider
        self._asked_at: datetime | None = None

    async def look(self, now: datetime) -> list[Fact]:
        """Return the offers if they are new or long unsaid. Raises TransientError; then the next tick asks again."""
        told = self._view.state.offers
        is_fresh = self._asked_at is not None and now - self._asked_at < ASKED
        if told is not None and is_fresh:
            return []
        offers = tuple(sorted(await self._provider.offers(), key=lambda offer: offer.key))
        self._asked_at = now
        if told is not None and told.offers == offers and now - told.sampled_at < REPEATED:
            return []
        return [
            SpotOffersSampled(
                epoch=EPOCH,
                version=int(now.timestamp()),
                provider=self._provider.name,
                offers=offers,
                sampled_at=now,
            )
        ]
