"""Which offer of less price was not taken, and why: what a person asks first of a purchase. Told in its reason."""

import msgspec
import numpy as np

from gpu_autoscaler.core.buying.choice import Choice
from gpu_autoscaler.core.buying.market import Market
from gpu_autoscaler.core.placing.shapes import Shape
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.passed import RejectionCause, RejectedOffer
from gpu_autoscaler.model.resources import Resources

_PRICE_UNKNOWN = -1


class Cheaper:
    """Finds what has the least price for the load of a node. The same load is looked for once."""

    def __init__(self, market: Market) -> None:
        self._market = market
        self._found: dict[tuple[int, Shape, Resources], int | None] = {}

    def than(self, taken: int, shape: Shape, load: Resources) -> int | None:
        """Return the sale of least price below that of the one taken that would hold the load; work of this shape
        is on it, and whether that may be on spot is not asked. None: there is none."""
        asked = (taken, shape, load)
        if asked not in self._found:
            self._found[asked] = self._look(taken, shape, load)
        return self._found[asked]

    def _look(self, taken: int, shape: Shape, load: Resources) -> int | None:
        market = self._market
        prices = market.prices_micro_usd_per_hour
        anywhere = msgspec.structs.replace(shape, resources=load, is_spot_allowed=True)
        is_cheaper = (prices < prices[taken]) & (prices != _PRICE_UNKNOWN)
        would_do = is_cheaper & (market.members_in_principle(anywhere) > 0)
        places = np.flatnonzero(would_do)
        return int(places[prices[places].argmin()]) if places.size else None


def passed_over(
    cheaper: int, taken: int, shape: Shape, priority: int, market: Market, choice: Choice, *, is_within_limits: bool
) -> RejectedOffer:
    """Return why the cheaper sale was not taken for work of this shape; as things stand before the other is bought."""
    sale = market.sales[cheaper]
    offer = sale.offer
    if offer.capacity_type is CapacityType.SPOT and not shape.is_spot_allowed:
        because = RejectionCause.SPOT_NOT_ALLOWED
    elif market.refused_until(offer) is not None:
        because = RejectionCause.UNAVAILABLE
    elif not is_within_limits:
        because = RejectionCause.LIMIT
    else:
        because = choice.why_not(cheaper, taken, priority)
    return RejectedOffer(offer=offer.key, price_micro_usd_per_hour=sale.price_micro_usd_per_hour, because=because)
