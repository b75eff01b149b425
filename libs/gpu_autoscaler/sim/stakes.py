"""How much of a fleet one storm could have taken: what is spot, of one type, in one zone. Used by the tally."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from gpu_autoscaler.model.offers import CapacityType, Offer


class Held(NamedTuple):
    """A machine, for as long as it is paid."""

    offer: Offer
    from_at: datetime
    to_at: datetime


def storm_ratio(held: Iterable[Held]) -> float | None:
    """Return the share of the GPU-hours that stood, at each moment, in the place that had most of them.

    None where no GPU was held. On-demand and reserved machines are in no such place.
    """
    changes = sorted(_changes(held), key=lambda each: each[0])
    there: Counter[tuple[str, str]] = Counter()
    gpu_count, whole_seconds, worst_seconds = 0, 0.0, 0.0
    for (at, offer, count), until in zip(changes, [at for at, _, _ in changes[1:]], strict=False):
        gpu_count += count
        if offer.capacity_type is CapacityType.SPOT:
            there[offer.instance_type, offer.zone] += count
        seconds = (until - at).total_seconds()
        whole_seconds += gpu_count * seconds
        worst_seconds += max(there.values(), default=0) * seconds
    return worst_seconds / whole_seconds if whole_seconds else None


def _changes(held: Iterable[Held]) -> Sequence[tuple[datetime, Offer, int]]:
    """When GPUs come and go."""
    found = []
    for each in held:
        count = each.offer.resources.gpu_count
        if count and each.to_at > each.from_at:
            found += [(each.from_at, each.offer, count), (each.to_at, each.offer, -count)]
    return found
