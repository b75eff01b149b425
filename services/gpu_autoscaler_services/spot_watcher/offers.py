"""Asks the provider what is for sale, and says it when it changes and at least every five minutes."""

from datetime import datetime, timedelta

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler_services.spot_watcher.annotated import annotated_notices

ASKED = timedelta(seconds=60)
REPEATED = timedelta(seconds=300)  # said again although nothing has changed: prices have an age
EPOCH = 1  # samples are counted in Unix seconds, a count that never starts over


class CentralOffers:
    """Role `central`: offers, and notices by annotation where the policy takes them.

    What was said last is read from the record, so a sample that was never stored is said again.
    """

    def __init__(self, view: StateView, provider: CapacityProvider, policy: ScalingPolicy | None = None) -> None:
        self._view = view
        self._provider = provider
        self._policy = policy or ScalingPolicy()
        self._asked_at: datetime | None = None

    def use_policy(self, policy: ScalingPolicy) -> None:
        """Look under this policy from now on."""
        self._policy = policy

    async def look(self, now: datetime) -> list[Fact]:
        """Return what is new. Raises TransientError; then the next tick asks again."""
        annotated = annotated_notices(self._view.state, now) if self._policy.spot.is_test_annotation_on else []
        return annotated or await self._offers(now)

    async def _offers(self, now: datetime) -> list[Fact]:
        """Return the offers if they are new or long unsaid."""
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
