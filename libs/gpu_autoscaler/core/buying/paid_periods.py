"""Capacity that is paid for a period, used or not (capacity blocks, reservations with an end): when it can be bought.

While the period is open a node of it costs nothing more, so what waits uses it first (`core/buying/choice.py`); its end
is a notice, before which its work has to move. Asked by the market.
"""

from collections.abc import Iterable
from datetime import datetime

import numpy as np

from gpu_autoscaler.core.placing.amounts import Bools, Floats
from gpu_autoscaler.core.words.wording import instant
from gpu_autoscaler.model.offers import Offer


class PaidPeriods:
    """The periods of many offers, in their order."""

    def __init__(self, offers: Iterable[Offer]) -> None:
        offers = tuple(offers)
        self._opens = np.array([_second(offer.paid_from, -np.inf) for offer in offers], dtype=np.float64)
        self._closes = np.array([_second(offer.paid_until, np.inf) for offer in offers], dtype=np.float64)
        self.has_end: Bools = np.isfinite(self._closes)
        self.any = bool(self.has_end.any() or np.isfinite(self._opens).any())

    def are_open(self, as_of: datetime, needed_seconds: Floats) -> Bools:
        """Return for each offer whether its period is open, and stays so for longer than is needed to be of use."""
        now = as_of.timestamp()
        return (self._opens <= now) & (now + needed_seconds < self._closes)

    def told(self, offers: Iterable[Offer], as_of: datetime) -> str | None:
        """Return what to say where only closed periods are in the way; None: there is something else."""
        closed = [offer for offer in offers if offer.paid_from is not None or offer.paid_until is not None]
        if not closed:
            return None
        ahead = [offer for offer in closed if offer.paid_from is not None and offer.paid_from > as_of]
        if not ahead:
            return f"the paid period of {closed[0].key} is over, or nearly"
        first = min(ahead, key=lambda offer: (offer.paid_from, offer.key))
        assert first.paid_from is not None, "only offers with a beginning are ahead"  # noqa: S101 - as it says
        return f"the paid period of {first.key} begins at {instant(first.paid_from)}"


def _second(at: datetime | None, without: float) -> float:
    return without if at is None else at.timestamp()
