"""When a price was last reported, and whether it is too old to buy by."""

from datetime import datetime

from gpu_autoscaler.core.next_change import has_lasted_longer
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.offers import Offer


def priced_at(offer: Offer, sampled: SpotOffersSampled) -> datetime | None:
    """Return when the price was last reported; None: there is no price."""
    if offer.price_micro_usd_per_hour is None:
        return None
    return sampled.sampled_at if offer.priced_at is None else min(offer.priced_at, sampled.sampled_at)


def oldest_seconds(sampled: SpotOffersSampled | None, as_of: datetime) -> float | None:
    """Return the age of the oldest price; None: there is no price."""
    if sampled is None:
        return None
    ages = [(as_of - at).total_seconds() for offer in sampled.offers if (at := priced_at(offer, sampled)) is not None]
    return max(0.0, *ages) if ages else None


def is_stale(offer: Offer, sampled: SpotOffersSampled, policy: ScalingPolicy, as_of: datetime) -> bool:
    """True for a price older than the policy allows."""
    at = priced_at(offer, sampled)
    return at is not None and has_lasted_longer(at, policy.prices.age_seconds_max, as_of)
