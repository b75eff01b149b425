"""Polls the provider's offers; publishes them when they change notably, and at least every five minutes."""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.cloudmeta.notices import annotated_notices
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler.runtime.projection import StateView

POLL_INTERVAL = timedelta(seconds=60)
REPEAT_INTERVAL = timedelta(seconds=300)  # of unchanged offers: their age limits purchases
# A list has all offers, and among hundreds of spot prices one has moved a little at every poll.
PRICE_CHANGE_RATIO_MAX = 0.05
EPOCH = 1  # versions are Unix seconds, which never restart


class OffersPoller:
    """Role `central`: offers, and notices by annotation if the policy allows them.

    The last sample is read from the state, so that one that was never stored is published again.
    """

    def __init__(self, view: StateView, provider: CapacityProvider, policy: ScalingPolicy | None = None) -> None:
        self._view = view
        self._provider = provider
        self._policy = policy or ScalingPolicy()
        self._polled_at: datetime | None = None

    def use_policy(self, policy: ScalingPolicy) -> None:
        """Use this policy from now on."""
        self._policy = policy

    async def poll(self, now: datetime) -> list[Fact]:
        """Return new facts. Raises TransientError; the next tick retries."""
        annotated = annotated_notices(self._view.state, now) if self._policy.spot.is_test_annotation_on else []
        return annotated or await self._offers(now)

    async def _offers(self, now: datetime) -> list[Fact]:
        """Return the offers if they changed notably, or were published REPEAT_INTERVAL ago."""
        last = self._view.state.offers
        is_fresh = self._polled_at is not None and now - self._polled_at < POLL_INTERVAL
        if last is not None and is_fresh:
            return []
        offers = tuple(sorted(await self._provider.offers(), key=lambda offer: offer.key))
        self._polled_at = now
        if last is not None and now - last.sampled_at < REPEAT_INTERVAL and are_alike(last.offers, offers):
            return []
        return [
            SpotOffersSampled(
                epoch=EPOCH, version=int(now.timestamp()), provider=self._provider.name, offers=offers, sampled_at=now
            )
        ]


def are_alike(before: Sequence[Offer], after: Sequence[Offer]) -> bool:
    """Return True if the lists differ at most in prices that moved by no more than PRICE_CHANGE_RATIO_MAX."""
    return len(before) == len(after) and all(map(_are_alike, before, after))


def _are_alike(before: Offer, after: Offer) -> bool:
    old, new = before.price_micro_usd_per_hour, after.price_micro_usd_per_hour
    if old is None or new is None or abs(new - old) > PRICE_CHANGE_RATIO_MAX * old:
        return before == after
    return before == msgspec.structs.replace(after, price_micro_usd_per_hour=old, priced_at=before.priced_at)
