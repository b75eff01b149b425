"""How old the prices of what is for sale are. Read by the market, by `gpu-autoscaler offers` and by the metric.

A price is as old as the word of its source, and of a list that nobody reads any more all prices grow old.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import numpy as np

from gpu_autoscaler.core.placing.amounts import Bools
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.offers import Offer


def priced_at(offer: Offer, told: SpotOffersSampled) -> datetime | None:
    """Return when the price was heard of last, None where there is none."""
    if offer.price_micro_usd_per_hour is None:
        return None
    return told.sampled_at if offer.priced_at is None else min(offer.priced_at, told.sampled_at)


def oldest_seconds(told: SpotOffersSampled | None, as_of: datetime) -> float | None:
    """Return the age of the oldest price, None where there is no price at all."""
    if told is None:
        return None
    ages = [(as_of - at).total_seconds() for one in told.offers if (at := priced_at(one, told)) is not None]
    return max(0.0, *ages) if ages else None


def is_stale(offer: Offer, told: SpotOffersSampled, policy: ScalingPolicy, as_of: datetime) -> bool:
    """True for a price that is older than the policy has it."""
    at = priced_at(offer, told)
    return at is not None and as_of - at > timedelta(seconds=policy.prices.age_seconds_max)


def are_fresh(offers: Sequence[Offer], told: SpotOffersSampled, policy: ScalingPolicy, as_of: datetime) -> Bools:
    """Return for each offer, in their order, whether its age does not stand against buying it."""
    return np.array([not is_stale(one, told, policy, as_of) for one in offers], dtype=np.bool_)
